"""A session with RabbitMQ, as relay and consumer use it, on one link.

It publishes, subscribes and sends requests on separate channels: the broker closes a
channel on a refusal, and the others stay open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from ..base import Delivery, Outgoing, Session
from . import frames, heart
from .acknowledgements import Acknowledgements
from .link import CONSUMING, PUBLISHING, ChannelClosed, Link
from .publishing import Publisher, Unroutable
from .queues import Queues
from .subscription import Subscription

REFUSALS = (DispatchRejected, DestinationUnavailable)


class AmqpSession(Session):
    """One connection to RabbitMQ, with channels for sending and for receiving."""

    def __init__(self, link: Link, transacted: bool) -> None:
        self._link, self._transacted = link, transacted
        self._queues, self._publisher = Queues(link), Publisher(link)
        self._channel: amqp.Channel | None = None
        self._acks = Acknowledgements(CONSUMING)
        self._subscription = Subscription(link, self._queues, self._acks)
        self._prefetch = 1
        self._enlisted: list[Outgoing] = []
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
                reason = self._subscription.over or "the connection has ended"
                raise BrokerUnavailable(reason)
            timeout = timeout or self._link.options.send_timeout
            return self._send(batch, isolate, timeout)

    def _send(
        self, batch: Sequence[Outgoing], isolate: bool, timeout: float
    ) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        ready: list[frames.Ready | None] = [None] * len(batch)
        unavailable: dict[str, DestinationUnavailable] = {}
        with self._asked():
            for index, one in enumerate(batch):
                try:
                    if one.destination in unavailable:
                        raise unavailable[one.destination]
                    ready[index] = self._ready(one, PUBLISHING)
                except DestinationUnavailable as error:
                    # Not requested again: each refusal costs a channel.
                    outcomes[index] = unavailable[one.destination] = error
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

    def _ready(self, outgoing: Outgoing, channel: int) -> frames.Ready:
        """Return the frames of a message to an existing queue. Raises DispatchRejected
        if it can never be sent, and DestinationUnavailable if it cannot be sent now."""
        if not wire.is_topic(outgoing.destination):
            self._queues.ensure(outgoing.destination)
        return frames.published(outgoing, channel, self._link.frame_max)

    # -- receiving -----------------------------------------------------------------

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        self._prefetch = max(1, min(prefetch, 65535))
        with self._asked():
            try:
                self._subscription.declare(destination, subscriber)
            except REFUSALS as error:
                raise BrokerUnavailable(str(error)) from error
            self._subscription.consume(self._opened(), self._prefetch)

    def _opened(self) -> amqp.Channel:
        """Return the channel of the subscription and of transactions."""
        if self._channel is None:
            self._channel = self._link.channel(CONSUMING)
            if self._transacted:
                self._channel.tx_select()
        return self._channel

    def receive(self, timeout: float) -> Delivery | None:
        assert self._subscription.queue, "subscribe() first"
        arrived = self._subscription.arrived
        if not arrived:
            deadline = time.monotonic() + timeout
            with self._asked():
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
        if not tags:
            return
        if self._transacted:
            self.commit(deliveries)
        elif self._acks.gather(tags, prefetch=self._prefetch):
            with self._asked():
                self._send_acks()

    def _send_acks(self) -> None:
        if written := self._acks.written():
            self._link.write(written)

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        # To this subscriber alone, if it came from a topic.
        copy = Outgoing(self._subscription.queue, headers, delivery.body)
        (error,) = self.send([copy], isolate=True)
        if isinstance(error, REFUSALS):
            raise error
        if error is not None:
            raise BrokerUnavailable(str(error)) from error
        # Acknowledged at once, not in a group: a worker that dies in between leaves two
        # messages.
        if self._transacted:
            self.commit([delivery])
            return
        self._acks.settle([delivery.handle])
        with self._asked():
            self._link.write(frames.acknowledged(delivery.handle, CONSUMING))

    # -- transactions --------------------------------------------------------------

    def enlist(self, outgoing: Outgoing) -> None:
        # RabbitMQ keeps a transaction's messages in memory until it commits; keeping
        # them here is cheaper. Whether the queue exists is checked now, before anything
        # commits.
        with self._asked():
            self._ready(outgoing, CONSUMING)
        self._enlisted.append(outgoing)

    def commit(self, acks: Sequence[Delivery]) -> None:
        enlisted, self._enlisted = self._enlisted, []
        tags = self._acks.unanswered(one.handle for one in acks)
        returned: list[tuple[bytes, bytes]] = []

        def on_return(method: bytes, properties: bytes, body: bytes) -> None:
            returned.append((method[3 + method[2] :], body))

        with self._asked(DispatchUnknown):
            channel = self._opened()
            self._link.contents[CONSUMING, spec.Basic.Return] = on_return
            made = [self._ready(one, CONSUMING) for one in enlisted]
            for one in made:
                self._link.write(one.frames)
            for tag in tags:
                self._link.write(frames.acknowledged(tag, CONSUMING))
            channel.tx_commit()
        self._acks.settle(tags)
        if returned:
            self._send_returned(enlisted, made, returned)

    def _send_returned(
        self,
        enlisted: Sequence[Outgoing],
        made: Sequence[frames.Ready],
        returned: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Send returned messages again, to a new queue: a queue was deleted between
        enlist() and commit(), and RabbitMQ has committed the rest."""
        again = [
            outgoing
            for outgoing, one in zip(enlisted, made, strict=True)
            if (one.route, one.body) in returned
        ]
        for one in again:
            self._queues.forget(one.destination)
        for error in self.send(again):
            if error is not None:
                raise DispatchUnknown(f"committed without a message: {error}")

    def rollback(self) -> None:
        self._enlisted = []

    # -- lifetime -----------------------------------------------------------------

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
        """Own the link. Raises `lost` if it breaks, and BrokerUnavailable if the
        receiving channel is closed."""
        try:
            with self._link.asking():
                yield
        except ChannelClosed as error:
            self._subscription.over = error.text
            raise BrokerUnavailable(error.text) from error
        except BrokerUnavailable as error:
            self._subscription.over = str(error)
            raise lost(str(error)) from error
