"""A connection to a broker as applications see it: sessions, liveness, the end.

Hop 4 and 6 of a message. It is started when made. When its link is lost it stays
failed and says so to its listeners; the factory makes a new one.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import completion, pool
from .closing import Closing
from .consumer import AckMode
from .errors import IllegalStateError, MessagingError
from .link import Link
from .session import Session

if TYPE_CHECKING:
    from .dialects import Dialect
    from .factory import Options

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection(Closing):
    """Made by ``factory.create_connection``; make sessions from it, close it."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect; raises ``ConnectionFailedError`` or ``OSError`` in time."""
        self.address = address
        self._closing = False
        self._sessions: list[Session] = []
        self._failure_listeners: list[Callable[[MessagingError], object]] = []
        self.link = Link(address, options, self._on_lost)
        _open.add(self)

    @property
    def dialect(self) -> Dialect:
        """What kind of broker this is."""
        return self.link.dialect

    @property
    def server(self) -> str:
        """What the broker calls itself."""
        return self.link.server

    @property
    def client_id(self) -> str | None:
        """The name durable subscriptions belong to."""
        return self.link.options.client_id

    @property
    def error(self) -> MessagingError | None:
        """Why the connection failed, ``None`` if it did not."""
        return self.link.error

    @property
    def failed(self) -> bool:
        """Whether the connection ended without being closed."""
        return self.link.error is not None

    @property
    def closed(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._closing or self.failed or self.link.inherited

    @property
    def ignored_receipts(self) -> int:
        """Receipts and errors that came late, twice, or for nobody."""
        return self.link.ledger.ignored

    def check_usable(self) -> None:
        """Raise ``IllegalStateError``, or the error the connection failed with."""
        self.link.check_alive()
        if self._closing:
            raise IllegalStateError("The connection is closed.")

    def create_session(
        self,
        transacted: bool = False,  # as in Jakarta Messaging
        ack_mode: AckMode = AckMode.INDIVIDUAL,
        *,
        max_in_flight: int | None = None,
    ) -> Session:
        """Open a session: one order of sends, one window, one transaction at a time."""
        self.check_usable()
        session = Session(
            self, transacted=transacted, ack_mode=ack_mode, max_in_flight=max_in_flight
        )
        with self.link.lock:
            self._sessions.append(session)
        return session

    def session_closed(self, session: Session) -> None:
        """Forget a closed session."""
        with self.link.lock:
            if session in self._sessions:
                self._sessions.remove(session)

    def ping(self, timeout: float = 5.0) -> float:
        """Prove that the broker handles our frames; return the seconds it took.

        Raises ``RequestTimeoutError`` or ``ConnectionLostError``.
        """
        self.check_usable()
        began = time.monotonic()
        self.link.barrier(timeout=timeout).wait()
        return time.monotonic() - began

    def add_failure_listener(
        self, listener: Callable[[MessagingError], object]
    ) -> None:
        """Call the listener once, on a pool thread, when the connection fails."""
        with self.link.lock:
            self._failure_listeners.append(listener)
            if self.link.error is not None:
                self._on_lost(self.link.error)

    def _on_lost(self, error: MessagingError) -> None:
        listeners, self._failure_listeners = self._failure_listeners, []
        for listener in listeners:
            pool.submit(lambda told=listener: told(error))  # type: ignore[misc]

    def stop(self) -> None:
        """Let no consumer receive; sends go on, and completions are not waited for."""
        self._deliver(on=False)

    def start(self) -> None:
        """Let consumers receive again after ``stop``."""
        self._deliver(on=True)

    def _deliver(self, *, on: bool) -> None:
        self.check_usable()
        with self.link.lock:
            self.link.delivering = on
            self.link.wake_all()

    def close(self) -> None:
        """Let outstanding sends complete, say goodbye to the broker, and end.

        Waits until every send has its outcome, bounded by their deadlines, and every
        callback has returned. Raises ``IllegalStateError`` inside an own callback.
        """
        link = self.link
        if link.inherited:
            return
        own = completion.running_for.get()
        if own is not None and own.session.connection is self:
            raise IllegalStateError(
                "A completion callback cannot close its own connection: it would wait "
                "for itself. Close it from another thread."
            )
        with link.lock:
            first, self._closing = not self._closing, True
            sessions = list(self._sessions)
            while not first and not link.closed:  # another thread closes it: share
                link.changed.wait(0.5)
        if not first:
            return
        try:
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
        """Wait until then for outstanding sends; return how many are left."""
        sessions = list(self._sessions)
        return sum(session.callbacks.wait_until(give_up) for session in sessions)


def _abandon_all() -> None:
    for connection in list(_open):
        connection.link.abandon()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
pool.drain_at_exit(lambda: [connection.wait_for_sends for connection in list(_open)])
