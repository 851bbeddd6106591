"""The transaction modes of `@stage(transaction=)`: each class implements the same
steps.

`inbox.py` calls the steps without knowing the mode. The reasons for each mode are in
docs/explanation/transaction-modes.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.db import Error as AnyDatabaseError
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from .. import conf, signals, wire
from ..brokers.base import Outgoing
from ..django_internals import isolation_of, raw
from ..envelope.failure import cause_of
from ..envelope.message import Message
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DeliveryLost,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
    InvalidMessage,
)
from ..models.inbox_arrival import InboxRecord
from ..models.outbox_store import NewMessage
from ..runtime import database_health
from ..runtime.connections import close_broken, recycle
from ..sending.scope import Scope
from ..sending.storing import store
from ..stages import Stage
from . import ordering, protocol
from .arrival import Arrival, Mode
from .protocol import LostRace

#: Not named after this module: log configurations refer to the existing names.
log = logging.getLogger("django_txmsg.arrival")


class Outbox(Mode):
    """One transaction of the database marks the inbox row as processed, runs the
    handler and stores the messages that the handler sends. Then the delivery is
    acknowledged."""

    def record(self, arrival: Arrival) -> None:
        """Count the arrival. If possible, begin the stage's transaction in the same
        round trip."""
        stage = self.stage
        arrival.record, arrival.begun = protocol.record(
            self.inbox,
            stage.name,
            arrival.message,
            runs=arrival.runs,
            isolation=stage.definition.isolation,
            turn=arrival.turn,
            # Middlewares around the transaction run before its beginning, and so does
            # the reading of a message that came before.
            early=stage.outside is None and not arrival.came_before,
        )
        arrival.counted = True

    def run(self, arrival: Arrival, message: Message) -> bool:
        """Mark the row as processed, run the stage and commit: see
        `protocol.once()`."""
        assert arrival.record is not None
        inbox, pk = self.inbox, arrival.record.id
        wakes_first = self._sees_a_snapshot()

        def work() -> None:
            if wakes_first:
                with protocol.ours():
                    ordering.wake([arrival])
            self.handle(arrival, message)

        def finish(_: None, late: bool) -> None:
            if late:
                inbox.finish([pk])
            if not wakes_first:
                ordering.wake([arrival])

        _, employed = protocol.once(
            self.stage.definition,
            begun=arrival.begun,
            take=partial(inbox.take, pk, arrival.token, arrival.turn),
            run=work,
            finish=finish,
        )
        return employed

    def _sees_a_snapshot(self) -> bool:
        """Return whether the stage's transactions see only what was committed before
        they began, because their isolation level is above READ COMMITTED.

        Such a transaction wakes the followers before the handler runs. After a long
        handler, it could not change a follower that was rechecked meanwhile: it would
        fail at each attempt, and the message would become a dead letter.
        """
        level = self.stage.definition.isolation or isolation_of(connections[self.using])
        return level in ("repeatable read", "serializable")

    def locks_parked(self) -> bool:
        """Return whether the stage keeps a parked message's row locked while it
        processes the message. This is false with blocking redelivery: the stage holds
        no lock while it waits between two attempts. It is also false with middlewares
        around the transaction: these run before the row is locked."""
        return self.stage.policy.mode != "blocking" and self.stage.outside is None


class Outside(Outbox):
    """No transaction is open while the handler runs, so the handler may call other
    services and take long.

    The handler may run more than once. When the handler has returned, one transaction
    marks the inbox row as processed and stores the messages that the handler has sent.
    So these messages are stored only once. While the database refuses the mark, only
    this transaction is tried again. If the handler opens a transaction and sends a
    message in it, the message is stored in that transaction instead.
    """

    def record(self, arrival: Arrival) -> None:
        """Count the arrival."""
        rows = self.inbox.record(self.stage.name, [arrival.message])
        arrival.count(rows[arrival.message.id])

    def run(self, arrival: Arrival, message: Message) -> bool:
        """Run the stage, then mark the row as processed and store the stage's
        messages."""
        inbox, pk = self.inbox, arrival.recorded.id
        if arrival.sent is None:
            sent: list[NewMessage] = []
            # The handler may take long: return the connection, as CONN_MAX_AGE permits.
            recycle(idle=True)
            self.handle(arrival, message, sent.extend)
            # If the database refuses what follows, the handler need not run again.
            arrival.sent = sent
        stored = arrival.sent
        # Nor if its connection has ended meanwhile.
        close_broken(self.using)
        _, employed = protocol.once(
            self.stage.definition,
            take=partial(inbox.take, pk, arrival.token, arrival.turn),
            run=lambda: self._store(stored) if stored else None,
            finish=lambda *_: ordering.wake([arrival]),
        )
        return employed

    def _store(self, messages: list[NewMessage]) -> None:
        """Store the handler's messages.

        Raises Undecided if the database refuses that for now: the handler need not run
        again. A trigger or a constraint may refuse these messages for ever, so its
        error is a failed attempt. So is a connection that ended."""
        on = raw(connections[self.using])
        try:
            store(messages, self.using)
        except AnyDatabaseError as error:
            denied = database_health.sqlstate(error) == "42501"
            passes = isinstance(error, OperationalError) and (
                database_health.may_pass(error)
                and not database_health.lost_conflict(error)
            )
            if getattr(on, "closed", False) or not (denied or passes):
                raise
            raise protocol.Undecided(error) from error

    def is_outage(self, error: BaseException, raw: Any) -> bool:
        """Return True if the broker or the stage's own database is unavailable. `run()`
        may have closed `raw`, so test the database if another one may have failed."""
        outage = super().is_outage(error, raw)
        if outage and database_health.note(self.using, error):
            return database_health.error(self.using) is not None
        return outage

    def locks_parked(self) -> bool:
        """Return False, because no transaction is open while the handler runs."""
        return False


class BrokerOnly(Mode):
    """One transaction of the broker acknowledges the delivery and sends the handler's
    messages. Only messages that were redelivered, or that expire, have a row in the
    inbox."""

    transacted, idempotent = True, True

    def record(self, arrival: Arrival) -> None:
        """Count the arrival only if it is a redelivery, so that the stage needs no
        database unless something fails. Also count a message that expires, because the
        database's clock decides whether it has expired."""
        expires = wire.expires(arrival.delivery.headers)
        if not arrival.came_before and expires is None:
            return
        message = arrival.message
        rows = self.inbox.record(self.stage.name, [message], idempotent=True)
        arrival.count(rows[message.id])

    def run(self, arrival: Arrival, message: Message) -> bool:
        """Run the stage, commit in the broker, and mark the inbox row, if there is one,
        as processed."""
        employed = self._work(arrival, message)
        self._commit(arrival, employed)
        if arrival.record is not None:
            self._mark(arrival, arrival.record)
        return employed

    def _work(self, arrival: Arrival, message: Message) -> bool:
        self.handle(arrival, message)
        return False

    def scope(self, arrival: Arrival, message: Message) -> Scope:
        """Return a scope that adds the stage's messages to the broker's transaction."""
        entered, stage = super().scope(arrival, message), self.stage
        service = conf.get().SERVICE

        def check(row: NewMessage) -> None:
            if row.delay:
                raise InvalidMessage(
                    f"The message to {row.destination!r} has a delay, which belongs to "
                    f"the outbox: stage {stage.name!r} has "
                    f'transaction="{stage.transaction}" and sends into the broker\'s '
                    f'transaction. Use transaction="outbox".'
                )
            if row.broker != stage.broker:
                raise InvalidMessage(
                    f"The message to {row.destination!r} is for broker {row.broker!r}, "
                    f'but stage {stage.name!r} has transaction="{stage.transaction}" '
                    f"and sends into the transaction of broker {stage.broker!r}. "
                    f"Send it with broker={stage.broker!r}, or use "
                    f'transaction="outbox".'
                )

        def enlist(rows: Sequence[NewMessage]) -> None:
            for row in rows:
                check(row)
            created = wire.format_instant(timezone.now())
            for row in rows:
                headers = wire.headers_of(row, service, created)
                arrival.session.enlist(Outgoing(row.destination, headers, row.body))
                if row.committed is not None:
                    row.committed()

        entered.enlist = enlist
        return entered

    def roll_back(self, arrival: Arrival) -> None:
        """Roll back the broker's transaction. The delivery stays unacknowledged."""
        arrival.session.rollback()

    def is_turned_away(self, error: BaseException) -> bool:
        """Return True if the stage failed only because it sent to a destination that
        accepts no messages at present, because the broker did not answer the commit, or
        because a database refused a statement of the package for now. Then neither the
        message nor its handler is at fault. In this mode, a stage sends directly to the
        broker.

        A trigger, a constraint or a missing privilege may refuse for ever, and each try
        runs the handler again. So these errors count as attempts."""
        cause: BaseException | None = error
        while isinstance(cause, BrokerUnavailable):
            cause = cause_of(cause)
        if cause is error:
            return isinstance(error, DestinationUnavailable)
        if isinstance(cause, DispatchUnknown):
            return not cause.hung_up
        # If the connection ended, the message may have crashed the server.
        ended = database_health.is_away(cause)
        full = database_health.lacks_resources(cause)
        return isinstance(cause, OperationalError) and (full or not ended)

    def _commit(self, arrival: Arrival, employed: bool) -> None:
        """Commit the broker's transaction. If the stage uses the database, the database
        has committed already."""
        began = time.monotonic()
        error: BrokerError | None = None
        try:
            arrival.session.commit([arrival.delivery] if arrival.parked is None else [])
        except BrokerError as raised:
            error = raised
        self._note(time.monotonic() - began, error, employed)
        if isinstance(error, DeliveryLost):
            log.warning(
                "stage %r: the work is done here, and %s", self.stage.name, error
            )
            raise LostRace  # not a failure: another worker has it
        if isinstance(error, DispatchRejected | DestinationUnavailable):
            raise error  # rolled back; the session holds the delivery
        if error is not None:
            # The broker redelivers it, or has committed. Parking it as well would run
            # it once too often.
            raise BrokerUnavailable(
                f"the outcome of the transaction is unknown: {error}"
            ) from error

    def _note(self, seconds: float, error: BrokerError | None, employed: bool) -> None:
        """Do nothing. In this mode the database does not commit before the broker, so
        there is no delay between two commits to report."""

    def _mark(self, arrival: Arrival, record: InboxRecord) -> None:
        """Mark the inbox row as processed, after the broker's commit. If the database
        refuses that, only the mark is lost."""
        try:
            with transaction.atomic(using=self.using):
                self.inbox.finish([record.id])
                ordering.wake([arrival])
        except AnyDatabaseError as error:
            log.warning(
                "stage %r: message %s is processed, but cannot be marked as "
                "processed: %s",
                self.stage.name,
                record.message_id,
                error,
            )


