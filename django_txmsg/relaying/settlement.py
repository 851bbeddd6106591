"""Hop 4: records the broker's answers in the rows that a lane has claimed."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from django.db import Error as AnyDatabaseError
from django.db import connections, transaction

from .. import conf, signals
from ..brokers import get_broker
from ..dead_letters import burial
from ..django_internals import in_block
from ..envelope.failure import storable, stored_text
from ..envelope.redelivery import Dead, RedeliveryPolicy, decide
from ..errors import (
    BrokerError,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ..models import OutboxMessage
from ..models.outbox import OutboxManager
from ..models.outbox_claim import Claimed
from ..runtime import database_health
from ..runtime.leases import Lease
from .limits import Turn


@dataclass
class Receipts:
    """The rows of one batch, by outcome."""

    #: The broker has stored them, with proof.
    stored: list[Claimed] = field(default_factory=list)
    #: Refused because of what they are: the refusal counts as an attempt.
    failed: list[tuple[Claimed, BrokerError]] = field(default_factory=list)
    #: Their destination takes no messages now, and why: released without an attempt.
    refused: list[tuple[Claimed, DestinationUnavailable]] = field(default_factory=list)
    #: The broker hung up on an unknown one of them: each is sent again alone.
    again: list[Claimed] = field(default_factory=list)
    #: Released unchanged.
    returned: list[Claimed] = field(default_factory=list)
    #: Whether the broker has ended the connection.
    hung_up: bool = False
    #: How many were sent without an answer.
    unknown: int = 0
    #: The reason if the broker cannot be used now because it fell silent, rather than
    #: hung up.
    silence: BrokerError | None = None


def judge(
    rows: Sequence[Claimed], outcomes: Sequence[BrokerError | None], *, apart: bool
) -> Receipts:
    """Group the rows by outcome. `apart` means that the rows were sent one by one. Then
    the row during whose sending the broker hung up is at fault."""
    found = Receipts()
    open_rows: list[Claimed] = []
    spoilt: set[str] = set()
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome is None:
            found.stored.append(row)
            continue
        if isinstance(outcome, DestinationUnavailable):
            found.refused.append((row, outcome))
            spoilt.add(row.key)
            continue
        unknown = isinstance(outcome, DispatchUnknown)
        ended = isinstance(outcome, DispatchUnknown) and outcome.hung_up
        written = isinstance(outcome, DispatchUnknown) and outcome.written
        found.unknown += written
        found.hung_up |= ended
        if isinstance(outcome, DispatchRejected) or (apart and ended and written):
            found.failed.append((row, outcome))
            spoilt.add(row.key)
        else:
            open_rows.append(row)
            if unknown and not ended:
                found.silence = found.silence or outcome
    spoilt.discard("")
    for row in open_rows:
        # Messages that follow a failed one of their key wait until that one has left.
        goes = found.hung_up and row.key not in spoilt
        (found.again if goes else found.returned).append(row)
    nothing = not (found.stored or found.failed or found.refused)
    if apart and nothing and found.again:
        # Nothing was written: sending again would not find the message.
        found.returned += found.again
        found.again = []
        found.silence = next(one for one in outcomes if one is not None)
    return found


def split(
    rows: Sequence[Claimed], destinations: Collection[str]
) -> tuple[list[Claimed], list[Claimed]]:
    """Return the rows that may be sent, and the rows that must wait. A row must wait if
    it goes to one of the `destinations`. Each later row with the key of a waiting row
    must wait, too."""
    sound: list[Claimed] = []
    left: list[Claimed] = []
    keys: set[str] = set()
    for row in rows:
        if row.destination in destinations or row.key in keys:
            left.append(row)
            keys |= {row.key} - {""}
        else:
            sound.append(row)
    return sound, left


log = logging.getLogger("django_txmsg.relay")


@dataclass(frozen=True)
class Settlement:
    """Settles the rows of one claim. Every statement checks the claim's token. So the
    settlement never changes a row whose lease has ended: another relay may have claimed
    that row."""

    broker_alias: str
    token: uuid.UUID
    lease: Lease
    counts: Counter[str]
    #: After this is set, it no longer waits for an unavailable database.
    stop: threading.Event
    turn: Turn

    @property
    def using(self) -> str:
        """The alias of the database that stores the rows."""
        return self.lease.using

    def _outbox(self) -> OutboxManager:
        return OutboxMessage.objects.db_manager(self.using)

    def still_held(self, rows: list[Claimed]) -> list[Claimed]:
        """Return the rows that still belong to this claim. If the lease has ended at
        any time, other relays may have claimed some of the rows since, and some rows
        may have been cancelled. These rows are omitted, and so are rows that another
        transaction has locked: it may be cancelling them. The other rows of their keys
        are released, so that they do not overtake them."""
        if not (rows and self.lease.lapsed):
            return rows
        ids = [row.id for row in rows]
        with self.lease.between_renewals():
            held = set(self._outbox().extend(ids, self.token, self.lease.seconds))
        self._lost(len(ids) - len(held))
        keys = {row.key for row in rows if row.id not in held} - {""}
        ours = [row for row in rows if row.id in held]
        self.give_back([row for row in ours if row.key in keys])
        return [row for row in ours if row.key not in keys]

    def give_back(self, rows: Sequence[Claimed]) -> None:
        """Release the unsettled rows. Rows that another transaction has locked wait
        until the lease ends, so that the other rows of the claim do not wait, too."""
        ids = [row.id for row in rows]

        def release() -> int:
            with self.lease.between_renewals():
                return self._outbox().release(ids, self.token, skip_locked=True)

        self._fenced(0, release)

    def settle(self, found: Receipts) -> None:
        """Settle the rows. Rows that the broker has confirmed are marked as dispatched.
        Rows that the broker rejected are postponed or buried. All other rows are
        released."""
        stored = [row.id for row in found.stored]
        returned = [row.id for row in found.returned]
        if stored:
            self._fenced(len(stored), lambda: self._mark(stored))
            self.counts["dispatched"] += len(stored)
        if returned:
            self._fenced(
                len(returned), lambda: self._outbox().release(returned, self.token)
            )
        self._give_back_refused(found)
        for row, error in found.failed:
            self._refused(row, error)
        if stored and signals.announced(signals.message_dispatched):
            for row in found.stored:
                signals.announce(
                    signals.message_dispatched,
                    id=uuid.UUID(row.message_id),
                    destination=row.destination,
                    broker=self.broker_alias,
                    attempt=row.attempts + 1,
                )

    def _give_back_refused(self, found: Receipts) -> None:
        """Release rows whose destination currently accepts no messages, and store the
        broker's error. If the destination will not be paused, the rows wait instead."""
        paused = get_broker(self.broker_alias).pauses_destinations
        delay = 0.0 if paused else conf.get().RELAY.BREAKER_MAX_PAUSE
        groups: dict[str, tuple[list[int], str]] = {}
        for row, error in found.refused:
            words = stored_text(error)
            # Rows that wait by themselves may have been refused for different reasons.
            ids, _ = groups.setdefault(
                row.destination if paused else words, ([], words)
            )
            ids.append(row.id)
        outbox = self._outbox()
        for ids, words in groups.values():
            release = partial(outbox.release, ids, self.token, error=words, delay=delay)
            self._fenced(len(ids), release)
            self.counts["refused"] += len(ids)

    def _mark(self, stored: list[int]) -> int:
        # Refusals are rare, and recorded row by row, without waiting for a turn.
        with self.turn.at_database():
            return self._outbox().mark_dispatched(stored, self.token)

    def bury(
        self, row: Claimed, reason: str, error: str, *, letter: bool = True
    ) -> None:
        """Mark a row as dead. With `letter`, also store its dead letter, in the same
        transaction."""

        def bury() -> int:
            with transaction.atomic(using=self.using):
                kept = self._outbox().mark_dead(
                    row.id,
                    self.token,
                    error=storable(f"{reason}: {error}")[:2000],
                    cancelled=not letter,
                )
                if kept and letter:
                    burial.bury_outgoing(
                        row, self.using, self.broker_alias, reason, error
                    )
            return kept

        self.counts["dead" if letter else "cancelled"] += self._fenced(1, bury)

    def _fenced(self, count: int, statement: Callable[[], int]) -> int:
        """Run a statement that checks the token. Returns the number of changed rows.
        Those of `count` rows that it has not changed belong to another relay now.

        A receipt must not be lost if the database is unavailable, so the statement is
        repeated until the lease has ended. After a repetition the number of changed
        rows is unknown, so `count` is returned instead.
        """
        connection = connections[self.using]
        pause, repeated = 0.05, False
        while True:
            try:
                changed = statement()
            except AnyDatabaseError as error:
                # Not to a pool either: the server may take no writes any more.
                database_health.discard(self.using)
                over = not self.lease.left or self.stop.is_set()
                if over or in_block(connection) or not database_health.may_pass(error):
                    raise
                log.info("retrying to record the broker's receipts: %s", error)
            else:
                kept = count if repeated else changed
                self._lost(count - kept)
                return kept
            self.stop.wait(min(pause, self.lease.left))
            pause, repeated = min(2 * pause, 2.0), True

    def _refused(self, row: Claimed, error: BrokerError) -> None:
        attempt = row.attempts + 1
        policy = RedeliveryPolicy(max_redeliveries=conf.get().RELAY.MAX_ATTEMPTS - 1)
        decision = decide(policy, attempt, error)
        if isinstance(decision, Dead):
            self.bury(row, "rejected", str(error))
            return
        delay = decision.delay
        self._fenced(
            1,
            lambda: self._outbox().reschedule(
                row.id, self.token, delay=delay, error=stored_text(error)
            ),
        )
        self.counts["rejected"] += 1
        log.warning(
            "dispatch failed id=%s destination=%s attempt=%d next in %.1f s: %s",
            row.message_id,
            row.destination,
            attempt,
            decision.delay,
            error,
        )

    def _lost(self, count: int) -> None:
        if count > 0:
            self.counts["lease_lost"] += count
            log.warning(
                "the lease of %d messages ended before they were settled; they are "
                "sent again, and inboxes drop the copies. If this recurs, look what "
                "stops this process or the database for longer than %g s",
                count,
                self.lease.seconds,
            )
            signals.lease_lost.send_robust(
                sender=None, count=count, broker=self.broker_alias
            )
