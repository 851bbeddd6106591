"""The transaction modes of `@stage(transaction=)`: three strategies for the same steps.

Order per key is a fourth, around the steps of mode outbox. `inbox.py` calls the
steps and knows no mode; docs/explanation/transaction-modes.md has the reasons.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar
from uuid import UUID

from django.db import Error as AnyDatabaseError
from django.utils import timezone

from .. import conf, signals, wire
from ..brokers.base import Outgoing
from ..envelope.message import Message
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DeliveryLost,
    DestinationUnavailable,
    DispatchRejected,
    InvalidMessage,
)
from ..models.inbox import InboxRecord
from ..models.outbox_store import NewMessage
from ..runtime.connections import recycle
from ..sending.scope import Scope, in_scope
from ..sending.storing import store
from ..stages import Stage
from . import decoding, ordering, protocol
from .decoding import Arrival
from .outcomes import Duplicate, Outcome
from .protocol import LostRace, guarded

#: Not named after this module: log configurations refer to the existing names.
log = logging.getLogger("django_txmsg.arrival")


class Mode(ABC):
    """The steps in which the modes differ."""

    #: Whether the delivery and the stage's messages are in the broker's transaction.
    transacted: ClassVar[bool] = False

    @abstractmethod
    def record(
        self, arrival: Arrival, message: Message
    ) -> tuple[InboxRecord | None, bool]:
        """Count the arrival durably. Returns the record of the message, and whether its
        transaction has begun."""

    @abstractmethod
    def settled(self, record: InboxRecord) -> bool:
        """Return whether a copy of the message only needs to be dropped."""

    @abstractmethod
    def run(
        self,
        arrival: Arrival,
        message: Message,
        record: InboxRecord | None,
        begun: bool,
    ) -> bool:
        """Run the stage and commit. Returns whether its database was used. Raises
        LostRace."""

    def reason_not_to_run(self, arrival: Arrival, record: InboxRecord) -> str:
        """Return why the stage must not run for this record; "" if it must."""
        if self.is_done(arrival, record):
            return "settled"
        if record.attempt > arrival.stage.policy.max_begun:
            return "worker_lost"
        return "expired" if decoding.expired(arrival.delivery, record.now) else ""

    def is_done(self, arrival: Arrival, record: InboxRecord) -> bool:
        """Return whether the arrival only needs to be dropped. A parked message is here
        to be processed."""
        return arrival.parked is None and self.settled(record)

    def handle(self, arrival: Arrival, message: Message) -> None:
        """Call the handler. Its scope is left before the commit, whose hooks do not
        belong to the stage any more."""
        with in_scope(self.scope(arrival, message)), guarded(arrival.using):
            arrival.stage.handler(message)

    def scope(self, arrival: Arrival, message: Message) -> Scope:
        """Return the scope of the messages that the stage sends for `message`."""
        stage = arrival.stage
        return Scope(
            session_id=session_id(message, stage),
            using=arrival.using,
            cause=message,
            stage=stage.name,
            worker=arrival.worker,
        )

    def out_of_turn(
        self, arrival: Arrival, record: InboxRecord, *, attempts: int = 1
    ) -> Outcome | None:
        """Park a message whose turn has not come, and return its outcome; None if its
        turn has come, or if the stage has no order. `attempts` were counted for it."""
        return None

    def lost(self, arrival: Arrival, record: InboxRecord | None) -> Outcome:
        """Return the outcome of a message that could not be taken: a copy settled
        it."""
        return Duplicate()

    def end(self, arrivals: Sequence[Arrival]) -> None:  # noqa: B027 - most do nothing
        """Run the last step of a transaction in which messages end."""

    def put_aside(self, arrival: Arrival, record: InboxRecord) -> None:  # noqa: B027 - most do nothing
        """Record a failed message, in the transaction that parks it."""

    def kept_headers(self, arrival: Arrival) -> dict[str, str]:
        """Return the headers to keep with a failed message."""
        return arrival.kept_headers

    def roll_back(self, arrival: Arrival) -> None:  # noqa: B027 - most do nothing
        """Undo what the stage did in the broker's transaction, if there is one."""

    def is_turned_away(self, error: BaseException) -> bool:
        """Return whether the stage failed because a destination of its broker takes no
        messages now."""
        return False

    def locks_parked(self, stage: Stage) -> bool:
        """Return whether a lock on the row of a parked message keeps others away while
        it runs."""
        return False


