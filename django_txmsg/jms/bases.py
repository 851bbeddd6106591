"""The base classes of a connection and of a session: the parts on which the modules
between the two depend.

Hops 4 and 6 of a message. A connection that has lost its link never works again. The
application then opens a new connection with the factory.

A session keeps its sends in order, limits the number of sends in flight, and has one
transaction at a time. With one lock held, the session reserves room in the window, a
place in the order of callbacks, and a place in the writer's queue. So callbacks run in
the order in which the frames are written.
"""

from __future__ import annotations

import abc
import threading
import time
from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial
from typing import TypeVar

from . import completion, frames
from .destination import Destination
from .dialect import Dialect
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessagingError,
    UnsupportedOperationError,
)
from .link import Link
from .message import (
    DEFAULT,
    ID_HEADER,
    RESERVED_HEADERS,
    Delivery,
    DeliveryMode,
    Encoded,
    Message,
    Provided,
    new_id,
)
from .options import Options
from .sends import Sends
from .transaction import Transaction

_MILLISECOND = timedelta(milliseconds=1)
Self = TypeVar("Self", bound="Closing")


class Closing(abc.ABC):
    """A context manager that calls `close()` at the end of its block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the object. Further calls have no effect."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Liveness(Closing):
    """The base class of a connection. It owns the link to the broker, and knows whether
    the connection has failed or was closed. A session uses only this part of its
    connection."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect. Raises ``ConnectionFailedError`` or ``OSError`` within the
        time-out."""
        self.address = address
        self._closing = False
        self.link = Link(address, options)

    def __repr__(self) -> str:
        """Show the address."""
        return f"<Connection to {self.address[0]}:{self.address[1]}>"

    @property
    def dialect(self) -> Dialect:
        """The dialect of the broker to which this connection was opened."""
        return self.link.dialect

    @property
    def error(self) -> MessagingError | None:
        """The error that made the connection fail, or ``None`` if the connection has
        not failed."""
        return self.link.error

    @property
    def failed(self) -> bool:
        """Whether the connection ended without a call of ``close``."""
        return self.link.error is not None

    @property
    def closed(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._closing or self.failed or self.link.inherited

    @property
    def ignored_receipts(self) -> int:
        """The number of receipts and errors that arrived late, arrived twice, or
        matched no frame."""
        return self.link.ledger.ignored

    def check_usable(self) -> None:
        """Raise ``IllegalStateError``, or the error that made the connection fail."""
        self.link.check_alive()
        if self._closing:
            raise IllegalStateError("The connection is closed.")

    def ping(self, timeout: float = 5.0) -> float:
        """Check that the broker handles our frames. Return the seconds until the
        broker's answer.

        Raises ``RequestTimeoutError`` or ``ConnectionLostError``.
        """
        self.check_usable()
        began = time.monotonic()
        self.link.barrier(timeout=timeout).wait()
        return time.monotonic() - began

    def stop(self) -> None:
        """Pause all consumers, without waiting for them. Sending is not affected."""
        self._deliver(on=False)

    def start(self) -> None:
        """Resume all consumers after ``stop``."""
        self._deliver(on=True)

    def _deliver(self, *, on: bool) -> None:
        self.check_usable()
        with self.link.lock:
            self.link.delivering = on
            self.link.changed.notify_all()


def _address_lines(dialect: Dialect, target: Destination) -> bytes:
    return frames.header_lines(dialect.send_headers(target).items())


class SendingSession(Closing):
    """The part of a session that producers and batches use."""

    def __init__(self, connection: Liveness, *, transacted: bool) -> None:
        """Create a session of this connection, without writing to the broker."""
        self.connection = connection
        self.link = link = connection.link
        self.transacted = transacted
        self.sends = Sends(link)
        #: Whether it accepts no more sends.
        self.closing = False
        self._address_lines = lru_cache(1000)(partial(_address_lines, link.dialect))
        self._transaction: Transaction | None = None
        # Held by the thread that commits or rolls back.
        self._ending = threading.RLock()

    # -- state --------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``IllegalStateError`` if the session or its link is closed, and in a
        forked child. Raise ``ConnectionLostError`` if the connection is lost."""
        if self.closing:
            raise IllegalStateError("The session is closed.")
        self.link.check_alive()

    def check_usable(self) -> None:
        """Raise the same errors as ``check_open``. Also raise ``IllegalStateError`` in
        a signal handler that has interrupted a send. Methods call this before they wait
        or write."""
        self.link.refuse_inside()
        self.check_open()

    def refuse_own(self, verb: str) -> None:
        """Raise ``IllegalStateError`` where waiting for the session would never end: in
        a callback of this session, in a signal handler that has interrupted the
        session, and in a forked child."""
        self.link.check_own()
        self.link.refuse_inside()
        if self._ending._is_owned():  # type: ignore[attr-defined]  # RLock's own
            raise IllegalStateError(
                f"A signal handler cannot {verb} the session whose commit() or "
                "rollback() it has interrupted. Set a flag, or an event, in it."
            )
        completion.refuse_own(self, f"{verb} its own session")

    # -- sending ------------------------------------------------------------------

    def encode(
        self, target: Destination, message: Message, delivery: Delivery
    ) -> Encoded:
        """Check a message for every error, before the session writes a byte. Return the
        message's encoded frame.

        Raises ``InvalidDestinationError``, ``MessageFormatError``,
        ``MessageNotAccessibleError`` or ``UnsupportedOperationError``.
        """
        application = message.headers
        if not RESERVED_HEADERS.isdisjoint(application):
            names = ", ".join(sorted(RESERVED_HEADERS.intersection(application)))
            raise MessageFormatError(
                f"Headers {names} belong to the protocol; rename them in the message. "
                "To send on what was received, send its copy()."
            )
        dialect = self.link.dialect
        dialect.check_headers(application)
        body, content_type = message.encoded()
        now = datetime.now(timezone.utc)
        known = application.get(ID_HEADER) or message._provided.message_id
        message_id = known or new_id()
        headers = {**application, ID_HEADER: message_id}
        if content_type is not None:
            headers.setdefault("content-type", content_type)
        expiration = None
        via = target
        if delivery is not DEFAULT:
            if delivery.priority != DEFAULT.priority:
                headers["priority"] = str(delivery.priority)
            if delivery.time_to_live:
                expiration = now + delivery.time_to_live
                left = delivery.time_to_live // _MILLISECOND
                headers |= dialect.expiry_headers(int(now.timestamp() * 1000), left)
            if held := delivery.delay // _MILLISECOND:
                if self.transacted:
                    raise UnsupportedOperationError(
                        f"{dialect.name} stores a delayed message after the commit, "
                        "not with it: a crash between the two loses it. Send it "
                        "outside the transaction, or let the outbox hold it."
                    )
                via, held_by = dialect.delayed(target, held)
                if delivery.time_to_live and "expiration" in held_by:
                    raise UnsupportedOperationError(
                        f"{dialect.name} delays a message by letting it expire: it "
                        "cannot have a time to live as well."
                    )
                headers |= held_by
        persistent = delivery.mode is DeliveryMode.PERSISTENT
        head = b"%s%s%s" % (
            self._address_lines(via),
            b"persistent:true\n" if persistent else dialect.volatile_line,
            frames.header_lines(headers.items()),
        )
        mode, priority = delivery.mode, delivery.priority
        provided = Provided(message_id, target, now, mode, priority, expiration)
        return Encoded(head, body, provided)

    def transaction(self) -> Transaction:
        """Return the open transaction. If no transaction is open, begin a new one."""
        with self.link.lock:
            if self._transaction is None:
                self._transaction = Transaction(self.link)
            return self._transaction

    def adopt(self, message: Message) -> None:
        """Add a received message to the current transaction."""
        self.transaction().received.append(message)
