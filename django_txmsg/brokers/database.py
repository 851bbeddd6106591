"""Hops 4 to 6 without a message server: queues in tables of a Django database.

The URL is `database://`. This broker needs no installation, and has the guarantees of
its database. A delivery is a lease. If a consumer dies, its leases end, and another
consumer gets the messages. A URL with all options is
`database://ALIAS?lease=30&poll=0.1`. Both times are in seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar
from urllib.parse import parse_qsl

from django.conf import settings as django_settings
from django.db import DataError, connections, transaction
from django.db import Error as AnyDatabaseError

from .. import conf, wire
from ..django_internals import in_block
from ..envelope.broker_url import split_url
from ..errors import (
    MAX_SECONDS,
    BrokerError,
    BrokerUnavailable,
    DeliveryLost,
    DispatchRejected,
)
from ..models import claiming
from ..models.claiming import Share
from ..models.queue import QueueMessage, QueueSubscription, due_in, queue_name
from ..runtime import database_health, notifications
from ..runtime.connections import shed
from ..runtime.leases import Lease
from ..runtime.notifications import notify
from .base import (
    Broker,
    Delivery,
    Outgoing,
    Session,
    acknowledges_now,
    one_by_one,
    unstorable,
)

_PRIORITY = re.compile(r"-?\d{1,3}", re.ASCII)


def read_headers(written: str) -> tuple[dict[str, str], str]:
    """Return a row's headers as text, and a description of what is wrong with them. The
    description is "" if the headers are valid. Somebody may have inserted the row by
    hand, so the column may contain any JSON."""
    try:
        given = json.loads(written)
        if not isinstance(given, dict):
            return {}, f"its headers are not an object: {written[:200]}"
        strange = [name for name, value in given.items() if not isinstance(value, str)]
        for name in strange:
            given[name] = json.dumps(given[name])
    except (ValueError, RecursionError) as error:
        return {}, f"its headers cannot be read: {error}"
    if strange:
        return given, f"its header {strange[0][:80]!r} is not text"
    return given, unstorable(given)


def priority(outgoing: Outgoing) -> dict[str, int]:
    """Return a dict with the name and the value of the column `priority`. Return an
    empty dict if the message is not a task, or if the task has the default priority."""
    given = outgoing.headers.get(wire.TASK_PRIORITY, "")
    if not wire.is_task(outgoing.destination) or not _PRIORITY.fullmatch(given):
        return {}
    return {"priority": int(given)}


log = logging.getLogger("django_txmsg.brokers.database")

Result = TypeVar("Result")


def ask(using: str, query: Callable[[], Result]) -> Result:
    """Query a database, and return the result. Raises BrokerUnavailable if the database
    does not answer or refuses the query, and drops the connection: the cause may be its
    session, such as a search_path that a handler has set."""
    try:
        return query()
    except AnyDatabaseError as error:
        if not database_health.may_pass(error):
            raise
        if database_health.is_away(error) or not in_block(connections[using]):
            database_health.discard(using)
        raise BrokerUnavailable(f"database {using!r}: {error}") from error


#: Seconds between two checks that the listener is still alive, while no messages
#: arrive.
LONGEST_WAIT = 1.0
#: Seconds for which to wait until there is room for a large body, before asking again.
ROOM_WAIT = 0.1


class DatabaseBroker(Broker):
    """A broker whose queues are tables in one of Django's databases."""

    kind = "database"

    def __init__(self, alias: str, url: str) -> None:
        super().__init__(alias, url)
        parts = split_url(url)
        self.stored_in = self._using = parts.netloc or "default"
        self._options = dict(parse_qsl(parts.query))

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> DatabaseSession:
        lease = float(self._options.get("lease", 30.0))
        poll = float(self._options.get("poll", 0.1))
        return DatabaseSession(self._using, lease, poll)

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        QueueSubscription.objects.db_manager(self._using).remove(topic, subscriber)

    def check(self) -> list[str]:
        found = []
        if self._using not in django_settings.DATABASES:
            found.append(f"there is no database {self._using!r} in DATABASES")
        elif connections[self._using].vendor not in ("postgresql", "sqlite"):
            kind = connections[self._using].vendor
            found.append(
                f"the database {self._using!r} is {kind}, and queues are kept in "
                f"PostgreSQL or SQLite: database://ALIAS names another"
            )
        for name, value in self._options.items():
            try:
                sound = name in ("lease", "poll") and 0 < float(value) <= MAX_SECONDS
            except ValueError:
                sound = False
            if not sound:
                found.append(f"{name}={value} is not lease or poll with seconds > 0")
        return found


