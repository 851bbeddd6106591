"""The session with RabbitMQ that relay and consumer use. Each session has one
connection.

The session uses separate channels for publishing, for its subscription and for
requests. When RabbitMQ refuses an operation, RabbitMQ closes only the channel of that
operation.
"""

from __future__ import annotations

import contextlib
import struct
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import amqp
from amqp import spec

from ... import wire
from ...errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ...runtime.per_process import PerProcess
from ...runtime.thread_group import Watch
from ..base import Delivery, Outgoing, Session, acknowledges_now, insist
from . import frames
from .link import CONSUMING, PUBLISHING, ChannelClosed, Link
from .publishing import Publisher, Unroutable
from .queues import Queues


class Acknowledgements:
    """The unacknowledged deliveries of a subscription, by their tags.

    If many deliveries arrive, the session acknowledges them in groups. A crash then
    causes more duplicates. If few deliveries arrive, the session acknowledges each of
    them immediately, because RabbitMQ closes the connection of a consumer that leaves a
    delivery unacknowledged for too long.
    """

    def __init__(self) -> None:
        #: Tags of unacknowledged deliveries in order -> whether to acknowledge them.
        self._open: dict[int, bool] = {}
        self._gathered = 0
        self._acked_at = time.monotonic()

    def delivered(self, tag: int) -> None:
        """Record a delivery."""
        self._open[tag] = False

    def unanswered(self, tags: Iterable[int]) -> list[int]:
        """Return the tags of the deliveries that are neither acknowledged nor marked
        for acknowledgement."""
        return [tag for tag in tags if self._open.get(tag) is False]

    def gather(self, tags: Collection[int], *, prefetch: int) -> bool:
        """Mark deliveries for acknowledgement. Return True if the session must send the
        acknowledgements now. `prefetch` is the maximum number of unacknowledged
        deliveries."""
        for tag in tags:
            self._open[tag] = True
        self._gathered += len(tags)
        return acknowledges_now(self._gathered, prefetch=prefetch, since=self._acked_at)

    def written(self) -> bytearray:
        """Return the frames that acknowledge all marked deliveries, for the caller to
        write. Forget these deliveries. A single frame acknowledges all deliveries
        before the first unmarked delivery."""
        self._acked_at = time.monotonic()
        made, upto, whole = bytearray(), 0, True
        if not self._gathered:
            return made
        for tag, wanted in list(self._open.items()):
            whole = whole and wanted
            if not wanted:
                continue
            del self._open[tag]
            if whole:
                upto = tag
            else:
                made += frames.acknowledged(tag, CONSUMING)
        if upto:
            made[:0] = frames.acknowledged(upto, CONSUMING, multiple=True)
        self._gathered = 0
        return made

    def settle(self, tags: Iterable[int]) -> None:
        """Forget these deliveries, because they no longer need an acknowledgement."""
        for tag in tags:
            self._open.pop(tag, None)


def _beat(links: list[Link]) -> None:
    """Send the heartbeats that are due, for sessions whose thread is busy, for example
    in a handler.

    The thread writes to a link only while no other thread uses the link, so it never
    writes a heartbeat between another thread's frames. The thread never reads.
    """
    for link in links:
        link.due = time.monotonic() + link.heartbeat / 4
        if link.owned.acquire(blocking=False):
            try:
                # The session itself detects a broken link, and the thread goes on.
                with contextlib.suppress(Exception):
                    link.beat()
            finally:
                link.owned.release()


def _refused(error: RuntimeError) -> None:
    raise BrokerUnavailable(f"no heartbeats can be sent: {error}") from error


_heart = PerProcess(lambda: Watch("txmsg-amqp-heart", _beat, _refused))


