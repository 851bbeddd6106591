"""Hop 1 for code that no message has started: requests, commands and tasks.

`outbox_session()` opens a transaction, and stores in this transaction the messages that
are sent inside its block. Before the commit, the session sends a control message, which
ensures that the messages are sent even if this process dies right after the commit.
Then the transaction commits, and the messages are dispatched.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections, transaction

from .. import conf, signals
from ..django_internals import in_block
from ..envelope.message import check_headers, new_id
from ..errors import BlockLeftOpen, BrokerError, SessionError, SwallowedDatabaseError
from ..sending.scope import Block, Scope, current_scope, enter_scope
from . import control_group
from .control_message import announce

log = logging.getLogger("django_txmsg.session")
#: Of a session's own control message: users have alarms on the names of loggers.
control_log = logging.getLogger("django_txmsg.control")


class OutboxSession(Block):
    """One transaction and the messages that are stored in it.

    `metadata` are headers for the control message, for example a tenant. Receivers of
    the signal `control_message_handled` get these headers. Pass `reading=True` if the
    session probably writes nothing. On SQLite the session then takes the write lock
    only at its first write.
    """

    def __init__(self, using: str | None = None, *, reading: bool = False) -> None:
        super().__init__(using or conf.get().HTTP.USING, reading=reading)
        self.id = new_id()
        self.metadata: dict[str, str] = {}
        self._reading = reading
        self._scope: Scope | None = None
        self._outer: Scope | None = None
        self._ended = self._joined = False
        self._joining = threading.Lock()
        self._group: control_group.Group | None = None
        self._began = 0.0

    @property
    def stored(self) -> int:
        """The number of messages stored in this session's database so far."""
        return self._scope.stored.get(self.using, 0) if self._scope else 0

    @property
    def stored_as(self) -> uuid.UUID | None:
        """The `session_id` of the messages stored so far: the id of a group that the
        session shares with other sessions, or the session's own id. None before the
        first message."""
        return self.join()[0] if self.stored else None

    def refused_to_write(self, error: Exception) -> bool:
        """Return whether SQLite refused a write of this session. That happens if the
        session began with `reading` and another connection has written since then."""
        sqlite = self._connection.vendor == "sqlite"
        # Not an error of another database, nor of the view's own.
        ours = self._reading and sqlite and error is self.cause
        return ours and "database is locked" in str(error)

    def begin(self) -> None:
        """Open the transaction. The database begins the transaction only at the first
        query. Raises SessionError if the session has already begun."""
        if self._scope is not None or self._ended:
            raise SessionError("This outbox session has begun already; make another.")
        self.enter()
        self._began = time.monotonic()
        outer = current_scope()
        self._scope = Scope(session_id=self.id, using=self.using, session=self)
        if outer is not None:
            # Inside a stage without a transaction: its messages keep their stable ids.
            self._scope.cause, self._scope.stage = outer.cause, outer.stage
            self._scope.numbers, self._scope.separate = outer.numbers, True
        self._outer = enter_scope(self._scope)

    def commit(self) -> None:
        """Send the control message if messages were stored, and commit. If
        `transaction.set_rollback()` was called, roll back without an error.

        If the commit fails, everything is rolled back, and the error is raised:
        BlockLeftOpen, SwallowedDatabaseError, CommitTimedOut, BrokerError or a database
        error.
        """
        self._check_open()
        try:
            if self.left_open:
                # The commit would only release the savepoint of that block.
                raise BlockLeftOpen(
                    f"A block of transaction.atomic() on {self.using!r} was entered "
                    f"inside the session and not left: nothing was stored. Use "
                    f"atomic() in a with statement, or as a decorator."
                )
            if self.spoiled:
                raise SwallowedDatabaseError(
                    f"A database error on {self.using!r} was caught inside the "
                    f"session, whose transaction can only roll back: nothing was "
                    f"stored. Let the error propagate, or put the failing query into "
                    f"an atomic() of its own and catch the error outside of that."
                ) from self.cause
            if self.rolls_back:
                self.rollback()
                return
            self._warn_of_other_databases()
            if self.stored:
                self._announce()
        except BaseException as error:
            self._end("failed", error)
            raise
        self._end("joined" if self.nested else "committed", None)

    def join(self) -> tuple[uuid.UUID, int | None]:
        """Return the session id for the rows that are stored next, and the lock that
        their INSERT takes. Usually these are the id and the lock of a group. Without a
        group, these are the session's own id and no lock."""
        # Threads may share a context, like those that an async view starts. Rows in a
        # group without a confirmed control message would be left to the relay.
        with self._joining:
            if not self._joined:
                self._group = control_group.find(self.using, self.metadata)
                self._joined = True
        if self._group is None:
            return self.id, None
        return self._group.id, self._group.lock

    def _announce(self) -> None:
        assert self._scope is not None
        metadata, newest = check_headers(self.metadata), self._scope.newest
        by = log
        try:
            if self._group is None or newest is None or metadata:
                by = control_log
                known = self._scope.transactions.get(self._connection)
                announce(self.using, self.join()[0], metadata, known)
                return
            self._group.vouch(newest)
        except BrokerError as error:
            # The INSERT into a broker's tables may have aborted this transaction.
            if conf.get().HTTP.ON_CONTROL_FAILURE == "fail" or self.spoiled:
                raise
            by.info("session %s commits without a control message: %s", self.id, error)
        else:
            if self._scope.newest != newest:  # a receiver of the signal has stored more
                self._announce()

    def rollback(self, error: BaseException | None = None) -> None:
        """Roll back the transaction. No message is sent."""
        self._check_open()
        self._end("rolled_back", error or _ROLLBACK)

    def _end(self, outcome: str, error: BaseException | None) -> None:
        self._ended = True
        if self._scope is not None:
            self._scope.ended = True
        enter_scope(self._outer)
        try:
            self.exit(error)
        except BaseException:
            outcome = "committed" if self.committed else "failed"
            raise
        finally:
            signals.session_ended.send_robust(
                sender=None,
                session_id=self.id,
                using=self.using,
                outcome=outcome,
                duration=time.monotonic() - self._began,
                stored=self.stored,
            )
            if self._scope is not None:
                # Leaves no reference cycle for the garbage collector.
                self._scope.session = None

    def _check_open(self) -> None:
        if self._scope is None:
            raise SessionError("This outbox session has not begun.")
        if self._ended:
            raise SessionError("This outbox session has ended already.")

    def _warn_of_other_databases(self) -> None:
        for alias, count in (self._scope.stored if self._scope else {}).items():
            if alias != self.using and count:
                log.warning(
                    "session %s is on database %r, and %d of its messages are on %r: "
                    "no control message is sent for them. Use outbox_session(using=…)",
                    self.id,
                    self.using,
                    count,
                    alias,
                )


class _Rollback(Exception):
    """The exception that is passed to Atomic so that the transaction rolls back."""


_ROLLBACK = _Rollback()


@contextmanager
def outbox_session(using: str | None = None) -> Iterator[OutboxSession]:
    """Open an outbox session for a command, a task or a test, as the middleware does
    for a request.

        with outbox_session() as session:
            order = Order.objects.create(...)
            send_message("orders.place", {"order": order.pk})

    An exception rolls the session back. `using` defaults to TXMSG["HTTP"]["USING"].

    Inside another session on the same database, or inside a stage's transaction, this
    only opens a savepoint, and the messages belong to the outer session or stage.
    Inside a plain `transaction.atomic()`, the messages are sent when the outer
    transaction commits.
    """
    session = OutboxSession(using)
    outer = current_scope()
    if (
        outer is not None
        and outer.enlist is None
        and outer.using == session.using
        and in_block(connections[session.using])
    ):
        session = outer.session or session
        with transaction.atomic(using=session.using):
            yield session
        return
    session.begin()
    try:
        yield session
    except BaseException as error:
        session.rollback(error)
        raise
    session.commit()
