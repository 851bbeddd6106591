"""Hops 3 and 4: takes stored messages to the broker, batch by batch.

A claim is one short statement; the broker is asked with no database transaction open;
only its receipt marks a row. Used by the relay, by the dispatcher after a commit, and
by the control message: any number of lanes may run side by side.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable

from django.db import InterfaceError, OperationalError, connections, transaction

from .. import conf, signals, wire
from ..brokers import get_broker
from ..brokers.base import Outgoing, Session
from ..dead_letters import burial
from ..envelope.redelivery import Dead, RedeliveryPolicy, decide
from ..errors import BrokerError, BrokerUnavailable
from ..models import OutboxMessage
from ..models.outbox import OutboxManager
from ..models.outbox_claim import Claimed
from ..upkeep.leases import Lease
from .receipts import Receipts, judge
from .sweep import Sweep

log = logging.getLogger("django_txmsg.relay")

_DATABASE_ERRORS = (OperationalError, InterfaceError)

#: Longest lease, in seconds, of a lane that dispatches what was just committed. Web
#: processes are killed more often than relays, and what one held waits for its end.
AFTER_COMMIT_LEASE = 15.0


class Lane:
    """One broker session and one database connection that relay together.

    Not thread-safe: a relay process runs several lanes, each in its own thread.
    """

    def __init__(
        self,
        using: str,
        broker: str,
        *,
        batch_size: int | None = None,
        longest_lease: float = math.inf,
        stop: threading.Event | None = None,
    ) -> None:
        """`stop`, once set, ends waiting for a database that is away."""
        settings = conf.get().RELAY
        self.using, self.broker_alias = using, broker
        self._batch_size = batch_size or settings.BATCH_SIZE
        self._lease = min(settings.LEASE, longest_lease)
        self._stop = stop or threading.Event()
        self._session: Session | None = None
        self._sweep = Sweep()
        self.counts: Counter[str] = Counter()
        self.in_flight = 0

    def dispatch(
        self, *, ids: list[int] | None = None, session_id: uuid.UUID | None = None
    ) -> int:
        """Claim, send and settle one batch. Returns how many rows were claimed.

        Raises BrokerUnavailable with nothing claimed, or with all of it given back.
        """
        # First the broker, then the claim: an outage must not shuffle leases.
        self._open()
        token = uuid.uuid4()
        claimed = self._claim(token, ids, session_id)
        if not claimed:
            return 0
        self.in_flight = len(claimed)
        held = [row.id for row in claimed]
        try:
            with Lease(
                self.using,
                self._lease,
                lambda: self._outbox().extend(held, token, self._lease),
            ) as lease:
                self._work(claimed, token, lease)
        finally:
            self.in_flight = 0
        return len(claimed)

    def _work(self, claimed: list[Claimed], token: uuid.UUID, lease: Lease) -> None:
        for row in claimed:
            if row.expired:
                self._bury(row, token, lease, "expired", f"expired at {row.expires_at}")
        alive = [row for row in claimed if not row.expired]
        # What has failed before may be what makes the broker hang up: it goes by
        # itself, with what has to follow it, and takes no others along.
        behind = {row.key for row in alive if row.attempts and row.key}
        suspect = [row for row in alive if row.attempts or row.key in behind]
        fresh = [row for row in alive if not (row.attempts or row.key in behind)]
        try:
            self._send(fresh, token, lease, apart=False)
            self._send(suspect, token, lease, apart=True)
        except BrokerUnavailable:
            # The fence leaves alone what is settled by now.
            left = [row.id for row in alive]
            self._settled(lease, 0, lambda: self._outbox().release(left, token))
            raise

    def close(self) -> None:
        """End the conversation with the broker."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open(self) -> Session:
        if self._session is None:
            self._session = get_broker(self.broker_alias).open()
        return self._session

    def _outbox(self) -> OutboxManager:
        return OutboxMessage.objects.db_manager(self.using)

    def _claim(
        self, token: uuid.UUID, ids: list[int] | None, session_id: uuid.UUID | None
    ) -> list[Claimed]:
        def claim(floor: str | None) -> list[Claimed]:
            return self._outbox().claim(
                broker=self.broker_alias,
                token=token,
                lease=self._lease,
                limit=self._batch_size,
                ids=ids,
                session_id=session_id,
                floor=floor,
            )

        narrowed = ids is not None or session_id is not None
        return claim(None) if narrowed else self._sweep.claim(claim)

    def _send(
        self, rows: list[Claimed], token: uuid.UUID, lease: Lease, *, apart: bool
    ) -> None:
        """Send and settle. Some brokers hang up on one bad message without saying
        which: what they leave unknown is sent again at once, one by one.

        Raises BrokerUnavailable, with what is not settled still claimed.
        """
        service = conf.get().SERVICE
        while rows:
            is_new = self._session is None
            session = self._open()
            batch = [
                Outgoing(
                    row.destination,
                    wire.headers_of(row, service, row.created),
                    row.body,
                )
                for row in rows
            ]
            try:
                outcomes = session.send(batch, isolate=apart)
            except BrokerError as error:
                self.close()
                if not is_new:
                    # It may have ended at any time since the last batch.
                    continue
                self._count("unknown", len(rows))
                raise BrokerUnavailable(str(error)) from error
            found = judge(rows, outcomes, apart=apart)
            self._settle(found, token, lease)
            if found.unknown:
                self._count("unknown", found.unknown)
                signals.outcome_unknown.send_robust(
                    sender=None, count=found.unknown, broker=self.broker_alias
                )
            if found.silence or found.hung_up:
                self.close()
            if found.silence:
                raise BrokerUnavailable(
                    f"no receipt for {len(found.returned)} of {len(rows)} messages, "
                    f"which will be sent again with the same ids: {found.silence}"
                )
            if found.again and not apart:
                log.info(
                    "broker %r hung up on %d messages: each again by itself",
                    self.broker_alias,
                    len(found.again),
                )
            rows, apart = found.again, True

    def _settle(self, found: Receipts, token: uuid.UUID, lease: Lease) -> None:
        """Mark what is proven, back off what is refused, give back the rest."""
        stored = [row.id for row in found.stored]
        returned = [row.id for row in found.returned]
        if stored:
            kept = self._settled(
                lease,
                len(stored),
                lambda: self._outbox().mark_dispatched(stored, token),
            )
            self._count("dispatched", len(stored))
            self._lost(len(stored) - kept)
        if returned:
            kept = self._settled(
                lease, len(returned), lambda: self._outbox().release(returned, token)
            )
            self._lost(len(returned) - kept)
        for row, error in found.failed:
            self._refused(row, token, lease, error)
        if stored and signals.announced(signals.message_dispatched):
            for row in found.stored:
                signals.announce(
                    signals.message_dispatched,
                    id=row.message_id,
                    destination=row.destination,
                    broker=self.broker_alias,
                    attempt=row.attempts + 1,
                )

    def _settled(self, lease: Lease, count: int, statement: Callable[[], int]) -> int:
        """Run a statement that the token fences, and return how many rows it changed.

        A receipt must not be forgotten because the database went away behind it: the
        statement is repeated until the lease has ended. Then nobody knows what the
        first try did, and `count` is returned.
        """
        connection = connections[self.using]
        pause, repeated = 0.05, False
        while True:
            try:
                changed = statement()
                return count if repeated else changed
            except _DATABASE_ERRORS as error:
                connection.close()
                if connection.in_atomic_block or not lease.left or self._stop.is_set():
                    raise
                log.info("what the broker has answered is noted once more: %s", error)
            self._stop.wait(min(pause, lease.left))
            pause, repeated = min(2 * pause, 2.0), True

    def _refused(
        self, row: Claimed, token: uuid.UUID, lease: Lease, error: BrokerError
    ) -> None:
        attempt = row.attempts + 1
        policy = RedeliveryPolicy(max_redeliveries=conf.get().RELAY.MAX_ATTEMPTS - 1)
        decision = decide(policy, attempt, error)
        if isinstance(decision, Dead):
            self._bury(row, token, lease, "rejected", str(error))
            return
        delay = decision.delay
        kept = self._settled(
            lease,
            1,
            lambda: self._outbox().reschedule(
                row.id, token, delay=delay, error=str(error)[:2000]
            ),
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

    def _bury(
        self, row: Claimed, token: uuid.UUID, lease: Lease, reason: str, error: str
    ) -> None:
        def bury() -> int:
            with transaction.atomic(using=self.using):
                kept = self._outbox().mark_dead(
                    row.id, token, error=f"{reason}: {error}"[:2000]
                )
                if kept:
                    burial.bury_outgoing(
                        row, self.using, self.broker_alias, reason, error
                    )
            return kept

        kept = self._settled(lease, 1, bury)
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