class Subscription:
    """The queue that a session receives from, and its deliveries.

    Each subscriber of a topic has its own queue, bound to that topic. A subscription
    without a name has a private queue, which is deleted with its connection.
    """

    def __init__(self, link: Link, queues: Queues, acks: Acknowledgements) -> None:
        self._link, self._queues, self._acks = link, queues, acks
        self._name = uuid.uuid4().hex
        self._destination = self.queue = ""
        #: Whether its messages go to no other consumer, and are never redelivered.
        self._private = False
        self.arrived: deque[Delivery] = deque()
        #: Why no more messages arrive; None while they do.
        self.over = ""

    def declare(self, destination: str, subscriber: str | None) -> None:
        """Declare the queue to receive from, if it is missing.

        Raises DestinationUnavailable if the broker does not create the queue. Raises
        DispatchRejected if stages cannot consume the queue.
        """
        self._destination = destination
        self._private = wire.is_topic(destination) and subscriber is None
        if not wire.is_topic(destination):
            self.queue = destination
            self._queues.ensure(destination)
        elif subscriber is None:
            self.queue = self._queues.private(destination)
        else:
            self.queue = subscriber
            self._queues.subscribe(destination, subscriber)
        if not self._private:
            self._queues.refuse_stream(self.queue)

    def consume(self, channel: amqp.Channel, prefetch: int) -> None:
        """Start to consume the declared queue."""
        channel.basic_qos(0, prefetch, False)
        self._link.contents[CONSUMING, spec.Basic.Deliver] = self._on_deliver
        self._link.methods[CONSUMING, spec.Basic.Cancel] = self._on_cancel
        channel.basic_consume(self.queue, consumer_tag="txmsg")

    def _on_deliver(
        self, method: bytes, properties: bytes, body: bytes, size: int
    ) -> None:
        at = 1 + method[0]
        tag, redelivered = struct.unpack_from(">QB", method, at)
        reader = frames.Reader(properties)
        headers, cut = reader.headers(), len(body) < size
        too_long = f"a body of {size} bytes is more than is accepted" if cut else ""
        given = headers.get("amqp-message-id")
        self._acks.delivered(tag)
        self.arrived.append(
            Delivery(
                destination=self._destination,
                headers=headers,
                body=body,
                redelivered=bool(redelivered) or self._came_before(reader.table),
                broker_message_id=(
                    f"{self._name}/{tag}"
                    if given is None
                    # Senders may reuse their ids for other messages.
                    else f"{given}/{wire.digest(headers, body)}"
                ),
                handle=tag,
                problem=reader.problem or too_long,
                cut=cut,
                id_stays=given is not None or self._private,
            )
        )

    def _came_before(self, table: Mapping[str, Any]) -> bool:
        """Return True if the headers show that this queue delivered the message before.
        One header counts earlier deliveries. Another lists the queues that have
        dead-lettered the message."""
        count = table.get("x-delivery-count")
        if isinstance(count, int) and count > 0:
            return True
        deaths = table.get("x-death")
        return isinstance(deaths, list) and any(
            isinstance(one, dict)
            and one.get("queue") == self.queue
            and one.get("reason") in ("rejected", "delivery_limit")
            for one in deaths
        )

    def _on_cancel(self, arguments: bytes) -> None:
        self.over = f"queue {self.queue!r} was deleted, or has moved to another node"


REFUSALS = (DispatchRejected, DestinationUnavailable)


def _is_unclear(error: BrokerError | None) -> bool:
    """Return whether another try may store the message, or tell why it is refused."""
    hung_up = isinstance(error, DispatchUnknown) and error.hung_up
    return hung_up or isinstance(error, Unroutable)