class Outbox(Mode):
    """The mark in the inbox, the handler's work and its messages are one transaction of
    the database. The broker's acknowledgement follows it."""

    def record(
        self, arrival: Arrival, message: Message
    ) -> tuple[InboxRecord | None, bool]:
        """Count every arrival, and begin the transaction in the same round trip if
        possible."""
        stage = arrival.stage

        def runs(record: InboxRecord) -> bool:
            return not self.reason_not_to_run(arrival, arrival.count(record))

        record, begun = protocol.record(
            arrival.inbox,
            stage.name,
            message,
            runs=runs,
            isolation=stage.definition.isolation,
            turn=arrival.turn,
            # Middlewares around the transaction run before its beginning.
            early=stage.outside is None,
        )
        return arrival.count(record), begun

    def settled(self, record: InboxRecord) -> bool:
        """Processed, buried and parked messages are settled."""
        return record.settled

    def run(
        self,
        arrival: Arrival,
        message: Message,
        record: InboxRecord | None,
        begun: bool,
    ) -> bool:
        """Mark the row, run the stage, commit: see `protocol.once()`."""
        assert record is not None
        inbox, pk = arrival.inbox, record.id

        def finish(_: None, late: bool) -> None:
            if late:
                inbox.finish([pk])
            self.end([arrival])

        _, employed = protocol.once(
            arrival.stage.definition,
            begun=begun,
            take=lambda: inbox.take(pk, arrival.token, arrival.turn),
            run=lambda: self.handle(arrival, message),
            finish=finish,
        )
        return employed

    def locks_parked(self, stage: Stage) -> bool:
        """Yes, except while a blocking redelivery waits without a lock."""
        return stage.policy.mode != "blocking"


class Outside(Outbox):
    """No transaction is open while the handler runs, so it may call other services and
    take long. It runs at least once. What it sends is stored once, however often it
    runs: in a transaction after it, together with the mark in the inbox."""

    def record(
        self, arrival: Arrival, message: Message
    ) -> tuple[InboxRecord | None, bool]:
        """Count every arrival."""
        rows = arrival.inbox.record(arrival.stage.name, [message])
        return arrival.count(rows[message.id]), False

    def run(
        self,
        arrival: Arrival,
        message: Message,
        record: InboxRecord | None,
        begun: bool,
    ) -> bool:
        """Run the stage; then mark the row and store what it has sent."""
        assert record is not None
        inbox, pk = arrival.inbox, record.id
        sent: list[NewMessage] = []
        scope = self.scope(arrival, message)
        scope.enlist = sent.append
        # The handler may take long: return the connection, as CONN_MAX_AGE permits.
        recycle(idle=True)
        with in_scope(scope):
            arrival.stage.handler(message)
        _, employed = protocol.once(
            arrival.stage.definition,
            take=lambda: inbox.take(pk, arrival.token, arrival.turn),
            run=lambda: store(sent, arrival.using) if sent else None,
            finish=lambda *_: None,
        )
        return employed

    def locks_parked(self, stage: Stage) -> bool:
        """No lock is held while it runs."""
        return False


class BrokerOnly(Mode):
    """The delivery and the handler's messages are one transaction of the broker. The
    inbox knows a message only once it was redelivered."""

    transacted = True

    def record(
        self, arrival: Arrival, message: Message
    ) -> tuple[InboxRecord | None, bool]:
        """Count redeliveries only, so that the stage needs no database unless something
        fails."""
        if not arrival.came_before:
            return None, False
        rows = arrival.inbox.record(arrival.stage.name, [message], idempotent=True)
        return arrival.count(rows[message.id]), False

    def settled(self, record: InboxRecord) -> bool:
        """A processed message is processed again."""
        return record.dead or record.parked

    def run(
        self,
        arrival: Arrival,
        message: Message,
        record: InboxRecord | None,
        begun: bool,
    ) -> bool:
        """Run the stage, commit in the broker, and mark the inbox row, if there is
        one."""
        employed = self._work(arrival, message)
        self._commit(arrival, employed)
        if record is not None:
            self._mark(arrival, record)
        return employed

    def _work(self, arrival: Arrival, message: Message) -> bool:
        with in_scope(self.scope(arrival, message)):
            arrival.stage.handler(message)
        return False

    def scope(self, arrival: Arrival, message: Message) -> Scope:
        """The stage's messages go into the broker's transaction."""
        entered, stage = super().scope(arrival, message), arrival.stage
        service = conf.get().SERVICE

        def enlist(row: NewMessage) -> None:
            if row.delay:
                raise InvalidMessage(
                    f"The message to {row.destination!r} has a delay, which belongs to "
                    f"the outbox: stage {stage.name!r} has "
                    f'transaction="{stage.transaction}" and sends into the broker\'s '
                    f'transaction. Use transaction="outbox".'
                )
            created = wire.format_instant(timezone.now())
            headers = wire.headers_of(row, service, created)
            arrival.session.enlist(Outgoing(row.destination, headers, row.body))
            if row.committed is not None:
                row.committed()

        entered.enlist = enlist
        return entered

    def roll_back(self, arrival: Arrival) -> None:
        """Roll back; the delivery stays unacknowledged."""
        arrival.session.rollback()

    def is_turned_away(self, error: BaseException) -> bool:
        """The stage sends directly, so a destination that takes no messages is not the
        message's fault."""
        return isinstance(error, DestinationUnavailable)

    def _commit(self, arrival: Arrival, employed: bool) -> None:
        """Commit the broker's transaction; the database's is committed already."""
        began = time.monotonic()
        error: BrokerError | None = None
        try:
            arrival.session.commit([arrival.delivery] if arrival.parked is None else [])
        except BrokerError as raised:
            error = raised
        self._note(arrival.stage, time.monotonic() - began, error, employed)
        if isinstance(error, DeliveryLost):
            log.warning(
                "stage %r: the work is done here, and %s", arrival.stage.name, error
            )
            raise LostRace  # not a failure: another worker has it
        if isinstance(error, DispatchRejected | DestinationUnavailable):
            raise error  # rolled back; the session holds the delivery
        if error is not None:
            # The broker redelivers it, or has committed. Parking it as well would run
            # it once too often.
            raise BrokerUnavailable(
                f"the outcome of the transaction is unknown: {error}"
            )

    def _note(
        self, stage: Stage, seconds: float, error: BrokerError | None, employed: bool
    ) -> None:
        """Announce the broker's commit; there is no second commit that could fail
        here."""

    def _mark(self, arrival: Arrival, record: InboxRecord) -> None:
        """Mark the inbox row of a message whose work is committed everywhere. If that
        is refused, only the mark is lost."""
        try:
            arrival.inbox.finish([record.id])
        except AnyDatabaseError as error:
            log.warning(
                "stage %r: message %s is processed, but cannot be marked as "
                "processed: %s",
                arrival.stage.name,
                record.message_id,
                error,
            )


