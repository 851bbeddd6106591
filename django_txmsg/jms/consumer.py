"""Receives messages from one destination. The caller fetches one message at a time.

Hop 6 of a message. Received messages wait in a buffer for the caller. The buffer stays
small, because the broker sends no more than ``prefetch`` messages before the first of
them is acknowledged. The reader thread only appends to the buffer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from .bases import Closing
from .destination import Destination
from .errors import (
    ConnectionLostError,
    IllegalStateError,
    MessagingError,
    RequestRejectedError,
    UnsupportedOperationError,
)
from .frames import Frame, encode
from .link import Link
from .message import Message

logger = logging.getLogger("django_txmsg.jms.consumer")


class AckMode(Enum):
    """Who acknowledges a received message: the application or the consumer."""

    #: By ``session.acknowledge(message)``, one by one, once its outcome is stored.
    INDIVIDUAL = "client-individual"
    #: By the consumer, when ``receive`` returns: a crash after that loses the message.
    AUTO = "auto"


class MessageConsumer(Closing):
    """A consumer, created by ``session.create_consumer``."""

    def __init__(
        self,
        link: Link,
        destination: Destination,
        prefetch: int,
        subscription: str | None,
        *,
        on_received: Callable[[Message], None],
        on_closed: Callable[[MessageConsumer], None],
    ) -> None:
        """Check the options. Only ``subscribe`` contacts the broker.

        The consumer calls ``on_received`` for each received message, and ``on_closed``
        when it is closed.
        """
        if prefetch < 1:
            raise ValueError(
                "prefetch is at least 1: with 0 a broker delivers nothing."
            )
        if subscription is not None and not destination.is_topic:
            raise UnsupportedOperationError(
                "Only a topic has named subscriptions; a queue keeps messages anyway."
            )
        if (
            subscription is not None
            and link.dialect.durable_needs_client_id
            and link.options.client_id is None
        ):
            raise IllegalStateError(
                f"A durable subscription on {link.dialect.name} belongs to a "
                "client id. Give the factory one: stomp://host?client_id=NAME."
            )
        self._link = link
        self._on_received = on_received
        self._on_closed = on_closed
        self.destination = destination
        self.prefetch = prefetch
        self.subscription = subscription
        self.subscription_id = link.next_name("sub-")
        self._buffer: deque[Message] = deque()
        self._unsettled: dict[str | None, Message] = {}
        self._closed = False

    def subscribe(self, timeout: float | None = None) -> None:
        """Request deliveries from the broker. Raises an error if the broker refuses."""
        link = self._link
        headers = link.dialect.subscribe_headers(
            self.destination, self.prefetch, self.subscription
        )
        headers |= {"id": self.subscription_id, "ack": "client-individual"}
        link.route(self.subscription_id, self.deliver)
        what = f"the subscription to {self.destination}"
        try:
            link.ask("SUBSCRIBE", headers, timeout=timeout, what=what).wait()
        except BaseException as error:
            link.unroute(self.subscription_id)
            if not isinstance(error, RequestRejectedError):
                # The broker may have created the subscription nevertheless.
                with contextlib.suppress(MessagingError):
                    link.post(encode("UNSUBSCRIBE", self._end()))
            raise

    def deliver(self, frame: Frame) -> None:
        """Add a delivery to the buffer. The reader thread calls this with the lock
        held."""
        self._buffer.append(
            Message.received(frame, self.subscription_id, self.destination)
        )

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or ``None`` if no message arrives in time or the
        consumer is closed.

        Raises ``ConnectionLostError`` after the connection has failed. The broker then
        delivers the buffered messages again, on the next connection.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        link = self._link
        link.refuse_inside()
        link.check_alive()
        with link.lock:
            while True:
                if self._closed or (link.closed and link.error is None):
                    return None
                link.check_alive()
                if self._buffer and link.delivering:
                    message = self._buffer.popleft()
                    self._unsettled[message.ack_id] = message
                    break
                left = None if give_up is None else give_up - time.monotonic()
                if left is not None and left <= 0:
                    return None
                link.changed.wait(left)
        self._on_received(message)
        return message

    def receive_nowait(self) -> Message | None:
        """Return a message that has already arrived, or ``None`` if there is none."""
        return self.receive(0)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the consumer is closed."""
        while (message := self.receive()) is not None:
            yield message

    def settle(self, message: Message) -> None:
        """Record that a message is being acknowledged.

        Raises ``IllegalStateError`` if the message is already acknowledged, if it was
        put back into the buffer, or if the consumer is closed.
        """
        with self._link.lock:
            if self._closed:
                raise IllegalStateError(
                    f"The consumer of {message!r} is closed; the broker delivers the "
                    "message again."
                )
            if self._unsettled.get(message.ack_id) is not message:
                raise IllegalStateError(
                    f"{message!r} is acknowledged already, or was taken back."
                )
            del self._unsettled[message.ack_id]

    def forget(self, message: Message) -> None:
        """Stop counting a message as unacknowledged. Called when a committed
        transaction has acknowledged the message."""
        with self._link.lock:
            self._unsettled.pop(message.ack_id, None)

    def take_back(self, received: Sequence[Message] | None = None) -> None:
        """Put unacknowledged messages back into the buffer, marked as redelivered: the
        messages in `received`, or all."""
        wanted = None if received is None else set(map(id, received))
        with self._link.lock:
            again = [
                message
                for message in self._unsettled.values()
                if wanted is None or id(message) in wanted
            ]
            for message in again:
                del self._unsettled[message.ack_id]
                message.redelivered = True
            self._buffer.extendleft(reversed(again))
            self._link.changed.notify_all()

    @property
    def buffered(self) -> int:
        """The number of deliveries that wait in the buffer for the application."""
        return len(self._buffer)

    def __repr__(self) -> str:
        """Show the destination."""
        return f"<MessageConsumer of {self.destination}>"

    def close(self, *, delete_subscription: bool = False) -> None:
        """Accept no more deliveries. The broker redelivers unacknowledged messages:
        ActiveMQ immediately, RabbitMQ when the connection ends.

        If the broker does not confirm the end of the subscription, the consumer only
        logs the failure, because the subscription ends with the connection. Raises an
        error only if a durable subscription could not be deleted.
        """
        try:
            self._close(delete=delete_subscription)
        except MessagingError as error:
            if delete_subscription or isinstance(error, IllegalStateError):
                raise
            logger.warning("%r is closed nevertheless: %s", self, error)

    def _close(self, *, delete: bool) -> None:
        link = self._link
        link.refuse_inside()
        if link.inherited:
            return
        with link.lock:
            if self._closed:
                return
            self._closed = True
            self._buffer.clear()
            link.changed.notify_all()
        self._on_closed(self)
        left_to_disconnect = link.ending and link.dialect.late_deliveries_fail
        try:
            if not link.closed and link.error is None and not left_to_disconnect:
                self._unsubscribe(delete=delete)
        except ConnectionLostError:
            pass  # which ends the subscription as well
        finally:
            link.unroute(self.subscription_id)

    def _end(self) -> dict[str, str]:
        address = self._link.dialect.address(self.destination)
        return {"id": self.subscription_id, "destination": address}

    def _unsubscribe(self, *, delete: bool) -> None:
        timeout = None if delete else self._link.options.close_timeout
        dialect, frames = self._link.dialect, [self._end()]
        if delete and self.subscription:
            frames.append(self._end() | dialect.durable_headers(self.subscription))
            if dialect.deletes_durable_while_in_use:
                del frames[0]
        what = f"ending the subscription to {self.destination}"
        for headers in frames:
            self._link.ask("UNSUBSCRIBE", headers, timeout=timeout, what=what).wait()