class AmqpSession(Session):
    """One connection to RabbitMQ, with channels for sending and for receiving."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queues, self._publisher = Queues(link), Publisher(link)
        self._acks = Acknowledgements()
        self._subscription = Subscription(link, self._queues, self._acks)
        self._prefetch = 1
        self._enlisted: list[Outgoing] = []
        if link.heartbeat:
            try:
                _heart().add(link)
            except BrokerUnavailable:
                link.close()
                raise

    # -- sending -------------------------------------------------------------------

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        ready: dict[int, frames.Ready] = {}
        unavailable: dict[str, DestinationUnavailable] = {}
        options = self._link.options
        until = None if timeout is None else time.monotonic() + timeout
        with self._link.owned:
            if not self._link.transport.connected:
                reason = self._subscription.over or "the connection has ended"
                raise BrokerUnavailable(reason)
            with self._owned():
                for index, one in enumerate(batch):
                    try:
                        if one.destination in unavailable:
                            raise unavailable[one.destination]
                        ready[index] = self._ready(one)
                    except DestinationUnavailable as error:
                        # Not requested again: each refusal costs a channel.
                        outcomes[index] = unavailable[one.destination] = error
                    except DispatchRejected as error:
                        outcomes[index] = error
            self._publisher.publish(
                ready,
                [one.headers.get(wire.KEY, "") for one in batch],
                outcomes,
                window=1 if isolate else options.max_in_flight,
                timeout=options.send_timeout,
                until=until,
            )
        for one, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Unroutable):
                self._queues.forget(one.destination)
        return outcomes

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        waiting = list(batch)
        with self._owned():
            for index, one in enumerate(batch):
                if one.delay <= 0:
                    continue
                try:
                    milliseconds = round(one.delay * 1000)
                    queue = self._queues.delayed(one.destination, milliseconds)
                except REFUSALS as error:
                    outcomes[index] = error
                else:
                    waiting[index] = replace(
                        one, destination=queue, time_to_live=one.delay
                    )
        sent = iter(
            self.send([o for o, e in zip(waiting, outcomes, strict=True) if not e])
        )
        return [error or next(sent) for error in outcomes]

    def _ready(self, outgoing: Outgoing) -> frames.Ready:
        """Ensure that a message's queue exists, and return the message's frames. Raises
        DispatchRejected if the message can never be sent. Raises DestinationUnavailable
        if the message cannot be sent now."""
        if not wire.is_topic(outgoing.destination):
            self._queues.ensure(outgoing.destination)
        return frames.published(outgoing, PUBLISHING, self._link.frame_max)

    # -- receiving -----------------------------------------------------------------

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._prefetch = max(1, min(prefetch, 65535))
        with self._owned():
            try:
                self._subscription.declare(destination, subscriber)
            except REFUSALS as error:
                raise BrokerUnavailable(str(error)) from error
            self._subscription.consume(self._link.channel(CONSUMING), self._prefetch)

    def receive(self, timeout: float) -> Delivery | None:
        assert self._subscription.queue, "subscribe() first"
        arrived = self._subscription.arrived
        if not arrived:
            deadline = time.monotonic() + timeout
            with self._owned():
                self._send_acks()
                while not arrived:
                    left = deadline - time.monotonic()
                    self._link.read(max(0.0, left))
                    if self._subscription.over:
                        raise BrokerUnavailable(self._subscription.over)
                    if left <= 0 and not arrived:
                        return None
        return arrived.popleft()

    # -- settling ------------------------------------------------------------------

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        tags = self._acks.unanswered(one.handle for one in deliveries)
        if tags and self._acks.gather(tags, prefetch=self._prefetch):
            with self._owned():
                self._send_acks()

    def _send_acks(self) -> None:
        if written := self._acks.written():
            self._link.transport.write(written)

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        # To this subscriber alone, if it came from a topic.
        copy = Outgoing(self._subscription.queue, headers, delivery.body)
        (error,) = self.send([copy], isolate=True)
        insist(error)
        # A worker that dies in between leaves two messages.
        self._acknowledge_at_once([delivery])

    def _acknowledge_at_once(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries, not in a group with others."""
        tags = self._acks.unanswered(one.handle for one in deliveries)
        self._acks.settle(tags)
        with self._owned():
            for tag in tags:
                self._link.transport.write(frames.acknowledged(tag, CONSUMING))

    # -- transactions --------------------------------------------------------------

    # Not AMQP's transactions: RabbitMQ's tx.commit acknowledges the deliveries even if
    # a queue refuses one of the messages, and the messages are not stored together
    # either.

    def enlist(self, outgoing: Outgoing) -> None:
        # Kept until the commit. Whether the queue exists is checked now, before
        # anything commits.
        with self._owned():
            self._ready(outgoing)
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        enlisted, self._enlisted = self._enlisted, []
        outcomes = self.send(enlisted)
        if self._link.transport.connected and any(map(_is_unclear, outcomes)):
            # Again, one by one. send() has forgotten the queues that were deleted since
            # enlist(), and declares them now. If RabbitMQ has closed the channel
            # because of one message, this shows which one.
            pairs = zip(enlisted, outcomes, strict=True)
            outcomes = self.send([one for one, error in pairs if error], isolate=True)
        for error in outcomes:
            if error is not None:
                raise error
        self._acknowledge_at_once(acks)

    def rollback(self) -> None:
        self._enlisted = []

    # -- lifetime -----------------------------------------------------------------

    def ping(self) -> None:
        with self._owned(), self._link.hurried():
            self._queues.ping()

    def delete_subscription(self, subscriber: str) -> None:
        """Delete a subscriber's queue. Raises BrokerError if the queue is in use or
        does not exist."""
        with self._owned():
            found = self._queues.waiting(subscriber)
            if found is None:
                raise BrokerError(f"there is no subscription {subscriber!r}")
            if found[1]:
                raise BrokerError(f"the subscription {subscriber!r} is in use")
            self._queues.delete(subscriber)

    def close(self) -> None:
        with self._link.owned:
            if self._link.transport.connected:
                with contextlib.suppress(BrokerError), self._owned():
                    self._send_acks()
            self._link.close()
        _heart().remove(self._link)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """Hold the link's lock while the block runs. If the link breaks, or the broker
        closes a channel, raise BrokerUnavailable."""
        try:
            with self._link.asking():
                yield
        except ChannelClosed as error:
            self._subscription.over = error.text
            raise BrokerUnavailable(error.text) from error
        except BrokerUnavailable as error:
            self._subscription.over = str(error)
            raise
