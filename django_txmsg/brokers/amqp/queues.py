"""Queues and topics on RabbitMQ. Declares missing queues, and leaves existing queues
unchanged.

An existing queue is never declared again, because RabbitMQ would refuse a declaration
whose type or arguments differ. By default, a missing queue is declared as a quorum
queue. The queue gets no delivery limit, because the inbox already counts and limits
attempts. (RabbitMQ 4 sets a delivery limit by default.)
"""

from __future__ import annotations

from typing import Any

import amqp

from ... import wire
from ...errors import DestinationUnavailable, DispatchRejected
from .frames import TOPICS, short
from .link import ASKING, ChannelClosed, Link

NOT_FOUND, REFUSED, LOCKED, DIFFERS = 404, 403, 405, 406
#: Keeps an expired message until its destination has confirmed it.
_AT_LEAST_ONCE = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}


class Queues:
    """Declares and deletes queues on a link's broker, and remembers the queues that
    exist."""

    def __init__(self, link: Link) -> None:
        self._link, self._options = link, link.options
        self._channel: amqp.Channel | None = None
        self._known: set[str] = set()
        #: Queues declared here, so their type is known.
        self._made: set[str] = set()

    def forget(self, queue: str) -> None:
        """Forget that this queue exists, because it was deleted. The next use checks
        the queue again."""
        self._known.discard(queue)
        self._made.discard(queue)

    def ensure(self, queue: str, arguments: dict[str, Any] | None = None) -> None:
        """Declare a queue if it is missing.

        Raises DestinationUnavailable if the broker does not create the queue, or if the
        URL forbids declaring queues. Raises DispatchRejected for an invalid name.
        """
        if queue in self._known:
            return
        short(queue)  # raises if the name is invalid
        try:
            if not self.waiting(queue):
                self._make(queue, arguments)
        except ChannelClosed as error:
            if error.channel != ASKING:
                raise
            # Another client may have just declared it with other arguments.
            if error.code != DIFFERS or not self.waiting(queue):
                text = f"queue {queue!r}: {error.text}"
                raise DestinationUnavailable(text) from error
        self._known.add(queue)

    def waiting(self, queue: str) -> tuple[int, int] | None:
        """Return the number of a queue's messages and the number of its consumers.
        Return None if the queue does not exist.

        Raises DestinationUnavailable if the queue is exclusive to another connection.
        """
        try:
            found = self._on().queue_declare(queue, passive=True)
        except ChannelClosed as error:
            if error.channel != ASKING:
                raise
            if error.code == LOCKED:
                raise DestinationUnavailable(
                    f"queue {queue!r} is exclusive to another connection: RabbitMQ "
                    "deletes it, with its messages, when that connection ends"
                ) from error
            if error.code == REFUSED:
                return 0, 0  # it exists; its next use shows the rest
            if error.code != NOT_FOUND:
                raise
            return None
        return found.message_count, found.consumer_count

    def refuse_stream(self, queue: str) -> None:
        """Raise DispatchRejected if a queue is a stream. A stream delivers only new
        messages, delivers each message to every consumer, and keeps acknowledged
        messages.

        A passive declaration does not report the type of the queue. So this method
        tries to consume from an offset. RabbitMQ allows that only for a stream, and
        otherwise closes the channel.
        """
        if queue in self._made:
            return
        channel = self._on()
        try:
            channel.basic_qos(0, 1, False)
            channel.basic_consume(queue, arguments={"x-stream-offset": "next"})
        except ChannelClosed as error:
            if error.channel != ASKING:
                raise
        else:
            raise DispatchRejected(
                f"queue {queue!r} is a stream, and a stage would miss what was sent "
                "while it was not connected. Name a classic or a quorum queue"
            )

    def private(self, topic: str) -> str:
        """Declare a queue that only this connection may use, bind it to the topic, and
        return its name."""
        found = self._on().queue_declare(exclusive=True, auto_delete=True)
        self._bind(found.queue, topic)
        return str(found.queue)

    def subscribe(self, topic: str, subscriber: str) -> None:
        """Declare the durable queue of a topic's subscriber, and bind the queue to the
        topic."""
        self.ensure(subscriber)
        self._bind(subscriber, topic)

    def delete(self, queue: str) -> None:
        """Delete a queue with its messages, if it exists."""
        self._on().queue_delete(queue)
        self._known.discard(queue)

    def ping(self) -> None:
        """Send a request, and return when the broker has answered."""
        self._on().basic_qos(0, 1, False)

    def delayed(self, destination: str, milliseconds: int) -> str:
        """Return the queue in which a delayed message for `destination` waits until it
        expires. Declare the queue if it is missing. When the message expires, RabbitMQ
        moves it to `destination`.

        A quorum queue keeps an expired message until the destination accepts the
        message. A classic queue drops an expired message if the destination cannot
        accept it at that moment (after a restart, say). STOMP sessions use the same
        classic queues.
        """
        if milliseconds > wire.MAX_RABBITMQ_DELAY:
            raise DispatchRejected(
                "RabbitMQ delays a message by 49 days at most. Let the outbox hold it, "
                "which delays it for as long as you like."
            )
        topic = wire.is_topic(destination)
        name = destination.removeprefix(wire.TOPIC_PREFIX)
        if not topic:
            self.ensure(name)
        seconds = wire.delay_queue_seconds(milliseconds)
        arguments = {
            "x-dead-letter-exchange": TOPICS if topic else "",
            "x-dead-letter-routing-key": name,
        }
        queue = f"{name}.delay-{seconds}s"
        if self._options.queue_type == "quorum" and self._link.version >= (3, 10):
            queue = f"{name}.wait-{seconds}s"
            arguments |= _AT_LEAST_ONCE
        self.ensure(queue, arguments)
        return queue

    def _make(self, queue: str, arguments: dict[str, Any] | None) -> None:
        if not self._options.declare:
            raise DestinationUnavailable(
                f"there is no queue {queue!r}, and ?declare=no forbids declaring it"
            )
        if arguments is None:
            arguments = {"x-queue-type": self._options.queue_type}
            if self._options.queue_type == "quorum" and self._link.version >= (4, 0):
                arguments["x-delivery-limit"] = -1
        self._on().queue_declare(
            queue, durable=True, auto_delete=False, arguments=arguments
        )
        self._made.add(queue)

    def _bind(self, queue: str, topic: str) -> None:
        name = topic.removeprefix(wire.TOPIC_PREFIX)
        self._on().queue_bind(queue, exchange=TOPICS, routing_key=name)

    def _on(self) -> amqp.Channel:
        """Return the channel for requests. If a failed request has closed the channel,
        open a new channel."""
        if self._channel is None or self._channel.connection is None:
            self._channel = self._link.channel(ASKING)
        return self._channel
