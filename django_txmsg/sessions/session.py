"""Hop 1 for code that nobody sent a message to: requests, commands, tasks.

`outbox_session()` opens a transaction; what is sent inside is stored with it; before
it commits, a control message makes sure that the messages leave even if this process
dies right after the commit; then it commits and they are dispatched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections, transaction

from .. import conf, signals
from ..envelope.message import check_headers, new_id
from ..errors import SessionError, SwallowedDatabaseError
from ..sending import storing
from ..sending.scope import Scope, current_scope, enter_scope
from .announce import announce
from .late_block import LateBlock

log = logging.getLogger("django_txmsg.session")

#: psycopg's TransactionStatus.INERROR: a COMMIT now would be a ROLLBACK.
_IN_ERROR = 3


@dataclass
class SessionScope(Scope):
    """The scope of an outbox session's messages."""

    session: OutboxSession | None = None


class OutboxSession:
    """One transaction and the messages that are stored in it.

    `metadata` are headers for the control message, which the receivers of the signal
    `control_message_handled` can read: a tenant, for example. `committed` says that the
    transaction did, even when a hook that ran after the commit raised. `reading` says
    that the session probably writes nothing, and spares SQLite a lock.
    """

    def __init__(self, using: str | None = None, *, reading: bool = False) -> None:
        self.using = using or conf.get().HTTP.USING
        self.id = new_id()
        self.metadata: dict[str, str] = {}
        self.committed = False
        self._connection: Any = connections[self.using]
        self._block = LateBlock(self.using, reading=reading)
        self._scope: Scope | None = None
        self._outer: Scope | None = None
        self._nested = self._ended = False
        self._rollback_asked = False
        self._heard: Any = None
        self._depth = 0
        self._began = 0.0

    @property
    def stored(self) -> int:
        """How many messages were stored in this session's database so far."""
        return self._scope.stored.get(self.using, 0) if self._scope else 0

    @property
    def spoiled(self) -> bool:
        """Whether an error that was caught leaves nothing but to roll back."""
        connection = self._connection
        if connection.closed_in_transaction:
            return True
        if connection.vendor == "postgresql" and connection.connection is not None:
            status = connection.connection.info.transaction_status
            if int(status) == _IN_ERROR:
                return True
        return bool(connection.needs_rollback and not self._rollback_asked)

    def begin(self) -> None:
        """Open the transaction, which begins with the first use of the database.
        Raises SessionError the second time."""
        if self._scope is not None or self._ended:
            raise SessionError("This outbox session has begun already; make another.")
        self._nested = self._connection.in_atomic_block
        self._block.enter()
        self._began = time.monotonic()
        self._depth = len(self._connection.atomic_blocks)
        self._listen_for_rollback()
        if not self._nested:
            # The first hook of all: whatever raises after it, raises after the commit.
            self._connection.on_commit(self._note_commit)
        outer = current_scope()
        self._scope = SessionScope(
            session_id=self.id,
            using=self.using,
            session=self,
            gathers=self._connection,
        )
        if outer is not None:
            # Inside a stage without a transaction: its messages keep their stable ids.
            self._scope.cause, self._scope.stage = outer.cause, outer.stage
            self._scope.ordinals = outer.ordinals
        self._outer = enter_scope(self._scope)

    def commit(self) -> None:
        """Send the control message if messages were stored, and commit.

        Rolls back, without an error, when `transaction.set_rollback()` asked for it.
        Raises what made the commit impossible, with everything rolled back:
        SwallowedDatabaseError, CommitTimedOut, BrokerError or a database error.
        """
        self._check_open()
        try:
            if self.spoiled:
                raise SwallowedDatabaseError(
                    f"A database error on {self.using!r} was caught inside the "
                    f"session, whose transaction can only roll back: nothing was "
                    f"stored. Let the error propagate, or put the failing query into "
                    f"an atomic() of its own and catch the error outside of that."
                ) from self._connection.rollback_exc
            if self._connection.needs_rollback:
                self.rollback()
                return
            self._warn_of_other_databases()
            if self.stored:
                storing.flush(self.using)
                announce(
                    self.using,
                    self.id,
                    check_headers(self.metadata),
                    self._scope.transactions.get(self.using) if self._scope else None,
                )
        except BaseException as error:
            self._end("failed", error)
            raise
        self._end("joined" if self._nested else "committed", None)

    def rollback(self, error: BaseException | None = None) -> None:
        """Roll everything back. No message leaves."""
        self._check_open()
        self._end("rolled_back", error or _ROLLBACK)

    def _end(self, outcome: str, error: BaseException | None) -> None:
        self._ended = True
        enter_scope(self._outer)
        del self._connection.set_rollback
        if self._heard is not None:
            self._connection.set_rollback = self._heard
        try:
            kind = None if error is None else type(error)
            self._block.exit(kind, error)
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

    def _listen_for_rollback(self) -> None:
        """Tell a rollback that was asked for from one that an error left behind."""
        connection = self._connection
        heard = connection.set_rollback
        self._heard = connection.__dict__.get("set_rollback")

        def set_rollback(rollback: bool) -> None:
            heard(rollback)
            if len(connection.atomic_blocks) == self._depth:
                self._rollback_asked = rollback

        connection.set_rollback = set_rollback

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
                    "they were committed or rolled back apart from it, and if this "
                    "process dies after that commit, the relay of that database sends "
                    "them. outbox_session(using=%r) takes care of those too",
                    self.id,
                    self.using,
                    count,
                    alias,
                    alias,
                )

    def _note_commit(self) -> None:
        self.committed = True


class _Rollback(Exception):
    """What Atomic is told when the transaction is to roll back."""


_ROLLBACK = _Rollback()


@contextmanager
def outbox_session(using: str | None = None) -> Iterator[OutboxSession]:
    """Do for a command, a task or a test what the middleware does for a request.

        with outbox_session() as session:
            order = Order.objects.create(...)
            send_message("orders.place", {"order": order.pk})

    An exception rolls back. `using` is TXMSG["HTTP"]["USING"] when not given. Inside
    another session on the same database, or inside a stage's transaction, it is a
    savepoint of that one, which also takes care of the messages. Inside a mere
    `transaction.atomic()` the messages leave when that commits.
    """
    session = OutboxSession(using)
    outer = current_scope()
    if (
        outer is not None
        and outer.enlist is None
        and outer.using == session.using
        and connections[session.using].in_atomic_block
    ):
        if isinstance(outer, SessionScope) and outer.session is not None:
            session = outer.session
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
