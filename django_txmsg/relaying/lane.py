"""Hops 3 and 4: sends stored messages to the broker, batch by batch.

A claim is one short statement. While a lane sends to the broker, no database
transaction is open. A row is marked as dispatched only after the broker has confirmed
the row's message. Lanes are used by the relay, by the dispatcher (after a commit) and
by the receiver of control messages. Any number of lanes may run at the same time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from django.db import Error as AnyDatabaseError
from django.db import connections, transaction

from .. import conf, signals, tracing, wire
from ..brokers import get_broker
from ..brokers.base import Outgoing, Session
from ..errors import BrokerError, BrokerUnavailable, ConfigurationError
from ..models import KeyTail, OutboxMessage
from ..models.fields import limit_waits
from ..models.outbox import Chain, OutboxManager
from ..models.outbox_claim import Claimed
from ..runtime import database_health
from ..runtime.connections import shed
from ..runtime.leases import Lease
from .limits import Budget, Part, Trial, Turn, pauses
from .settlement import Receipts, Settlement, judge, split

#: Longest wait, in seconds, for another relay that links messages of the same keys.
LINK_WAIT = 1.0
#: The same after that wait, for each key and for the next batches of a trial.
KEY_WAIT = 0.01
#: Seconds for which a lane claims no messages of a key that such a relay has locked.
KEY_PAUSE = 1.0

_by_id, _by_key = attrgetter("id"), attrgetter("key")


def link(
    claimed: Sequence[Claimed], token: uuid.UUID, using: str, broker: str, wait: float
) -> list[Claimed]:
    """For each message that has a key, store a link to its predecessor, the previous
    message of its key. Return the messages, with these links in their headers.

    Expired messages get no link. If the lease on any of the messages to be linked has
    ended, this function stores no link, and returns only the other messages. Raises
    OperationalError if it waits for a lock for longer than `wait` seconds.
    """
    chains: dict[Chain, list[Claimed]] = {}
    for row in claimed:
        if row.unlinked and not row.expired:
            chains.setdefault((row.destination, row.key), []).append(row)
    if not chains:
        return list(claimed)
    links = _link(chains, token, using, broker, wait)
    if links is None:
        return [row for row in claimed if not row.unlinked or row.expired]
    return [row.linked(links[row.id]) if row.id in links else row for row in claimed]


def _link(
    chains: dict[Chain, list[Claimed]],
    token: uuid.UUID,
    using: str,
    broker: str,
    wait: float,
) -> dict[int, str | None] | None:
    """Store the links, and return them by the ids of the rows. Returns None if the
    lease has ended: another relay may have linked the same messages. The commit waits
    for the disk: if a crash lost it, two messages could get the same predecessor."""
    links: dict[int, str | None] = {}
    ends = {chain: uuid.UUID(rows[-1].message_id) for chain, rows in chains.items()}
    longest = max(map(len, chains.values()))
    with transaction.atomic(using=using):
        # A relay that was stopped in the middle of this keeps its locks.
        limit_waits(connections[using], wait)
        joints = KeyTail.objects.db_manager(using).advance(broker, ends, longest)
        for chain, rows in chains.items():
            found = joints[chain].links([row.message_id for row in rows])
            links |= zip((row.id for row in rows), found, strict=True)
        outbox = OutboxMessage.objects.db_manager(using)
        if outbox.link(links, token, wire.AFTER) < len(links):
            transaction.set_rollback(True, using=using)
            return None
    return links


Claim = Callable[[str | None], list[Claimed]]


class Sweep:
    """The position in the index at which a lane's next search for rows begins. This is
    the position of the first row in the lane's last claim.

    Settled rows leave dead index entries behind, which PostgreSQL cannot remove while
    any old snapshot is open. See docs/decisions/dispatch-floor-and-sweep.md.
    """

    #: The share of a busy lane's time that may be spent on looking for late commits.
    SHARE = 0.05

    def __init__(self) -> None:
        self._floor: str | None = None
        self._swept_at = self._cost = 0.0

    def rewind(self) -> None:
        """Make the next search begin at the start of the index. Call this if relays can
        again claim rows that the search has already passed."""
        self._floor = None

    def claim(self, claim: Claim) -> list[Claimed]:
        """Claim rows, searching from this position. If there is no row, or if the last
        search from the start of the index was long ago, search from the start of the
        index."""
        began = time.monotonic()
        due = began - self._swept_at >= max(1.0, self._cost / self.SHARE)
        claimed = claim(self._floor) if self._floor and not due else []
        if not claimed:
            began = time.monotonic()
            claimed = claim(None)
            self._swept_at = time.monotonic()
            self._cost = self._swept_at - began
            if not claimed:
                self._floor = None
        if claimed:
            # Back, too: a large transaction that committed late fills many batches.
            self._floor = min(row.due for row in claimed)
        return claimed


log = logging.getLogger("django_txmsg.relay")

#: Longest lease, in seconds, of a lane that dispatches after a commit. Web processes
#: are killed more often than relays, and their messages wait for the lease's end.
AFTER_COMMIT_LEASE = 15.0

#: Seconds after which a lane without rows looks for the heads of keys again.
HEADS_INTERVAL = 1.0

#: The same if that search is expensive: it reads all due rows that cannot be claimed.
HEADS_LONGEST = 60.0


class _Wanted(NamedTuple):
    """What limits the rows of one claim, unless it is None."""

    ids: list[int] | None
    session_id: uuid.UUID | None
    trial: Trial | None = None


class Lane:
    """One broker session and one database connection with which the relay sends
    messages.

    A lane is not thread-safe. A relay process runs several lanes, each in its own
    thread.
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
        """Create a lane. After `stop` is set, the lane claims no more rows and does not
        wait for an unavailable database. The lanes of a process share `turn` and
        `budget`."""
        settings = conf.get().RELAY
        self.using, self.broker_alias = using, broker
        self._batch_size = batch_size or settings.BATCH_SIZE
        self._links = settings.LINK_KEYS
        self._lease = min(settings.LEASE, longest_lease)
        self._stop = stop or threading.Event()
        self._turn, self._budget = turn or Turn(), budget or Budget()
        self._session: Session | None = None
        #: The monotonic time at which the session was opened.
        self.opened = 0.0
        #: Whether the broker has answered a message in the last dispatch().
        self.answered = False
        self._sweep = Sweep()
        #: The monotonic time from which the lane may look for the heads of keys.
        self._heads_at = 0.0
        self._pauses = pauses(using, broker)
        #: The destinations that were paused at the last claim, ...
        self._held: AbstractSet[str] = frozenset()
        #: ... and those that have refused a message since.
        self._refused: set[str] = set()
        #: The monotonic time until which the messages of a locked key are not claimed.
        self.locked: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.in_flight = 0

    def dispatch(
        self, *, ids: list[int] | None = None, session_id: uuid.UUID | None = None
    ) -> int:
        """Claim, send and settle one batch. Returns the number of claimed rows.

        If a destination currently accepts no messages, the lane pauses the destination
        and releases its rows. If the broker is unavailable, the lane releases all rows
        and raises BrokerUnavailable.
        """
        # Connect to the broker before the claim: an outage must not cause pointless
        # leases.
        self.answered = False
        self._open()
        wanted, trial = _Wanted(ids, session_id), self._pauses.begin_trial()
        if trial is not None:
            count = None
            try:
                count = self._dispatch(wanted._replace(trial=trial))
            finally:
                narrowed = ids is not None or session_id is not None
                # An empty list means no rows, unlike None.
                found = None if narrowed and not count else count
                whole = not self.locked
                self._pauses.end_trial(trial, found, self._batch_size, whole=whole)
            if count:
                return count
        return self._dispatch(wanted)

    def _dispatch(self, wanted: _Wanted) -> int:
        while True:
            locked = len(self.locked)
            with self._budget.part(self._stop) as part:
                count = part and self._dispatch_part(part, wanted)
            if part is None:
                return 0
            # A trial goes on with the messages behind those of locked keys.
            again = part.is_to_claim_again or len(self.locked) > locked
            if count or not again:
                return count or 0

    def _dispatch_part(self, part: Part, wanted: _Wanted) -> int:
        token = uuid.uuid4()
        self._refused.clear()
        with self._turn.at_database():
            # The lane may have been stopped while it waited for its turn.
            stopped = self._stop.is_set()
            began = time.monotonic()
            claimed = [] if stopped else self._claim(token, part, wanted)
        size = sum(len(row.body) for row in claimed)
        self._budget.claimed(part, size)
        shed(self.using, size)
        if not claimed:
            return 0
        self.in_flight = len(claimed)
        held = [row.id for row in claimed]
        renew = partial(self._outbox().renew, held, token, self._lease)
        try:
            with Lease(self.using, self._lease, renew, since=began) as lease:
                counts, stop, turn = self.counts, self._stop, self._turn
                settlement = Settlement(
                    self.broker_alias, token, lease, counts, stop, turn
                )
                if self._links:
                    whole, claimed = claimed, self._linked(claimed, settlement, wanted)
                    if len(claimed) < len(whole):
                        kept = {row.id for row in claimed}
                        settlement.give_back([x for x in whole if x.id not in kept])
                self._work(claimed, settlement)
        finally:
            self.in_flight = 0
        # A row of a locked key shows nothing about the destination on trial.
        return len(held if wanted.trial is None else claimed)

    def _linked(
        self, claimed: list[Claimed], settlement: Settlement, wanted: _Wanted
    ) -> list[Claimed]:
        """Link the messages, and return them. Omit those whose keys another relay has
        locked, and those of a claim whose lease has ended. If the database refuses the
        links, release the messages of the keys in question, send the others, and raise
        the error."""
        token, broker = settlement.token, self.broker_alias
        linked = partial(link, token=token, using=self.using, broker=broker)
        # A trial waits only once. Elsewhere, a relay at work may hold the lock.
        waited = wanted.trial and self.locked
        try:
            return linked(claimed, wait=KEY_WAIT if waited else LINK_WAIT)
        except AnyDatabaseError as error:
            keys = {row.key for row in claimed if row.unlinked}
            ready = [row for row in claimed if row.key not in keys]
            rows = [row for row in claimed if row.key in keys]
            if not database_health.gave_up_waiting(error):
                settlement.give_back(rows)
                self._work(ready, settlement)
                raise
        rows.sort(key=_by_key)
        locked: list[Claimed] = []
        for _, group in groupby(rows, _by_key):
            same = list(group)
            try:
                ready += linked(same, wait=KEY_WAIT)
            except AnyDatabaseError as error:
                locked += same
                why = error
        if locked:
            log.warning("%d messages with a key wait for a lock: %s", len(locked), why)
            until = time.monotonic() + KEY_PAUSE
            self.locked |= dict.fromkeys((row.key for row in locked), until)
        return sorted(ready, key=_by_id)

    def held_back(self, ids: list[int]) -> list[int]:
        """Return the ids of the due rows among `ids` that have a key, together with the
        ids of all earlier pending rows of these keys. Returns at most one batch of
        ids."""
        return self._outbox().held_back(
            ids,
            self._batch_size,
            broker=self.broker_alias,
            services=conf.get().services,
        )

    def _work(self, claimed: list[Claimed], settlement: Settlement) -> None:
        for row in claimed:
            if row.malformed:
                why = "the headers in this row of the outbox are no JSON object"
                settlement.bury(row, "malformed_headers", why)
            elif row.expired:
                letter = not wire.is_request(row.headers)
                why = f"expired at {row.expires_at}"
                settlement.bury(row, "expired", why, letter=letter)
        alive = [row for row in claimed if not (row.malformed or row.expired)]
        # A message that failed before may be the one on which the broker hangs up: it
        # is sent alone, with those that must follow it, and takes no others down. So
        # may a refused one, if its destination is not paused.
        unpaused = not self._pauses_destinations
        first = [row for row in alive if row.attempts or (unpaused and row.has_error)]
        keys, ids = {row.key for row in first} - {""}, {row.id for row in first}
        ids |= {row.id for row in alive if row.key in keys}
        suspect = [row for row in alive if row.id in ids]
        fresh = [row for row in alive if row.id not in ids]
        try:
            self._send(fresh, settlement, apart=False)
            self._send(suspect, settlement, apart=True)
        except BrokerUnavailable:
            settlement.give_back(alive)
            raise

    @property
    def _pauses_destinations(self) -> bool:
        return get_broker(self.broker_alias).pauses_destinations

    @property
    def next_trial(self) -> float | None:
        """Seconds until the lane can try a paused destination or a locked key again, if
        there is one."""
        trial, now = self._pauses.next_trial(), time.monotonic()
        waits = [until - now for until in self.locked.values()]
        return min(waits if trial is None else [trial, *waits], default=None)

    def close(self) -> None:
        """Close the session with the broker."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _open(self) -> Session:
        if self._session is None:
            try:
                self._session = get_broker(self.broker_alias).open()
            except ConfigurationError as error:
                # Its client library is missing, say: other brokers can be used.
                raise BrokerUnavailable(str(error)) from error
            self.opened = time.monotonic()
        return self._session

    def _outbox(self) -> OutboxManager:
        return OutboxMessage.objects.db_manager(self.using)

    def _claim(self, token: uuid.UUID, part: Part, wanted: _Wanted) -> list[Claimed]:
        trial = wanted.trial
        only = None if trial is None else trial.destination
        held, now = self._pauses.held(), time.monotonic()
        # A trial tries each key once, so that it ends.
        locked = {key: at for key, at in self.locked.items() if trial or at > now}
        if self._held - held or len(locked) < len(self.locked):
            self._sweep.rewind()  # its messages are older than the sweep's place
        self._held, self.locked = held, locked

        def claim(floor: str | None, *, heads: bool = False) -> list[Claimed]:
            return self._outbox().claim(
                broker=self.broker_alias,
                token=token,
                lease=self._lease,
                limit=min(trial.limit, self._batch_size) if trial else self._batch_size,
                ids=wanted.ids,
                session_id=wanted.session_id,
                floor=floor,
                services=conf.get().services,
                max_bytes=part.max_bytes,
                larger=part.larger,
                only=only,
                but=held - {only},
                but_keys=self.locked,
                heads=heads,
            )

        if any(one is not None for one in wanted):
            return claim(None)
        claimed = self._sweep.claim(claim)
        if not claimed and time.monotonic() >= self._heads_at:
            # Another transaction may have locked the first row of a key, and the rows
            # behind it may have filled the batch.
            began = time.monotonic()
            claimed = claim(None, heads=True)
            ended = time.monotonic()
            pause = min(HEADS_LONGEST, (ended - began) / Sweep.SHARE)
            self._heads_at = 0.0 if claimed else ended + max(HEADS_INTERVAL, pause)
        return claimed

    def _send(
        self, rows: list[Claimed], settlement: Settlement, *, apart: bool
    ) -> None:
        """Send the rows, and settle them. Some brokers close the connection because of
        one bad message, without naming the message. Then the messages whose outcome is
        unknown are sent again, one by one.

        If the broker is unavailable, raises BrokerUnavailable. The caller must then
        release the rows that are not settled.
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
            self.answered |= bool(found.stored or found.failed or found.refused)
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
                ) from found.silence
            # No message is to blame if the connection ended while the lane was idle.
            if found.again and not apart and (is_new or found.unknown):
                apart = True
                log.info(
                    "broker %r hung up on %d messages: sending them one by one",
                    self.broker_alias,
                    len(found.again),
                )
            rows = found.again

    def _pause(self, found: Receipts) -> None:
        """Pause, for all lanes, the destinations that currently accept no messages."""
        stored = {row.destination for row in found.stored} if found.refused else ()
        unavailable = {row.destination: error for row, error in found.refused}
        for destination, error in unavailable.items():
            if self._pauses_destinations:
                self._refused.add(destination)
            self._pauses.refused(destination, error, progress=destination in stored)
