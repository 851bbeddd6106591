"""The connection, factory and context that applications use.

Hops 4 and 6 of a message. A factory reads a URL, and connects to the first host that
accepts a connection. A new connection delivers messages without a call of ``start``. A
context combines a connection with its only session. The setters of a context's producer
can be chained, as in Jakarta Messaging's simplified API: ::

    context.create_producer().set_async(listener).set_priority(4).send("orders", "text")
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

from . import completion
from .bases import Closing, Liveness
from .completion import CompletionFuture, CompletionListener
from .consumer import AckMode, MessageConsumer
from .destination import Destination
from .errors import ConnectionFailedError
from .message import DeliveryMode, Message
from .options import Options, read_url
from .session import Session

#: Seconds that an exiting process gives its outstanding sends.
EXIT_BUDGET = 2.0
_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection(Liveness):
    """A connection to a broker, created by ``factory.create_connection``. The
    application opens sessions of the connection, and must close the connection at the
    end."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect. Raises ``ConnectionFailedError`` or ``OSError`` within the
        time-out."""
        self._sessions: list[Session] = []
        super().__init__(address, options)
        _open.add(self)

    def __del__(self) -> None:
        """End the connection when nothing refers to it. Otherwise the connection's
        threads would keep it open for ever."""
        link = getattr(self, "link", None)
        if link is not None and not (self._closing or link.inherited):
            text = f"{self!r} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
            link.transport.drop()

    def create_session(
        self,
        transacted: bool = False,  # as in Jakarta Messaging
        ack_mode: AckMode = AckMode.INDIVIDUAL,
    ) -> Session:
        """Open a session. A session sends messages in order, limits the number of
        messages without an outcome, and has one transaction at a time."""
        self.check_usable()
        session = Session(
            self,
            transacted=transacted,
            ack_mode=ack_mode,
            on_closed=self._session_closed,
        )
        with self.link.lock:
            self.check_usable()
            self._sessions.append(session)
        return session

    def _session_closed(self, session: Session) -> None:
        with self.link.lock:
            if session in self._sessions:
                self._sessions.remove(session)

    def close(self) -> None:
        """Wait for outstanding sends and their callbacks, then disconnect from the
        broker.

        Every send has an outcome by its deadline at the latest. Raises
        ``IllegalStateError`` inside a callback of this connection.
        """
        link = self.link
        if link.inherited:
            return
        link.refuse_inside()
        completion.refuse_own(link, "close its own connection")
        with link.lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.refuse_own("close")
        with link.lock:
            first, self._closing = not self._closing, True
            sessions = list(self._sessions)
            while not first and not link.closed:  # another thread closes it: share
                link.changed.wait(0.5)
        if not first:
            return
        try:
            link.ending = True
            for session in sessions:
                session.begin_close()
            for session in sessions:
                session.close()
            if not self.failed:
                link.say_goodbye()
        finally:
            link.close()
            _open.discard(self)

    def wait_for_sends(self, give_up: float) -> int:
        """Wait for outstanding sends, at most until the monotonic time ``give_up``.
        Return the number of sends that are still outstanding."""
        sessions = list(self._sessions)
        return sum(session.sends.wait_until(give_up) for session in sessions)


class ContextProducer:
    """A producer, created by ``context.create_producer``. Every setter returns the
    producer."""

    def __init__(self, context: Context) -> None:
        """Start with the default delivery options and with synchronous sends."""
        self._context = context
        self._producer = context.session.create_producer()
        self._listener: CompletionListener | tuple[object, object] | None = None

    def set_async(
        self, listener: CompletionListener | tuple[object, object] | None
    ) -> ContextProducer:
        """Set the listener of later sends. ``None`` makes later sends synchronous
        again."""
        if listener is not None:
            self._context.session.link.options.check_asynchronous()
            completion.as_listener(listener)  # raises, if it is none
        self._listener = listener
        return self

    def get_async(self) -> CompletionListener | tuple[object, object] | None:
        """Return the listener that was set, or ``None`` if sends are synchronous."""
        return self._listener

    def set_delivery_mode(self, mode: DeliveryMode) -> ContextProducer:
        """Set whether messages survive a restart of the broker."""
        return self._deliver(mode=mode)

    def set_priority(self, priority: int) -> ContextProducer:
        """Set the priority, 0 to 9."""
        return self._deliver(priority=priority)

    def set_time_to_live(self, time_to_live: timedelta) -> ContextProducer:
        """Set how long the broker keeps a message. ``timedelta(0)``, the default, sets
        no limit."""
        return self._deliver(time_to_live=time_to_live)

    def set_delivery_delay(self, delay: timedelta) -> ContextProducer:
        """Set the time that the broker waits before it delivers a message."""
        return self._deliver(delay=delay)

    def _deliver(self, **chosen: Any) -> ContextProducer:
        self._producer.delivery = replace(self._producer.delivery, **chosen)
        return self

    def send(
        self, destination: str | Destination, body: Any, *, timeout: float | None = None
    ) -> ContextProducer:
        """Send a body or a ``Message``. If a listener is set, send asynchronously."""
        message = _message(body)
        if self._listener is None:
            self._producer.send(message, destination=destination, timeout=timeout)
        else:
            self._producer.send_async(
                message, self._listener, destination=destination, timeout=timeout
            )
        return self

    def submit(
        self, destination: str | Destination, body: Any, *, timeout: float | None = None
    ) -> CompletionFuture:
        """Send a body or a ``Message``, and return a future of the outcome."""
        return self._producer.submit(
            _message(body), destination=destination, timeout=timeout
        )


class Context(Closing):
    """A context, created by ``factory.create_context``. It owns its connection."""

    def __init__(
        self, connection: Connection, *, transacted: bool, ack_mode: AckMode
    ) -> None:
        """Open the only session of the connection."""
        self.connection = connection
        self.session = connection.create_session(transacted, ack_mode)

    def create_producer(self) -> ContextProducer:
        """Create a producer that is not bound to a destination."""
        return ContextProducer(self)

    def create_consumer(
        self, destination: str | Destination, **options: Any
    ) -> MessageConsumer:
        """Subscribe to the destination. The options are the same as for
        ``session.create_consumer``."""
        return self.session.create_consumer(destination, **options)

    def acknowledge(self, message: Message) -> None:
        """Acknowledge only this message."""
        self.session.acknowledge(message)

    def commit(self) -> None:
        """Commit the session's transaction."""
        self.session.commit()

    def rollback(self) -> None:
        """Roll the session's transaction back."""
        self.session.rollback()

    def recover(self) -> None:
        """Make the consumers receive unacknowledged messages again."""
        self.session.recover()

    def start(self) -> None:
        """Resume all consumers after ``stop``."""
        self.connection.start()

    def stop(self) -> None:
        """Pause all consumers."""
        self.connection.stop()

    def close(self) -> None:
        """Wait for outstanding sends, then close the session and the connection."""
        self.connection.close()


