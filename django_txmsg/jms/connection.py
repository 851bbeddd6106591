"""A connection to a broker, as applications see it: it opens sessions, and is closed.

Hops 4 and 6 of a message. A connection is started when it is created.
"""

from __future__ import annotations

import os
import warnings
import weakref

from . import completion, pool
from .consumer import AckMode
from .liveness import Liveness
from .options import Options
from .session import Session

_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection(Liveness):
    """A connection, created by ``factory.create_connection``. Open sessions from it,
    and close it."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect; raises ``ConnectionFailedError`` or ``OSError`` within the
        time-out."""
        self._sessions: list[Session] = []
        super().__init__(address, options)
        _open.add(self)

    def __del__(self) -> None:
        """End the connection when nothing refers to it: otherwise its threads would
        keep it open for ever."""
        link = getattr(self, "link", None)
        if link is not None and not (self._closing or link.inherited):
            text = f"{self!r} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
            link.drop()

    def create_session(
        self,
        transacted: bool = False,  # as in Jakarta Messaging
        ack_mode: AckMode = AckMode.INDIVIDUAL,
        *,
        max_in_flight: int | None = None,
    ) -> Session:
        """Open a session. A session has one order of sends, one window, and one
        transaction at a time."""
        self.check_usable()
        session = Session(
            self,
            transacted=transacted,
            ack_mode=ack_mode,
            max_in_flight=max_in_flight,
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
        """Let outstanding sends complete, disconnect from the broker, and end.

        Waits until every send has its outcome and every callback has returned; the
        sends' deadlines limit that. Raises ``IllegalStateError`` inside one of its own
        callbacks.
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
        """Wait until that moment for outstanding sends. Returns how many remain."""
        sessions = list(self._sessions)
        return sum(session.sends.wait_until(give_up) for session in sessions)


def _abandon_all() -> None:
    for connection in list(_open):
        connection.link.abandon()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
pool.drain_at_exit(lambda: [connection.wait_for_sends for connection in list(_open)])
