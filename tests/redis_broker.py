"""A broker of somebody else's, as they would write it: Redis Streams, with redis-py.

A queue is a stream with one group of consumers. Who holds a message has it pending;
when that was not touched for a `lease`, another consumer claims it. It imports nothing
of the package but the contract.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis

from django_txmsg.brokers import Broker, Delivery, Outgoing, Session
from django_txmsg.errors import BrokerError, BrokerUnavailable, DispatchUnknown

GROUP = "workers"
#: Moves what is due from a queue's delayed messages into its stream.
MOVE = """
for _, packed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], 0, ARGV[1])) do
    local head = struct.unpack('>I4', packed)
    redis.call('XADD', KEYS[2], '*', 'headers', string.sub(packed, 21, 20 + head),
               'body', string.sub(packed, 21 + head))
    redis.call('ZREM', KEYS[1], packed)
end
"""


class RedisBroker(Broker):
    """`redis://HOST:PORT/0?lease=30`; the server has `appendfsync always`."""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> RedisSession:
        url = urlsplit(self._url)
        lease = float(parse_qs(url.query).get("lease", ["30"])[0])
        client = redis.Redis(
            url.hostname or "localhost", url.port or 6379, url.path.strip("/") or 0
        )
        with asked():
            client.ping()
        return RedisSession(client, lease)

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        session = self.open()
        with session, asked():
            session.client.srem(f"subscribers:{topic}", subscriber)
            session.client.delete(f"{topic}/{subscriber}")

    def check(self) -> list[str]:
        sound = urlsplit(self._url).scheme == "redis"
        return [] if sound else ["it does not begin with redis://"]


class RedisSession(Session):
    """One consumer of a stream, or one sender."""

    def __init__(self, client: redis.Redis, lease: float) -> None:
        self.client, self._lease = client, int(lease * 1000)
        self._consumer = uuid.uuid4().hex
        self._destination = self._stream = ""
        self._prefetch = 1
        self._held: set[bytes] = set()
        self._arrived: deque[Delivery] = deque()
        self._enlisted: list[Outgoing] = []
        self._private = False

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        pipeline = self.client.pipeline()
        try:
            for one in batch:
                self._add(pipeline, one)
            pipeline.execute()
        except (redis.RedisError, OSError) as error:
            return [DispatchUnknown(str(error), hung_up=True)] * len(batch)
        return [None] * len(batch)

    def _add(self, pipeline: Any, one: Outgoing) -> None:
        headers = json.dumps(dict(one.headers)).encode()
        streams = [one.destination]
        if one.destination.startswith("topic:"):
            names = self.client.smembers(f"subscribers:{one.destination}")
            streams = [f"{one.destination}/{name.decode()}" for name in names]
        for stream in streams:
            if one.delay:
                size = len(headers).to_bytes(4, "big")
                packed = size + uuid.uuid4().bytes + headers + one.body
                pipeline.zadd(f"delayed:{stream}", {packed: time.time() + one.delay})
            else:
                pipeline.xadd(stream, {"headers": headers, "body": one.body})

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._destination = self._stream = destination
        self._prefetch = prefetch
        with asked():
            if destination.startswith("topic:"):
                self._private = subscriber is None
                name = subscriber or self._consumer
                self._stream = f"{destination}/{name}"
                self.client.sadd(f"subscribers:{destination}", name)
            try:
                self.client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def receive(self, timeout: float) -> Delivery | None:
        deadline = time.monotonic() + timeout
        while not self._arrived:
            left = deadline - time.monotonic()
            with asked():
                self._fetch(max(1, int(min(left, 0.1) * 1000)))
            if left <= 0 and not self._arrived:
                return None
        return self._arrived.popleft()

    def _fetch(self, wait: int) -> None:
        keys = [f"delayed:{self._stream}", self._stream]
        self.client.eval(MOVE, 2, *keys, time.time())
        room = self._prefetch - len(self._held)
        if room <= 0:
            return
        who = (self._stream, GROUP, self._consumer)
        claimed = self.client.xautoclaim(*who, self._lease, count=room)[1]
        self._take([one for one in claimed if one[0] not in self._held], True)
        if not self._arrived:
            found = self.client.xreadgroup(
                GROUP, self._consumer, {self._stream: ">"}, count=room, block=wait
            )
            for _, entries in found:
                self._take(entries, False)

    def _take(self, entries: list[Any], redelivered: bool) -> None:
        for entry, fields in entries:
            self._held.add(entry)
            headers = json.loads(fields[b"headers"])
            name, body = entry.decode(), fields[b"body"]
            self._arrived.append(
                Delivery(self._destination, headers, body, redelivered, name, entry)
            )

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._commit([], deliveries)

    def enlist(self, outgoing: Outgoing) -> None:
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        enlisted, self._enlisted = self._enlisted, []
        self._commit(enlisted, acks)

    def _commit(self, sends: Sequence[Outgoing], acks: Sequence[Delivery]) -> None:
        entries = [one.handle for one in acks]
        with asked():
            pipeline = self.client.pipeline(transaction=True)
            for one in sends:
                self._add(pipeline, one)
            if entries:
                pipeline.xack(self._stream, GROUP, *entries)
                pipeline.xdel(self._stream, *entries)
            pipeline.execute()
        self._held.difference_update(entries)

    def rollback(self) -> None:
        self._enlisted = []

    def ping(self) -> None:
        with asked():
            self.client.ping()

    def close(self) -> None:
        held, self._held = list(self._held), set()
        try:
            if self._private:
                name = self._stream.removeprefix(f"{self._destination}/")
                self.client.srem(f"subscribers:{self._destination}", name)
                self.client.delete(self._stream)
            elif held:
                # As if nobody had touched them for long: the next one claims them.
                who = (self._stream, GROUP, self._consumer)
                self.client.xclaim(*who, 0, held, idle=self._lease, justid=True)
        except (redis.RedisError, OSError):
            pass  # then they come again when their lease has ended
        self.client.close()


@contextmanager
def asked() -> Iterator[None]:
    """Raise BrokerUnavailable when the server does not answer."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise BrokerUnavailable(str(error)) from error