def _message(body: Any) -> Message:
    return body if isinstance(body, Message) else Message(body)


class ConnectionFactory:
    """Opens connections to the first host that accepts one."""

    def __init__(self, url: str, **options: Any) -> None:
        """Read the URL. Keyword options override the options in the URL's query.

        Raises ``ValueError`` for a malformed URL or an unknown option, and ``OSError``
        or ``ssl.SSLError`` if a certificate file cannot be read.
        """
        self.options, self.addresses = read_url(url, options)

    def __repr__(self) -> str:
        """Show the hosts, without credentials."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"<ConnectionFactory {hosts}>"

    def create_connection(self) -> Connection:
        """Connect to the first host that accepts the connection.

        Raises ``ConnectionFailedError`` if no host accepts. The error's text has the
        reason for every host.
        """
        reasons = []
        for address in self.addresses:
            try:
                return Connection(address, self.options)
            except ConnectionFailedError as error:
                reasons.append(str(error))
            except OSError as error:
                reasons.append(f"{address[0]}:{address[1]}: {error}.")
        raise ConnectionFailedError(
            "No broker took the connection. " + " ".join(reasons)
        )

    def create_context(
        self, *, transacted: bool = False, ack_mode: AckMode = AckMode.INDIVIDUAL
    ) -> Context:
        """Open a connection and one session, and return both as one ``Context``."""
        connection = self.create_connection()
        return Context(connection, transacted=transacted, ack_mode=ack_mode)


def _abandon_all() -> None:
    for connection in list(_open):
        connection.link.transport.abandon()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


@atexit.register
def _drain_all() -> None:
    """When the interpreter exits, wait briefly for outstanding sends. Then log the
    number of sends without an outcome."""
    give_up = time.monotonic() + EXIT_BUDGET
    left = sum(connection.wait_for_sends(give_up) for connection in list(_open))
    if left:
        completion.logger.warning(
            "%d asynchronous sends had no outcome when the process ended; close "
            "the connection before exit to wait for them.",
            left,
        )