class DatabaseSession(Session):
    """Sends to the queue tables, and holds the leases of one consumer."""

    #: Most seconds of work that a consumer claims from a queue ahead.
    AHEAD = 0.2

    def __init__(self, using: str, lease: float, poll: float) -> None:
        self._using, self._ask = using, partial(ask, using)
        self._lease, self._poll = lease, poll
        self._token = uuid.uuid4()
        self._rows = QueueMessage.objects.db_manager(using)
        self._subscriptions = QueueSubscription.objects.db_manager(using)
        self._queue = self._destination = ""
        self._durable = True
        self._prefetch = 1
        self._buffer: deque[Delivery] = deque()
        #: Acknowledged deliveries whose rows are not deleted yet.
        self._acked: list[Delivery] = []
        self._acked_at = time.monotonic()
        #: The size of each held message, by its primary key.
        self._held: dict[int, int] = {}
        self._share: Share | None = None
        #: Whether there was not enough room for the last claim: a message may be left.
        self._cramped = False
        self._enlisted: list[Outgoing] = []
        #: The topics of notifications that are not sent yet.
        self._to_notify: set[str] = set()
        self._closed = threading.Event()
        self._wakeup: notifications.Wakeup | None = None
        self._keeping: Lease | None = None
        self._handed_at = 0.0
        self._pace = 1.0

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        try:
            self._ask(lambda: self._insert(batch))
            self._tell()
        except DataError as error:
            # PostgreSQL takes no NUL in JSON, say: only that message is refused.
            if len(batch) > 1:
                return one_by_one(batch, lambda one: self.send([one])[0])
            return [DispatchRejected(f"the database cannot hold this message: {error}")]
        return [None] * len(batch)

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._destination = self._queue = destination
        self._prefetch = max(1, prefetch)
        if wire.is_topic(destination):
            self._durable = subscriber is not None
            name = subscriber or str(self._token)
            self._queue = queue_name(destination, name)
            self._ask(lambda: self._subscriptions.add(destination, name))
        self._share = Share()
        self._wakeup = notifications.Wakeup(
            self._using, notifications.queue(self._queue)
        )

    def receive(self, timeout: float) -> Delivery | None:
        deadline = time.monotonic() + timeout
        wakeup = self._wakeup
        assert wakeup is not None, "subscribe first"
        if self._handed_at:
            taken = time.monotonic() - self._handed_at
            self._pace += 0.3 * (taken - self._pace)
            self._handed_at = 0.0
        while not self._buffer:
            # No more than it can process soon: other consumers get the rest.
            soon = max(1, int(self.AHEAD / max(self._pace, 1e-4)))
            room = min(soon, self._prefetch - len(self._held))
            if room > 0 and (wakeup.due() or self._cramped):
                self._buffer.extend(self._ask(partial(self._claim, room)))
                if self._buffer:
                    wakeup.ring()  # there may be more
            left = deadline - time.monotonic()
            if not self._buffer:
                if left <= 0 or self._closed.is_set():
                    return None
                if room <= 0:
                    self._closed.wait(min(self._poll, left))
                else:
                    pause = LONGEST_WAIT if wakeup.has_listener else self._poll
                    if self._cramped:
                        pause = min(self._poll, ROOM_WAIT)
                    wakeup.wait(min(pause, left))
        self._handed_at = time.monotonic()
        return self._buffer.popleft()

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        # While this session has more claimed deliveries, it acknowledges in groups, as
        # the sessions of other brokers do.
        self._acked += deliveries
        count, since = len(self._acked), self._acked_at
        now = acknowledges_now(count, prefetch=self._prefetch, since=since)
        if now or not self._buffer:
            self._delete_acked()

    def enlist(self, outgoing: Outgoing) -> None:
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        def settle() -> None:
            with transaction.atomic(using=self._using):
                if self._delete(acks) < len(acks):
                    raise DeliveryLost(
                        "the lease of a delivery ended before its transaction; "
                        "another worker has the message. Raise the broker URL's lease"
                    )
                self._insert(self._enlisted)

        try:
            self._ask(settle)
            self._forget(acks)
            self._tell()
        finally:
            self._enlisted = []

    def rollback(self) -> None:
        self._enlisted = []

    def ping(self) -> None:
        def ask() -> None:
            with connections[self._using].cursor() as cursor:
                cursor.execute("SELECT 1")

        self._ask(ask)

    def close(self) -> None:
        with contextlib.suppress(BrokerUnavailable):
            self._delete_acked()
        self._closed.set()
        if self._wakeup is not None:
            self._wakeup.ring()
        if self._keeping is not None:
            self._keeping.end()
        if self._share is not None:
            self._share.leave()
        if not self._durable:
            with contextlib.suppress(BrokerUnavailable):
                # Without a name, a subscription cannot be resumed.
                topic, name = self._destination, str(self._token)
                self._ask(lambda: self._subscriptions.remove(topic, name))
        elif self._held:
            try:
                held = list(self._held)
                self._ask(lambda: self._rows.release(held, self._token))
                self._to_notify.add(notifications.queue(self._queue))
                self._tell()
            except BrokerUnavailable:
                log.info(
                    "%d deliveries come back when their lease ends", len(self._held)
                )

    def _insert(self, batch: Sequence[Outgoing]) -> None:
        topics = {one.destination for one in batch if wire.is_topic(one.destination)}
        # bulk_create() would begin this transaction, too; it has to begin before the
        # subscriptions are read.
        with transaction.atomic(self._using, savepoint=False):
            queues = self._subscriptions.queues(topics) if topics else {}
            copies = [
                (one, queues.get(one.destination, [one.destination])) for one in batch
            ]
            rows = (
                QueueMessage(
                    queue=queue,
                    headers=dict(one.headers),
                    body=one.body,
                    **priority(one),
                    available_at=due_in(one.delay),
                )
                for one, names in copies
                for queue in names
            )
            # A topic's copies have more bytes than the relay has claimed, and may be
            # many: only those of one statement are in memory.
            largest = max((len(one.body) for one in batch), default=0)
            at_once = max(1, min(500, claiming.MAX_BYTES // max(1, largest)))
            while part := list(islice(rows, at_once)):
                self._rows.bulk_create(part)
        shed(self._using, sum(len(one.body) * len(names) for one, names in copies))
        self._to_notify |= {
            notifications.queue(queue) for _, names in copies for queue in names
        }
        self._to_notify |= {
            notifications.later(one.delay) for one in batch if one.delay
        }

    def _tell(self) -> None:
        """Notify the processes that wait for the rows that this session has just
        committed."""
        topics, self._to_notify = self._to_notify, set()
        if topics and conf.get().NOTIFY:
            notify(self._using, topics)

    def _claim(self, limit: int) -> list[Delivery]:
        assert self._share is not None, "subscribe first"
        claim = (
            self._rows.claim_by_priority
            if wire.is_task(self._destination)
            else self._rows.claim
        )
        with self._share.claim(claiming.MAX_BYTES, ROOM_WAIT) as room:
            since = time.monotonic()
            rows = claim(
                self._queue, self._token, limit=limit, lease=self._lease, room=room
            )
            self._hold({pk: len(body) for pk, _, body, _ in rows})
            self._cramped = not room.complete
            if rows and self._keeping is None:
                self._keeping = Lease(
                    self._using, self._lease, self._extend, since=since
                )
                self._keeping.begin()
            shed(self._using, sum(len(body) for _, _, body, _ in rows))
        found = []
        for pk, written, body, deliveries in rows:
            headers, problem = read_headers(written)
            found.append(
                Delivery(
                    destination=self._destination,
                    headers=headers,
                    body=body,
                    redelivered=deliveries > 1,
                    broker_message_id=str(pk),
                    handle=pk,
                    problem=problem,
                )
            )
        return found

    def _delete_acked(self) -> None:
        acked, self._acked, self._acked_at = self._acked, [], time.monotonic()
        if acked:
            self._ask(lambda: self._delete(acked))
            self._forget(acked)

    def _delete(self, deliveries: Sequence[Delivery]) -> int:
        if not deliveries:
            return 0
        return self._rows.remove([one.handle for one in deliveries], self._token)

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        """Record that deliveries are no longer held. Call this after the commit of
        their deletion: if the commit fails, `close()` must release them."""
        self._hold(dict.fromkeys(one.handle for one in deliveries))

    def _hold(self, sizes: Mapping[int, int | None]) -> None:
        """Record the sizes of the messages that this session holds, by primary key. If
        a size is None, the message is settled and no longer held."""
        self._held = {
            pk: size for pk, size in {**self._held, **sizes}.items() if size is not None
        }
        if self._share is not None:
            self._share.held = sum(self._held.values())

    def _extend(self) -> None:
        """Extend the leases of all messages that this session holds."""
        if held := list(self._held):
            self._rows.extend(held, self._token, self._lease)
