"""Hops 3 and 4: takes stored messages to the broker, batch by batch.

A claim is one short statement; the broker is asked with no database transaction open;
only its receipt marks a row. Used by the relay, by the dispatcher after a commit, and
by the control message: any number of lanes may run side by side.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter

from django.db import transaction

from . import conf, dead_letters, signals, wire
from .brokers import get_broker
from .brokers.base import Outgoing, Session
from .errors import BrokerError, BrokerUnavailable, DispatchRejected, DispatchUnknown
from .models import OutboxMessage
from .models.claimed import Claimed
from .redelivery import Dead, RedeliveryPolicy, decide

log = logging.getLogger("django_txmsg.relay")

#: Longest lease, in seconds, of a lane that dispatches what was just committed. Web
#: processes are killed more often than relays, and what one held waits for its end.
AFTER_COMMIT_LEASE = 15.0


class Lane:
    """One broker session and one database connection that relay together.

    Not thread-safe: a relay process runs several lanes, each in its own thread.
    """

    #: How much of a busy lane's time may go into looking for late committers.
    SWEEP_SHARE = 0.05

    def __init__(
        self,
        using: str,
        broker: str,
        *,
        batch_size: int | None = None,
        longest_lease: float = math.inf,
    ) -> None:
        settings = conf.get().RELAY
        self.using, self.broker_alias = using, broker
        self._batch_size = batch_size or settings.BATCH_SIZE
        self._lease = min(settings.LEASE, longest_lease)
        self._session: Session | None = None
        self._isolate = False
        self._floor: str | None = None
        self._swept_at = self._sweep_cost = 0.0
        self.counts: Counter[str] = Counter()
        self.in_flight = 0

    def dispatch(
        self, *, ids: list[int] | None = None, session_id: uuid.UUID | None = None
    ) -> int:
        """Claim, send and settle one batch. Returns how many rows were claimed.

        Raises BrokerUnavailable with nothing claimed, or with all of it given back.
        """
        # First the broker, then the claim: an outage must not shuffle leases.
        session = self._open()
        token = uuid.uuid4()
        claimed = self._claim(token, ids, session_id)
        if not claimed:
            return 0
        self.in_flight = len(claimed)
        try:
            expired = [row for row in claimed if row.expired]
            alive = [row for row in claimed if not row.expired]
            for row in expired:
                self._bury(row, token, "expired", f"expired at {row.expires_at}")
            if alive:
                self._send(session, alive, token)
        finally:
            self.in_flight = 0
        return len(claimed)

    def close(self) -> None:
        """End the conversation with the broker."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open(self) -> Session:
        if self._session is None:
            self._session = get_broker(self.broker_alias).open()
        return self._session

    def _claim(
        self, token: uuid.UUID, ids: list[int] | None, session_id: uuid.UUID | None
    ) -> list[Claimed]:
        manager = OutboxMessage.objects.db_manager(self.using)

        def claim(floor: str | None) -> list[Claimed]:
            return manager.claim(
                broker=self.broker_alias,
                token=token,
                lease=self._lease,
                limit=self._batch_size,
                ids=ids,
                session_id=session_id,
                floor=floor,
            )

        if ids is not None or session_id is not None:
            return claim(None)
        # Settled rows leave dead index entries behind, which nobody may remove while
        # an old snapshot is open anywhere. A busy lane starts where it left off, and
        # looks from the beginning when it runs dry or has earned the time for it.
        began = time.monotonic()
        due = began - self._swept_at >= max(1.0, self._sweep_cost / self.SWEEP_SHARE)
        claimed = claim(self._floor) if self._floor and not due else []
        if not claimed:
            began = time.monotonic()
            claimed = claim(None)
            self._swept_at = time.monotonic()
            self._sweep_cost = self._swept_at - began
            if not claimed:
                self._floor = None
        if claimed:
            # Texts of one database compare as their instants do, but for a change of
            # its clock's zone, which the next sweep mends.
            first = claimed[0].floor
            self._floor = max(self._floor, first) if self._floor else first
        return claimed

    def _send(self, session: Session, rows: list[Claimed], token: uuid.UUID) -> None:
        service = conf.get().SERVICE
        batch = [
            Outgoing(
                row.destination, wire.headers_of(row, service, row.created), row.body
            )
            for row in rows
        ]
        isolate, self._isolate = self._isolate, False
        try:
            outcomes = session.send(batch, isolate=isolate)
        except BrokerError as error:
            self.close()
            self._settle(rows, [DispatchUnknown(str(error))] * len(rows), token, False)
            raise BrokerUnavailable(str(error)) from error
        self._settle(rows, outcomes, token, isolate)
        unknown = [one for one in outcomes if isinstance(one, DispatchUnknown)]
        if unknown:
            self.close()
            # Some brokers hang up on one bad message without saying which.
            self._isolate = not isolate
            signals.outcome_unknown.send_robust(
                sender=None, count=len(unknown), broker=self.broker_alias
            )
            raise BrokerUnavailable(
                f"no receipt for {len(unknown)} of {len(rows)} messages, which will be "
                f"sent again with the same ids: {unknown[0]}"
            )

    def _settle(
        self,
        rows: list[Claimed],
        outcomes: list[BrokerError | None],
        token: uuid.UUID,
        isolated: bool,
    ) -> None:
        """Mark what is proven, back off what is refused, give back the rest."""
        manager = OutboxMessage.objects.db_manager(self.using)
        stored: list[Claimed] = []
        returned: list[Claimed] = []
        failed: list[tuple[Claimed, BrokerError]] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome is None:
                stored.append(row)
            elif isinstance(outcome, DispatchRejected):
                failed.append((row, outcome))
            elif isolated and getattr(outcome, "written", False):
                # Alone on the wire, and the broker hung up: this is the one.
                failed.append((row, outcome))
            else:
                returned.append(row)
        if stored:
            kept = manager.mark_dispatched([row.id for row in stored], token)
            self._count("dispatched", len(stored))
            self._lost(len(stored) - kept)
        if returned:
            self._lost(len(returned) - manager.release([r.id for r in returned], token))
        unknown = sum(isinstance(one, DispatchUnknown) for one in outcomes)
        self._count("unknown", unknown)
        for row, error in failed:
            self._refused(row, token, error)
        if stored and signals.announced(signals.message_dispatched):
            for row in stored:
                signals.announce(
                    signals.message_dispatched,
                    id=row.message_id,
                    destination=row.destination,
                    broker=self.broker_alias,
                    attempt=row.attempts + 1,
                )

    def _refused(self, row: Claimed, token: uuid.UUID, error: BrokerError) -> None:
        attempt = row.attempts + 1
        policy = RedeliveryPolicy(max_redeliveries=conf.get().RELAY.MAX_ATTEMPTS - 1)
        decision = decide(policy, attempt, error)
        if isinstance(decision, Dead):
            self._bury(row, token, "rejected", str(error))
            return
        manager = OutboxMessage.objects.db_manager(self.using)
        kept = manager.reschedule(
            row.id, token, delay=decision.delay, error=str(error)[:2000]
        )
        self._count("rejected", 1)
        self._lost(1 - kept)
        log.warning(
            "dispatch failed id=%s destination=%s attempt=%d next in %.1f s: %s",
            row.message_id,
            row.destination,
            attempt,
            decision.delay,
            error,
        )

    def _bury(self, row: Claimed, token: uuid.UUID, reason: str, error: str) -> None:
        manager = OutboxMessage.objects.db_manager(self.using)
        with transaction.atomic(using=self.using):
            kept = manager.mark_dead(row.id, token, error=f"{reason}: {error}"[:2000])
            if kept:
                dead_letters.bury_outgoing(
                    row, self.using, self.broker_alias, reason, error
                )
        self._count("dead", kept)
        self._lost(1 - kept)

    def _lost(self, count: int) -> None:
        if count > 0:
            self._count("lease_lost", count)
            log.warning(
                "the lease of %d messages ended before they were settled; they are "
                "sent again, and inboxes drop the copies. If this recurs, look why "
                "the broker takes more than %g s for a batch, or raise "
                'TXMSG["RELAY"]["LEASE"]',
                count,
                self._lease,
            )
            signals.lease_lost.send_robust(
                sender=None, count=count, broker=self.broker_alias
            )

    def _count(self, what: str, count: int) -> None:
        self.counts[what] += count
