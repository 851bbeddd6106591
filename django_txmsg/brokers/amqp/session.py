"""One conversation with RabbitMQ: a link, and the session that relay and consumer use.

It publishes, subscribes and asks on channels of their own: the broker closes a channel
on what it refuses, and the others go on.
"""

from __future__ import annotations

import contextlib
import struct
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import amqp
from amqp import spec

from ... import wire
from ...errors import (
    BrokerError,
    BrokerUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ..base import Delivery, Outgoing, Session
from . import content, heart
from .link import CONSUMING, PUBLISHING, ChannelClosed, Link, method_frame
from .publishing import Publisher, Ready, Unroutable
from .queues import TOPICS, Queues

#: Seconds for which acknowledgements are gathered at most.
LONGEST_GROUP = 1.0
_MANDATORY = b"\x01"
_TAG = "txmsg"


class AmqpSession(Session):
    """One connection to RabbitMQ, with channels for sending and for receiving."""

    def __init__(self, link: Link, transacted: bool) -> None:
        self._link, self._transacted = link, transacted
        self._queues, self._publisher = Queues(link), Publisher(link)
        self._channel: amqp.Channel | None = None
        self._name = uuid.uuid4().hex
        self._destination = self._queue = ""
        #: Whether what is received here comes to nobody else, and never again.
        self._private = False
        self._prefetch, self._subscribed = 1, False
        self._arrived: deque[Delivery] = deque()
        #: Tags that are not acknowledged, in their order -> whether they are to be.
        self._unacked: dict[int, bool] = {}
        self._to_ack = 0
        self._acknowledged_at = time.monotonic()
        self._enlisted: list[Outgoing] = []
        self._over = ""
        heart.keep(link)

    # -- sending -------------------------------------------------------------------

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        with self._link.owned:
            if not self._link.transport.connected:
                raise BrokerUnavailable(self._over or "the connection has ended")
            timeout = timeout or self._link.options.send_timeout
            return self._send(batch, isolate, timeout)

    def _send(
        self, batch: Sequence[Outgoing], isolate: bool, timeout: float
    ) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        ready: list[Ready | None] = [None] * len(batch)
        with self._asked():
            for index, one in enumerate(batch):
                try:
                    ready[index] = self._ready(one, PUBLISHING)
                except DispatchRejected as error:
                    outcomes[index] = error
        self._publisher.publish(
            ready,
            [one.headers.get(wire.KEY, "") for one in batch],
            outcomes,
            window=1 if isolate else self._link.options.max_in_flight,
            timeout=timeout,
        )
        for one, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Unroutable):
                self._queues.forget(one.destination)
        return outcomes

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        waiting = list(batch)
        with self._asked():
            for index, one in enumerate(batch):
                if one.delay <= 0:
                    continue
                try:
                    milliseconds = round(one.delay * 1000)
                    queue = self._queues.delayed(one.destination, milliseconds)
                except DispatchRejected as error:
                    outcomes[index] = error
                else:
                    waiting[index] = replace(
                        one, destination=queue, time_to_live=one.delay
                    )
        sent = iter(
            self.send([o for o, e in zip(waiting, outcomes, strict=True) if not e])
        )
        return [error or next(sent) for error in outcomes]

    def _ready(self, outgoing: Outgoing, channel: int) -> Ready:
        """Return the frames of a message. Raises DispatchRejected for one that cannot
        be sent."""
        topic = wire.is_topic(outgoing.destination)
        name = outgoing.destination.removeprefix(wire.TOPIC_PREFIX)
        if not topic:
            self._queues.ensure(name)
        route = _short(TOPICS if topic else "") + _short(name)
        expiration = None
        if outgoing.time_to_live is not None:
            expiration = max(0, round(outgoing.time_to_live * 1000))
        properties = content.encode(outgoing.headers, expiration)
        body, size = outgoing.body, len(outgoing.body)
        arguments = b"\0\0" + route + (b"\0" if topic else _MANDATORY)
        pieces = [
            method_frame(channel, spec.Basic.Publish, arguments),
            struct.pack(">BHIHHQ", 2, channel, 12 + len(properties), 60, 0, size),
            properties,
            b"\xce",
        ]
        most = self._link.frame_max - 8
        for at in range(0, size, most):
            piece = body[at : at + most]
            pieces += [struct.pack(">BHI", 3, channel, len(piece)), piece, b"\xce"]
        return Ready(b"".join(pieces), route, properties, body)

    # -- receiving -----------------------------------------------------------------

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._destination, self._prefetch = destination, max(1, min(prefetch, 65535))
        with self._asked():
            try:
                self._declare(destination, subscriber)
            except DispatchRejected as error:
                raise BrokerUnavailable(str(error)) from error
            channel = self._opened()
            if self._subscribed:
                channel.basic_cancel(_TAG)
                self._arrived.clear()
            self._subscribed = True
            channel.basic_qos(0, self._prefetch, False)
            link = self._link
            link.contents[CONSUMING, spec.Basic.Deliver] = self._on_deliver
            link.methods[CONSUMING, spec.Basic.Cancel] = self._on_cancel
            channel.basic_consume(self._queue, consumer_tag=_TAG)

    def _declare(self, destination: str, subscriber: str | None) -> None:
        """See to it that there is a queue to receive from."""
        if not wire.is_topic(destination):
            self._queue = destination
            self._queues.ensure(destination)
        elif subscriber is None:
            self._queue = self._queues.private(destination)
            self._private = True
        else:
            self._queue = subscriber
            self._queues.subscribe(destination, subscriber)

    def _opened(self) -> amqp.Channel:
        """Return the channel of the subscription and of transactions."""
        if self._channel is None:
            self._channel = self._link.channel(CONSUMING)
            if self._transacted:
                self._channel.tx_select()
        return self._channel

    def receive(self, timeout: float) -> Delivery | None:
        assert self._queue, "subscribe() first"
        if not self._arrived:
            deadline = time.monotonic() + timeout
            with self._asked():
                self._send_acks()
                while not self._arrived:
                    left = deadline - time.monotonic()
                    self._link.read(max(0.0, left))
                    if self._over:
                        raise BrokerUnavailable(self._over)
                    if left <= 0 and not self._arrived:
                        return None
        return self._arrived.popleft()

    def _on_deliver(self, method: bytes, properties: bytes, body: bytes) -> None:
        at = 1 + method[0]
        tag, redelivered = struct.unpack_from(">QB", method, at)
        reader = content.Reader(properties)
        headers = reader.headers()
        given = headers.get("amqp-message-id")
        self._unacked[tag] = False
        self._arrived.append(
            Delivery(
                destination=self._destination,
                headers=headers,
                body=body,
                redelivered=bool(redelivered) or self._came_before(reader.table),
                broker_message_id=(
                    f"{self._name}/{tag}"
                    if given is None
                    # Senders use their ids again for something else.
                    else f"{given}/{wire.digest(headers, body)}"
                ),
                handle=tag,
                problem=reader.problem,
                id_stays=given is not None or self._private,
            )
        )

    def _came_before(self, table: Mapping[str, Any]) -> bool:
        """Return whether the broker has counted a delivery that went back, or has taken
        the message out of this queue for it."""
        count = table.get("x-delivery-count")
        if isinstance(count, int) and count > 0:
            return True
        deaths = table.get("x-death")
        return isinstance(deaths, list) and any(
            isinstance(one, dict)
            and one.get("queue") == self._queue
            and one.get("reason") in ("rejected", "delivery_limit")
            for one in deaths
        )

    def _on_cancel(self, arguments: bytes) -> None:
        self._over = f"queue {self._queue!r} was deleted, or has moved to another node"

    # -- settling ------------------------------------------------------------------

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        wanted = [one for one in deliveries if self._unacked.get(one.handle) is False]
        if not wanted:
            return
        if self._transacted:
            self.commit(wanted)
            return
        # A busy consumer acknowledges in groups: what a crash costs is duplicates. A
        # slow one at once: RabbitMQ hangs up on who keeps a delivery for too long.
        for one in wanted:
            self._unacked[one.handle] = True
        self._to_ack += len(wanted)
        slow = time.monotonic() - self._acknowledged_at > LONGEST_GROUP
        if slow or self._to_ack * 2 >= self._prefetch:
            with self._asked():
                self._send_acks()

    def _send_acks(self) -> None:
        """Acknowledge all that is to be: with one frame as far as nothing is open."""
        self._acknowledged_at = time.monotonic()
        if not self._to_ack:
            return
        frames, upto, whole = bytearray(), 0, True
        for tag, wanted in list(self._unacked.items()):
            whole = whole and wanted
            if not wanted:
                continue
            del self._unacked[tag]
            if whole:
                upto = tag
            else:
                frames += _ack(tag, multiple=False)
        if upto:
            frames[:0] = _ack(upto, multiple=True)
        self._to_ack = 0
        self._link.write(frames)

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        # To this subscriber alone, where it came from a topic.
        copy = Outgoing(self._queue, headers, delivery.body)
        (error,) = self.send([copy], isolate=True)
        if isinstance(error, DispatchRejected):
            raise error
        if error is not None:
            raise BrokerUnavailable(str(error)) from error
        # Not in a group: a worker that dies in between leaves two messages.
        if self._transacted:
            self.commit([delivery])
            return
        self._unacked.pop(delivery.handle, None)
        with self._asked():
            self._link.write(_ack(delivery.handle, multiple=False))

    # -- transactions --------------------------------------------------------------

    def enlist(self, outgoing: Outgoing) -> None:
        # RabbitMQ keeps a transaction's messages in memory until it commits; here they
        # are nearer. That there is a queue is found out now, before anything commits.
        with self._asked():
            self._ready(outgoing, CONSUMING)
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        enlisted, self._enlisted = self._enlisted, []
        tags = [one.handle for one in acks if one.handle in self._unacked]
        returned: list[tuple[bytes, bytes]] = []

        def on_return(method: bytes, properties: bytes, body: bytes) -> None:
            returned.append((properties, body))

        with self._asked(DispatchUnknown):
            channel = self._opened()
            self._link.contents[CONSUMING, spec.Basic.Return] = on_return
            made = [self._ready(one, CONSUMING) for one in enlisted]
            for one in made:
                self._link.write(one.frames)
            self._link.write(b"".join(_ack(tag, multiple=False) for tag in tags))
            channel.tx_commit()
        for tag in tags:
            del self._unacked[tag]
        if returned:
            self._send_returned(enlisted, made, returned)

    def _send_returned(
        self,
        enlisted: Sequence[Outgoing],
        made: Sequence[Ready],
        returned: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """A queue was deleted between enlist() and commit(): RabbitMQ has committed the
        rest. What came back is sent once more, to a new queue."""
        bodies = {body for _, body in returned}
        again = [
            outgoing
            for outgoing, one in zip(enlisted, made, strict=True)
            if one.body in bodies and not wire.is_topic(outgoing.destination)
        ]
        for one in again:
            self._queues.forget(one.destination)
        for error in self.send(again):
            if error is not None:
                raise DispatchUnknown(f"committed without a message: {error}")

    def rollback(self) -> None:
        self._enlisted = []

    # -- the rest of its life ------------------------------------------------------

    def ping(self) -> None:
        with self._asked(), self._link.hurried():
            self._queues.ping()

    def delete_subscription(self, subscriber: str) -> None:
        """Delete a subscriber's queue. Raises BrokerError while it is in use."""
        with self._asked():
            found = self._queues.waiting(subscriber)
            if found and found[1]:
                raise BrokerError(f"the subscription {subscriber!r} is in use")
            self._queues.delete(subscriber)

    def close(self) -> None:
        with self._link.owned:
            if self._link.transport.connected:
                with contextlib.suppress(BrokerError), self._asked():
                    self._send_acks()
            self._link.close()

    @contextlib.contextmanager
    def _asked(self, lost: type[BrokerError] = BrokerUnavailable) -> Iterator[None]:
        """Own the link. Raises `lost` when it breaks, and BrokerUnavailable when the
        channel is closed that is received on."""
        try:
            with self._link.asking():
                yield
        except ChannelClosed as error:
            self._over = error.text
            raise BrokerUnavailable(error.text) from error
        except BrokerUnavailable as error:
            self._over = str(error)
            raise lost(str(error)) from error


def _short(text: str) -> bytes:
    written = text.encode()
    return bytes([len(written)]) + written


def _ack(tag: int, *, multiple: bool) -> bytes:
    arguments = struct.pack(">QB", tag, multiple)
    return method_frame(CONSUMING, spec.Basic.Ack, arguments)
