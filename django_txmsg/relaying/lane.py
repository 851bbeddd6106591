"""Hops 3 and 4: takes stored messages to the broker, batch by batch.

A claim is one short statement; no database transaction is open while the broker is
used; only a receipt marks a row. The relay uses it, the dispatcher after a commit, and
the control message: any number of lanes may run side by side.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections import Counter
from collections.abc import Set as AbstractSet

from .. import conf, signals, tracing, wire
from ..brokers import get_broker
from ..brokers.base import Outgoing, Session
from ..errors import BrokerError, BrokerUnavailable
from ..models import OutboxMessage
from ..models.outbox import OutboxManager
from ..models.outbox_claim import Claimed
from ..runtime.connections import shed
from ..runtime.leases import Lease
from . import pauses
from .budget import Budget, Part
from .key_chain import link
from .pauses import Trial
from .receipts import Receipts, judge, split
from .settlement import Settlement
from .sweep import Sweep
from .turn import Turn

log = logging.getLogger("django_txmsg.relay")

#: Longest lease, in seconds, of a lane that dispatches after a commit. Web processes
#: are killed more often than relays, and their messages wait for the lease's end.
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
        turn: Turn | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`stop`, once set, ends claiming, and waiting for a database that is away;
        `turn` and `budget` are shared by lanes that work side by side."""
        settings = conf.get().RELAY
        self.using, self.broker_alias = using, broker
        self._batch_size = batch_size or settings.BATCH_SIZE
        self._links = settings.LINK_KEYS
        self._lease = min(settings.LEASE, longest_lease)
        self._stop = stop or threading.Event()
        self._turn, self._budget = turn or Turn(), budget or Budget()
        self._session: Session | None = None
        self._sweep = Sweep()
        self._pauses = pauses.of(using, broker)
        #: The destinations that were paused at the last claim, ...
        self._held: AbstractSet[str] = frozenset()
        #: ... and those that have refused a message since.
        self._refused: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.in_flight = 0

    def dispatch(
        self, *, ids: list[int] | None = None, session_id: uuid.UUID | None = None
    ) -> int:
        """Claim, send and settle one batch. Returns how many rows were claimed.

        Raises BrokerUnavailable with nothing claimed, or all of it released. A
        destination that takes no messages is paused, and its rows are released.
        """
        # Connect to the broker before the claim: an outage must not cause pointless
        # leases.
        self._open()
        trial = self._pauses.begin_trial()
        if trial is not None:
            count = None
            try:
                count = self._dispatch(ids, session_id, trial)
            finally:
                narrowed = ids is not None or session_id is not None
                # An empty list means no rows, unlike None.
                found = None if narrowed and not count else count
                self._pauses.end_trial(trial, found, self._batch_size)
            if count:
                return count
        return self._dispatch(ids, session_id, None)

    def _dispatch(
        self, ids: list[int] | None, session_id: uuid.UUID | None, trial: Trial | None
    ) -> int:
        while True:
            with self._budget.part(self._stop) as part:
                count = part and self._dispatch_part(part, ids, session_id, trial)
            if part is None:
                return 0
            if count or not part.is_to_claim_again:
                return count or 0

    def _dispatch_part(
        self,
        part: Part,
        ids: list[int] | None,
        session_id: uuid.UUID | None,
        trial: Trial | None,
    ) -> int:
        token = uuid.uuid4()
        self._refused.clear()
        with self._turn.at_database():
            # The lane may have been stopped while it waited for its turn.
            stopped = self._stop.is_set()
            claimed = (
                [] if stopped else self._claim(token, part, ids, session_id, trial)
            )
        size = sum(len(row.body) for row in claimed)
        self._budget.claimed(part, size)
        shed(self.using, size)
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
                settlement = Settlement(
                    self.broker_alias,
                    token,
                    lease,
                    self.counts,
                    self._stop,
                    self._turn,
                )
                if self._links:
                    claimed = link(
                        claimed, token, using=self.using, broker=self.broker_alias
                    )
                self._work(claimed, settlement)
        finally:
            self.in_flight = 0
        return len(held)

    def held_back(self, ids: list[int]) -> list[int]:
        """Return those of the rows that are due but wait for earlier rows of their
        keys, together with the earlier ones: at most one batch."""
        return self._outbox().held_back(
            ids,
            self._batch_size,
            broker=self.broker_alias,
            services=conf.get().services,
        )

    def _work(self, claimed: list[Claimed], settlement: Settlement) -> None:
        for row in claimed:
            if row.expired:
                settlement.bury(row, "expired", f"expired at {row.expires_at}")
        alive = [row for row in claimed if not row.expired]
        # A message that failed before may be the one on which the broker hangs up: it
        # is sent alone, with those that must follow it, and takes no others down.
        behind = {row.key for row in alive if row.attempts and row.key}
        suspect = [row for row in alive if row.attempts or row.key in behind]
        fresh = [row for row in alive if not (row.attempts or row.key in behind)]
        try:
            self._send(fresh, settlement, apart=False)
            self._send(suspect, settlement, apart=True)
        except BrokerUnavailable:
            settlement.give_back(alive)
            raise

    @property
    def next_trial(self) -> float | None:
        """Seconds until the next trial of a paused destination, if there is one."""
        return self._pauses.next_trial()

    def close(self) -> None:
        """Close the session with the broker."""
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
        self,
        token: uuid.UUID,
        part: Part,
        ids: list[int] | None,
        session_id: uuid.UUID | None,
        trial: Trial | None,
    ) -> list[Claimed]:
        only = None if trial is None else trial.destination
        held = self._pauses.held()
        if self._held - held:
            self._sweep.rewind()  # what waited there is older than its floor
        self._held = held

        def claim(floor: str | None) -> list[Claimed]:
            return self._outbox().claim(
                broker=self.broker_alias,
                token=token,
                lease=self._lease,
                limit=min(trial.limit, self._batch_size) if trial else self._batch_size,
                ids=ids,
                session_id=session_id,
                floor=floor,
                services=conf.get().services,
                max_bytes=part.max_bytes,
                larger=part.larger,
                only=only,
                but=held - {only},
            )

        narrowed = ids is not None or session_id is not None or trial is not None
        return claim(None) if narrowed else self._sweep.claim(claim)

    def _send(
        self, rows: list[Claimed], settlement: Settlement, *, apart: bool
    ) -> None:
        """Send and settle. Some brokers hang up on one bad message without naming it:
        messages with unknown outcome are then sent again at once, one by one.

        Raises BrokerUnavailable, with unsettled rows still claimed.
        """
        service = conf.get().SERVICE
        while rows := settlement.still_held(rows):
            rows, left = split(rows, self._refused)
            if left:
                settlement.give_back(left)
            if not rows:
                return
            is_new = self._session is None
            session = self._open()
            batch = [
                Outgoing(
                    row.destination,
                    wire.headers_of(row, row.service or service, row.created),
                    row.body,
                )
                for row in rows
            ]
            try:
                with self._turn.at_broker(), tracing.sending(batch) as note:
                    outcomes = session.send(batch, isolate=apart)
                    note(outcomes)
            except BrokerError as error:
                self.close()
                if not is_new:
                    # The lease may have ended since the last batch.
                    continue
                self.counts["unknown"] += len(rows)
                raise BrokerUnavailable(str(error)) from error
            found = judge(rows, outcomes, apart=apart)
            settlement.settle(found)
            self._pause(found)
            if found.unknown:
                self.counts["unknown"] += found.unknown
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

    def _pause(self, found: Receipts) -> None:
        """Pause the destinations that take no messages now, for all lanes."""
        stored = {row.destination for row in found.stored} if found.refused else ()
        for destination, error in found.unavailable.items():
            self._refused.add(destination)
            self._pauses.refused(destination, error, progress=destination in stored)
