"""A broker for Redis Streams with redis-py. It is an example of a broker that a user of
the package writes.

A destination is a stream. The stream of a queue has one consumer group, and the stream
of a topic has one consumer group for each subscriber. Each message of the stream goes
to one consumer of each group.

A received message is pending for its consumer. If the message's idle time reaches the
`lease`, another consumer of the group claims the message. While a handler runs, the
package does not call the session. So a thread resets the idle time of the messages that
the session has received. The owner of a topic's stream limits the stream's length
(`XTRIM`).
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis

from django_txmsg.brokers import Broker, Delivery, Outgoing, Session
from django_txmsg.brokers.base import one_by_one
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchUnknown,
)

WORKERS = "workers"


class RedisBroker(Broker):
    """The broker at `redis://HOST:PORT/0?lease=30`. The server needs `appendfsync
    always`."""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> RedisSession:
        address, _, lease = self._url.partition("?lease=")
        with asked():
            client = redis.Redis.from_url(address)
            client.ping()
            return RedisSession(client, int(float(lease or 30) * 1000))

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        with self.open() as session, asked(), suppress(redis.ResponseError):
            session.client.xgroup_destroy(stream_of(topic), subscriber)

    def check(self) -> list[str]:
        sound = self._url.startswith("redis://")
        return [] if sound else ["it does not begin with redis://"]


class RedisSession(Session):
    """A session that consumes as a member of a group, or only sends."""

    def __init__(self, client: redis.Redis, lease: int) -> None:
        self.client, self._lease = client, lease
        self._me = uuid.uuid4().hex
        self._destination = self._stream = self._group = ""
        self._prefetch = 1
        self._held: set[bytes] = set()
        self._arrived: deque[Delivery] = deque()
        self._enlisted: list[Outgoing] = []
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        # All of it is stored or nothing is, so no message overtakes another one of its
        # key. Where a stream takes nothing, each message goes alone.
        try:
            self._transact(batch, [])
        except DestinationUnavailable:
            return one_by_one(batch, self._send_alone)
        except BrokerUnavailable as error:
            # Nobody has hung up on a message: redis-py reports a time-out so, too.
            return [DispatchUnknown(str(error)) for _ in batch]
        return [None for _ in batch]

    def _send_alone(self, one: Outgoing) -> BrokerError | None:
        try:
            self._transact([one], [])
        except BrokerUnavailable as error:
            return DispatchUnknown(str(error))
        except DestinationUnavailable as error:
            return error
        return None

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._destination, self._stream = destination, stream_of(destination)
        self._prefetch = prefetch
        begin, self._group = "0", WORKERS
        if destination.startswith("topic:"):
            begin, self._group = "$", subscriber or self._me
        with asked():
            try:
                self.client.xgroup_create(self._stream, self._group, begin, True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        who = (self._stream, self._group)
        while not self._closed.wait(self._lease / 4000):
            with suppress(redis.RedisError, OSError):
                mine = self.client.xpending_range(*who, "-", "+", 1000, self._me)
                if held := [one["message_id"] for one in mine]:
                    self.client.xclaim(*who, self._me, 0, held, justid=True)

    def receive(self, timeout: float) -> Delivery | None:
        deadline = time.monotonic() + timeout
        while not self._arrived:
            left = deadline - time.monotonic()
            with asked():
                self._fetch(max(0.001, min(left, 0.1)))
            if left <= 0 and not self._arrived:
                return None
        return self._arrived.popleft()

    def _fetch(self, wait: float) -> None:
        who, room = (self._group, self._me), self._prefetch - len(self._held)
        if room <= 0:
            threading.Event().wait(wait)
            return
        late = self.client.xautoclaim(self._stream, *who, self._lease, count=room)[1]
        self._take([one for one in late if one[0] not in self._held], redelivered=True)
        if not self._arrived:
            block = int(wait * 1000)
            new = self.client.xreadgroup(*who, {self._stream: ">"}, room, block)
            for _, entries in new:
                self._take(entries, redelivered=False)

    def _take(self, entries: list[Any], *, redelivered: bool) -> None:
        for entry, fields in entries:
            self._held.add(entry)
            headers, body = json.loads(fields[b"headers"]), fields[b"body"]
            named = (entry.decode(), entry)
            self._arrived.append(
                Delivery(self._destination, headers, body, redelivered, *named)
            )

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._transact([], deliveries)

    def enlist(self, outgoing: Outgoing) -> None:
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        enlisted, self._enlisted = self._enlisted, []
        self._transact(enlisted, acks)

    def rollback(self) -> None:
        self._enlisted = []

    def _transact(self, sends: Sequence[Outgoing], acks: Sequence[Delivery]) -> None:
        entries = [one.handle for one in acks]
        with asked(), self.client.pipeline(transaction=True) as pipeline:
            for one in sends:
                fields = {"headers": json.dumps(dict(one.headers)), "body": one.body}
                pipeline.xadd(stream_of(one.destination), fields)
            if entries:
                pipeline.xack(self._stream, self._group, *entries)
                if self._group == WORKERS:  # no other group reads this stream
                    pipeline.xdel(self._stream, *entries)
            pipeline.execute()
        self._held.difference_update(entries)

    def ping(self) -> None:
        with asked():
            self.client.ping()

    def close(self) -> None:
        held, self._held = list(self._held), set()
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join()
        # Without an answer they come again when their lease has ended.
        with suppress(redis.RedisError, OSError):
            if self._group == self._me:
                self.client.xgroup_destroy(self._stream, self._group)
            elif held:
                # Mark them as idle for a whole lease, so that the next session claims
                # them.
                who = (self._stream, self._group, self._me)
                self.client.xclaim(*who, 0, held, idle=self._lease, justid=True)
        self.client.close()


def stream_of(destination: str) -> str:
    """Return the name of the stream for a queue or a topic. Only streams have names of
    this form."""
    return f"messages:{destination}"


@contextmanager
def asked() -> Iterator[None]:
    """Translate the errors of a request to the server.

    Raises BrokerUnavailable if the server does not answer. Raises
    DestinationUnavailable if the user may not write to the stream, or if the server is
    full.
    """
    try:
        yield
    except redis.ResponseError as error:
        words = f"{error} {error.__cause__ or error.__context__ or ''}"
        if re.search("NOPERM|no permissions|OOM", words, re.IGNORECASE):
            raise DestinationUnavailable(words) from error
        raise BrokerUnavailable(str(error)) from error
    except (redis.RedisError, OSError) as error:
        raise BrokerUnavailable(str(error)) from error