class BestEffort(BrokerOnly):
    """The database's transaction commits first, and the broker's transaction directly
    after."""

    def _work(self, arrival: Arrival, message: Message) -> bool:
        def run() -> None:
            self.handle(arrival, message)
            # The last moment at which a dead broker costs nothing.
            arrival.session.ping()

        _, employed = protocol.once(
            self.stage.definition,
            take=lambda: True,  # the handler is idempotent
            run=run,
            finish=lambda *_: None,
        )
        return employed

    def _note(self, seconds: float, error: BrokerError | None, employed: bool) -> None:
        """Report the delay between the two commits. If the broker's commit failed, log
        an error."""
        if error is not None:
            log.log(
                logging.ERROR if employed else logging.WARNING,
                "stage %r: the broker's commit failed after the database's (%s); the "
                "message will be redelivered, and its handler must be idempotent: %s",
                self.stage.name,
                "db=used" if employed else "db=unused",
                error,
            )
        signals.dangerous_window.send_robust(
            sender=None,
            stage=self.stage.name,
            seconds=seconds,
            failed=error is not None,
            employed=employed,
        )


_MODES: dict[str, type[Mode]] = {
    "outbox": Outbox,
    "best_effort_1pc": BestEffort,
    "broker_only": BrokerOnly,
    "none": Outside,
}


def of(stage: Stage) -> Mode:
    """Return the mode in which a stage's messages are processed."""
    return _MODES[stage.transaction](stage)