class BestEffort(BrokerOnly):
    """The database's transaction commits first, then the broker's; the time between
    them is as short as possible."""

    def _work(self, arrival: Arrival, message: Message) -> bool:
        def run() -> None:
            self.handle(arrival, message)
            # The last moment at which a dead broker costs nothing.
            arrival.session.ping()

        _, employed = protocol.once(
            arrival.stage.definition,
            take=lambda: True,  # the handler is idempotent
            run=run,
            finish=lambda *_: None,
        )
        return employed

    def _note(
        self, stage: Stage, seconds: float, error: BrokerError | None, employed: bool
    ) -> None:
        """Measure the time between the database's commit and the broker's, and log an
        error if the second failed."""
        if error is not None:
            log.log(
                logging.ERROR if employed else logging.WARNING,
                "stage %r: the broker's commit failed after the database's (%s); the "
                "message will be redelivered, and its handler must be idempotent: %s",
                stage.name,
                "db=used" if employed else "db=unused",
                error,
            )
        signals.dangerous_window.send_robust(
            sender=None,
            stage=stage.name,
            seconds=seconds,
            failed=error is not None,
            employed=employed,
        )


class Ordered(Outbox):
    """Around the steps of mode outbox: messages of one key are processed one at a
    time."""

    def out_of_turn(
        self, arrival: Arrival, record: InboxRecord, *, attempts: int = 1
    ) -> Outcome | None:
        """Check whether the turn has come."""
        return ordering.out_of_turn(arrival, record, attempts=attempts)

    def lost(self, arrival: Arrival, record: InboxRecord | None) -> Outcome:
        """Settled by a copy; or parked, because another transaction has its key."""
        return ordering.lost(arrival, record)

    def end(self, arrivals: Sequence[Arrival]) -> None:
        """Make the followers due."""
        ordering.wake(arrivals)

    def put_aside(self, arrival: Arrival, record: InboxRecord) -> None:
        """Record its key, for which its followers wait."""
        ordering.aside(arrival, record)

    def kept_headers(self, arrival: Arrival) -> dict[str, str]:
        """All headers except its link, since it has had its turn."""
        return ordering.kept_headers(arrival)


_MODES: dict[str, Mode] = {
    "outbox": Outbox(),
    "best_effort_1pc": BestEffort(),
    "broker_only": BrokerOnly(),
    "none": Outside(),
}
_ORDERED = Ordered()


def session_id(message: Message, stage: Stage) -> UUID:
    """Return the session id of the messages that a stage sends for one message."""
    return wire.session_id(conf.get().SERVICE, message.id, stage.name)


def of(stage: Stage) -> Mode:
    """Return the strategy of a stage's mode."""
    mode = _MODES[stage.transaction]
    return _ORDERED if stage.ordered and not mode.transacted else mode
