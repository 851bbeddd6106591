"""The differences between STOMP brokers, and the function that recognizes a broker.

The defaults are the values for ActiveMQ Classic. ``docs/explanation/broker-facts.md``
explains each field. The tests run against ActiveMQ Classic 5.17 and RabbitMQ 3.10. The
values for Artemis come from its source code and documentation, and are not tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote

from .. import wire
from .destination import Destination
from .errors import (
    InvalidDestinationError,
    MessageFormatError,
    UnsupportedOperationError,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The STOMP behaviour of one kind of broker. The defaults describe ActiveMQ
    Classic."""

    name: str = "activemq"
    #: Characters that have a special meaning in a destination.
    forbidden_in_names: str = ",?*>"
    #: Header of SUBSCRIBE that limits the unacknowledged deliveries.
    prefetch_header: str = "activemq.prefetchSize"
    #: One message of prefetch, in the header's unit.
    prefetch_unit: int = 1
    #: Headers of SEND that this broker reads as whole numbers.
    number_headers: frozenset[str] = frozenset(
        {
            "expires", "priority", "timestamp", "JMSXGroupSeq", "AMQ_SCHEDULED_DELAY",
            "AMQ_SCHEDULED_PERIOD", "AMQ_SCHEDULED_REPEAT",
        }
    )  # fmt: skip
    #: A transaction is atomic, and its COMMIT receipt proves all its sends.
    commit_proves_sends: bool = True
    #: An ERROR has the receipt id of its frame, if that asked for a receipt.
    errors_name_receipts: bool = True
    #: Frames in a transaction are handled as they arrive, not buffered until COMMIT.
    answers_inside_transaction: bool = True
    #: A redelivery has the `message-id` of the first delivery.
    message_ids_stay: bool = True
    #: An acknowledgement in a transaction waits for its COMMIT.
    acks_join_transaction: bool = True
    #: A durable subscription belongs also to the connection's client id.
    durable_needs_client_id: bool = True
    #: One frame both ends a subscription and deletes its queue.
    deletes_durable_while_in_use: bool = False
    #: If a subscription ends while a delivery is under way, the broker answers ERROR
    #: and ends the connection.
    late_deliveries_fail: bool = False
    #: JMS clients may consume a message; the header `amq-msg-type` makes it a text
    #: message.
    serves_jms: bool = True
    #: The header line of a message that the broker need not keep through a restart.
    volatile_line: bytes = b"persistent:false\n"
    #: Patterns, separated by commas, of queues that exist, of any type.
    existing: str = ""

    def address(self, destination: Destination) -> str:
        """Return the broker's address of the destination.

        Raises ``InvalidDestinationError`` for a name that this broker would misread.
        """
        name = destination.name
        for character in self.forbidden_in_names:
            if character in name:
                raise InvalidDestinationError(
                    f"Destination {name!r} is malformed on {self.name}: "
                    f"{character!r} has a meaning of its own there. Rename it."
                )
        return f"/topic/{name}" if destination.is_topic else f"/queue/{name}"

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Return the headers that every SEND to this destination must have."""
        return {"destination": self.address(destination)}

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse headers that make this broker close the connection without an ERROR.

        Raises ``MessageFormatError``.
        """
        for name in self.number_headers.intersection(headers):
            value = headers[name]
            if not (isinstance(value, str) and value.isascii() and value.isdigit()):
                raise MessageFormatError(
                    f"Header {name} is a whole number on {self.name}, not {value!r}."
                )

    def blames_frame(self, broker_message: str) -> bool:
        """Return True if an ERROR without a receipt id means that the broker refuses a
        frame. Return False if the ERROR announces the end of the connection."""
        return True

    def expiry_headers(self, now_ms: int, time_to_live_ms: int) -> dict[str, str]:
        """Return the headers that make a message expire after its time to live."""
        return {"expires": str(now_ms + time_to_live_ms)}

    def delayed(
        self, destination: Destination, delay_ms: int
    ) -> tuple[Destination, dict[str, str]]:
        """Return the destination and headers of a message that the broker must deliver
        after this delay."""
        return destination, {"AMQ_SCHEDULED_DELAY": str(delay_ms)}

    def subscribe_headers(
        self, destination: Destination, prefetch: int, subscription: str | None
    ) -> dict[str, str]:
        """Return the headers of SUBSCRIBE, including those of a durable
        subscription."""
        headers = {
            "destination": self.address(destination),
            self.prefetch_header: str(prefetch * self.prefetch_unit),
        }
        if subscription is not None:
            headers |= self.durable_headers(subscription)
        return headers

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Return the headers that name a durable subscription, on SUBSCRIBE and
        UNSUBSCRIBE."""
        return {"activemq.subscriptionName": subscription}


#: Most bytes of a header's name, and of values that AMQP stores in a property.
MAX_PROPERTY = 255
_AMQP_PROPERTIES = frozenset(
    {
        "amqp-message-id", "app-id", "content-encoding", "content-type",
        "correlation-id", "reply-to", "type", "user-id",
    }
)  # fmt: skip
#: AMQP's codes for errors of one frame; the others concern the connection.
_CODES_OF_A_FRAME = frozenset({"311", "313", "403", "404", "405", "406"})


@dataclass(frozen=True, slots=True)
class RabbitMQDialect(Dialect):
    """The STOMP behaviour of RabbitMQ, where a plugin translates STOMP to AMQP. The
    plugin replays a transaction's frames at COMMIT. It sends a receipt for a SEND when
    RabbitMQ has confirmed the message."""

    name: str = "rabbitmq"
    forbidden_in_names: str = "/"
    prefetch_header: str = "prefetch-count"
    number_headers: frozenset[str] = frozenset({"expiration", "priority"})
    commit_proves_sends: bool = False
    errors_name_receipts: bool = False
    answers_inside_transaction: bool = False
    message_ids_stay: bool = False
    #: RabbitMQ acknowledges even if a queue refuses a message of the transaction.
    acks_join_transaction: bool = False
    durable_needs_client_id: bool = False
    deletes_durable_while_in_use: bool = True
    late_deliveries_fail: bool = True
    serves_jms: bool = False
    #: With ``persistent:false`` RabbitMQ declares the queue as exclusive to this
    #: connection, and deletes it at the connection's end.
    volatile_line: bytes = b""

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse the headers that the base class refuses, and headers that are too long
        for AMQP. RabbitMQ would accept long headers over STOMP, but would close the
        connection of every consumer that gets the message."""
        Dialect.check_headers(self, headers)
        for name, value in headers.items():
            text = f"{value}" if name in _AMQP_PROPERTIES else ""
            if max(len(name), len(text)) * 4 <= MAX_PROPERTY:
                continue
            size = max(len(one.encode(errors="replace")) for one in (name, text))
            if size > MAX_PROPERTY:
                raise MessageFormatError(
                    f"Header {name[:40]!r} has {size} bytes where AMQP has place for "
                    f"{MAX_PROPERTY}."
                )

    def address(self, destination: Destination) -> str:
        """Return the address with a percent-encoded name, because RabbitMQ decodes
        percent escapes. The address of a queue in ``existing`` is
        ``/amq/queue/NAME``, which declares no queue. ``/queue/NAME`` would declare a
        classic queue, and fail if the queue has another type."""
        Dialect.address(self, destination)
        kind = "topic" if destination.is_topic else "queue"
        if kind == "queue" and self._exists(destination.name):
            kind = "amq/queue"
        return f"/{kind}/{quote(destination.name, safe='.:-_~')}"

    def _exists(self, name: str) -> bool:
        # Delay queues are always declared here; only AMQP names some ".wait-1s".
        return not re.search(r"\.delay-\d+s$", name) and any(
            fnmatchcase(name, pattern) for pattern in self.existing.split(",")
        )

    def blames_frame(self, broker_message: str) -> bool:
        """Return True if the ERROR means that RabbitMQ refuses a frame. Return False if
        an operator is closing the connection."""
        code = re.search(r"server_initiated_close,\s*(\d+)", broker_message)
        if code is not None:
            return code[1] in _CODES_OF_A_FRAME
        return not re.search(
            "died|connection_forced|internal_error", broker_message, re.I
        )

    def expiry_headers(self, now_ms: int, time_to_live_ms: int) -> dict[str, str]:
        """Return the header with the time to live, because RabbitMQ does not read the
        moment at which a message expires."""
        return {"expiration": str(time_to_live_ms)}

    def delayed(
        self, destination: Destination, delay_ms: int
    ) -> tuple[Destination, dict[str, str]]:
        """Return a delay queue, and headers that make the message expire there after
        the delay. RabbitMQ then moves the message to its destination.

        RabbitMQ expires only the first message of a queue, so a message waits for the
        messages in front. To limit that wait, there are queues for 1 s, 2 s, 4 s, 8 s
        and so on. So a message waits for at most twice its delay or one second,
        whichever is longer. The longest delay is 49 days.
        """
        if delay_ms > wire.MAX_RABBITMQ_DELAY:
            raise UnsupportedOperationError(
                f"{self.name} delays a message by 49 days at most. Let the outbox hold "
                "it, which delays it for as long as you like."
            )
        seconds = wire.delay_queue_seconds(delay_ms)
        return Destination(f"{destination}.delay-{seconds}s"), {
            "expiration": str(delay_ms),
            "x-dead-letter-exchange": "amq.topic" if destination.is_topic else "",
            "x-dead-letter-routing-key": destination.name,
        }

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Return headers that keep the subscription's queue when the consumer
        disconnects."""
        return {
            "durable": "true",
            "auto-delete": "false",
            "x-queue-name": subscription,
        }


@dataclass(frozen=True, slots=True)
class ArtemisDialect(Dialect):
    """The STOMP behaviour of Artemis. Artemis limits prefetch in bytes, and creates a
    queue only if a header of the frame requests a queue."""

    name: str = "artemis"
    prefetch_header: str = "consumer-window-size"
    prefetch_unit: int = 10_240
    acks_join_transaction: bool = False
    serves_jms: bool = False

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Return the headers that make Artemis create a missing queue or topic. Without
        these headers Artemis drops messages that have no subscriber."""
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {"destination": self.address(destination), "destination-type": kind}

    def address(self, destination: Destination) -> str:
        """Return the plain name of the destination, which is its address on Artemis."""
        return Dialect.address(self, destination).split("/", 2)[2]

    def subscribe_headers(
        self, destination: Destination, prefetch: int, subscription: str | None
    ) -> dict[str, str]:
        """Return the headers of SUBSCRIBE. They also make Artemis create a missing
        queue or topic."""
        headers = Dialect.subscribe_headers(self, destination, prefetch, subscription)
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {**headers, "subscription-type": kind}

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Return the header in which Artemis expects the name of a durable
        subscription."""
        return {"durable-subscription-name": subscription}


ACTIVEMQ = Dialect()
ARTEMIS = ArtemisDialect()
RABBITMQ = RabbitMQDialect()
BY_NAME = {dialect.name: dialect for dialect in (ACTIVEMQ, ARTEMIS, RABBITMQ)}


def recognize(server: str) -> Dialect:
    """Return the dialect for the ``server`` header of the CONNECTED frame.

    An unknown server is treated as ActiveMQ Classic, because most brokers use
    ActiveMQ's form of destination names, and every broker confirms a send by a receipt.
    """
    named = (one for one in (ARTEMIS, RABBITMQ) if one.name in server.lower())
    return next(named, ACTIVEMQ)
