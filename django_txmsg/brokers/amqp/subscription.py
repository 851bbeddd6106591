"""Hop 6 on AMQP: the queue that a session receives from, and its arrived messages.

A topic's subscriber has a queue of its own, bound to that topic. A subscription without
a name has a private queue, which is deleted with its connection.
"""

from __future__ import annotations

import struct
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import amqp
from amqp import spec

from ... import wire
from ..base import Delivery
from . import content, frames
from .acknowledgements import Acknowledgements
from .link import CONSUMING, Link
from .queues import Queues

_TAG = "txmsg"


class Subscription:
    """The deliveries on a session's receiving channel."""

    def __init__(self, link: Link, queues: Queues, acks: Acknowledgements) -> None:
        self._link, self._queues, self._acks = link, queues, acks
        self._name = uuid.uuid4().hex
        self._destination = self.queue = ""
        #: Whether its messages go to no other consumer, and are never redelivered.
        self._private = False
        self._consuming = False
        self.arrived: deque[Delivery] = deque()
        #: Why no more messages arrive; None while they do.
        self.over = ""

    def declare(self, destination: str, subscriber: str | None) -> None:
        """Declare the queue to receive from, if it is missing.

        Raises DestinationUnavailable if the broker does not create it, and
        DispatchRejected if stages cannot consume it.
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
        """Consume the queue, instead of the one subscribed to before."""
        if self._consuming:
            channel.basic_cancel(_TAG)
            tags = [one.handle for one in self.arrived]
            self.arrived.clear()
            self._acks.settle(tags)
            for tag in tags:
                self._link.write(frames.refused(tag, CONSUMING))
        self._consuming = True
        channel.basic_qos(0, prefetch, False)
        self._link.contents[CONSUMING, spec.Basic.Deliver] = self._on_deliver
        self._link.methods[CONSUMING, spec.Basic.Cancel] = self._on_cancel
        channel.basic_consume(self.queue, consumer_tag=_TAG)

    def _on_deliver(self, method: bytes, properties: bytes, body: bytes) -> None:
        at = 1 + method[0]
        tag, redelivered = struct.unpack_from(">QB", method, at)
        reader = content.Reader(properties)
        headers = reader.headers()
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
                problem=reader.problem,
                id_stays=given is not None or self._private,
            )
        )

    def _came_before(self, table: Mapping[str, Any]) -> bool:
        """Return whether the message was delivered before: the broker counted a
        returned delivery, or this session took it from the queue."""
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
