"""What differs between the brokers that speak STOMP, as far as a client must know.

The facts behind each field are in ``docs/explanation/broker-facts.md``: ActiveMQ
Classic 5.17 and RabbitMQ 3.10 were run, Artemis is written from its sources and
documentation and was not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from urllib.parse import quote

from .destination import Destination
from .errors import (
    InvalidDestinationError,
    MessageFormatError,
    UnsupportedOperationError,
)

#: Milliseconds in which RabbitMQ can let a message expire.
MAX_EXPIRATION = 2**32 - 1
#: Bytes of a header's name, and of the values that AMQP has a property for.
MAX_PROPERTY = 255
_AMQP_PROPERTIES = frozenset(
    {
        "amqp-message-id", "app-id", "content-encoding", "content-type",
        "correlation-id", "reply-to", "type", "user-id",
    }
)  # fmt: skip
_OF_A_DELAY = re.compile(r"\.delay-\d+s$")
#: AMQP's codes for what one frame did wrong; the others are the connection's.
_CODES_OF_A_FRAME = frozenset({"311", "313", "403", "404", "405", "406"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One broker's variations; the values here are ActiveMQ Classic's."""

    name: str = "activemq"
    #: Characters that mean something else than themselves in a destination.
    forbidden_in_names: str = ",?*>"
    #: Header of SUBSCRIBE that bounds the deliveries not yet acknowledged.
    prefetch_header: str = "activemq.prefetchSize"
    #: What one message of prefetch is in the header's unit.
    prefetch_unit: int = 1
    #: Header of SEND with the moment a message expires, in epoch milliseconds ...
    expires_header: str | None = "expires"
    #: ... or with the milliseconds it has left.
    time_to_live_header: str | None = None
    #: Headers of SEND that this broker reads as whole numbers.
    number_headers: frozenset[str] = frozenset(
        {
            "expires", "priority", "timestamp", "JMSXGroupSeq", "AMQ_SCHEDULED_DELAY",
            "AMQ_SCHEDULED_PERIOD", "AMQ_SCHEDULED_REPEAT",
        }
    )  # fmt: skip
    #: A transaction is one atomic unit whose COMMIT receipt proves all its sends.
    commit_proves_sends: bool = True
    #: ERROR has the receipt id of its frame, if that asked for a receipt.
    errors_name_receipts: bool = True
    #: Frames in a transaction are handled as they arrive, not kept until COMMIT.
    answers_inside_transaction: bool = True
    #: A redelivery has the `message-id` of the first delivery.
    message_ids_stay: bool = True
    #: An acknowledgement in a transaction waits for its COMMIT.
    acks_join_transaction: bool = True
    #: JMS clients take its messages, and `amq-msg-type` makes one a text.
    serves_jms: bool = True

    def address(self, destination: Destination) -> str:
        """Name the destination as the broker does.

        Raises ``InvalidDestinationError`` for a name this broker would misread.
        """
        name = destination.name
        for character in self.forbidden_in_names:
            if character in name:
                raise InvalidDestinationError(
                    f"Destination {name!r} is malformed on {self.name}: "
                    f"{character!r} has a meaning of its own there. Rename it."
                )
        return f"/topic/{name}" if destination.is_topic else f"/queue/{name}"

    def told(self, existing: str) -> Dialect:
        """Return this dialect, told which queues are not to be declared."""
        return self

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Headers every SEND to the destination carries."""
        return {"destination": self.address(destination)}

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse headers on which this broker drops the connection without a word.

        Raises ``MessageFormatError``.
        """
        for name in self.number_headers.intersection(headers):
            value = headers[name]
            if not (isinstance(value, str) and value.isascii() and value.isdigit()):
                raise MessageFormatError(
                    f"Header {name} is a whole number on {self.name}, not {value!r}."
                )

    def mode_header(self, *, persistent: bool) -> bytes:
        """Return the line of SEND that says whether the message survives a restart."""
        return b"persistent:true\n" if persistent else b"persistent:false\n"

    def blames_frame(self, said: str) -> bool:
        """Whether an ERROR that names no receipt finds fault with a frame, and does
        not merely say that the connection ends."""
        return True

    def expiry_headers(self, now_ms: int, time_to_live_ms: int) -> dict[str, str]:
        """Headers that let a message expire."""
        if self.expires_header:
            return {self.expires_header: str(now_ms + time_to_live_ms)}
        return {str(self.time_to_live_header): str(time_to_live_ms)}

    def delayed(
        self, destination: Destination, delay_ms: int, *, transacted: bool
    ) -> tuple[Destination, dict[str, str]]:
        """Return where to send what is to arrive so much later, with which headers.

        Raises ``UnsupportedOperationError`` in a transaction: the broker would schedule
        the message outside of it, and lose it in a crash.
        """
        if transacted:
            raise UnsupportedOperationError(
                f"{self.name} schedules a delayed message after the commit, not with "
                "it: a crash between the two loses it. Send it outside the "
                "transaction, or let the outbox hold it."
            )
        return destination, {"AMQ_SCHEDULED_DELAY": str(delay_ms)}

    def subscribe_headers(
        self, destination: Destination, prefetch: int, subscription: str | None
    ) -> dict[str, str]:
        """Headers of SUBSCRIBE, with what keeps a named subscription durable."""
        headers = {
            "destination": self.address(destination),
            self.prefetch_header: str(prefetch * self.prefetch_unit),
        }
        if subscription is not None:
            headers |= self.durable_headers(subscription)
        return headers

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Headers that name a durable subscription, on SUBSCRIBE and UNSUBSCRIBE."""
        return {"activemq.subscriptionName": subscription}

    @property
    def durable_needs_client_id(self) -> bool:
        """Whether a durable subscription belongs to a connection's client id."""
        return True

    @property
    def deletes_durable_while_in_use(self) -> bool:
        """Whether ending a durable subscription and deleting it is one frame."""
        return False


@dataclass(frozen=True, slots=True)
class ArtemisDialect(Dialect):
    """Artemis: prefetch in bytes, and a queue must be asked for by name."""

    name: str = "artemis"
    prefetch_header: str = "consumer-window-size"
    prefetch_unit: int = 10_240
    acks_join_transaction: bool = False
    serves_jms: bool = False

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Ask for the routing: the default drops what no subscriber waits for."""
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {"destination": self.address(destination), "destination-type": kind}

    def address(self, destination: Destination) -> str:
        """Artemis addresses are plain names."""
        return Dialect.address(self, destination).split("/", 2)[2]

    def subscribe_headers(
        self, destination: Destination, prefetch: int, subscription: str | None
    ) -> dict[str, str]:
        """Name the routing on SUBSCRIBE too."""
        headers = Dialect.subscribe_headers(self, destination, prefetch, subscription)
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {**headers, "subscription-type": kind}

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Artemis has its own header for a durable subscription's name."""
        return {"durable-subscription-name": subscription}


@dataclass(frozen=True, slots=True)
class RabbitMQDialect(Dialect):
    """RabbitMQ: transactions are replayed at COMMIT, confirms prove the sends."""

    name: str = "rabbitmq"
    forbidden_in_names: str = "/"
    prefetch_header: str = "prefetch-count"
    number_headers: frozenset[str] = frozenset({"expiration", "priority"})
    expires_header: str | None = None
    time_to_live_header: str | None = "expiration"
    commit_proves_sends: bool = False
    errors_name_receipts: bool = False
    answers_inside_transaction: bool = False
    message_ids_stay: bool = False
    serves_jms: bool = False
    #: Patterns of queues that are there, of whatever type.
    existing: tuple[str, ...] = ()

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse as well what RabbitMQ takes by STOMP and cannot hand over by AMQP: it
        would hang up on every consumer that the message is delivered to."""
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

    def told(self, existing: str) -> Dialect:
        """``/queue/`` declares a classic queue, which a queue of another type refuses;
        ``/amq/queue/`` declares none."""
        return replace(self, existing=tuple(filter(None, existing.split(","))))

    def address(self, destination: Destination) -> str:
        """RabbitMQ decodes percent escapes in names, so they are written."""
        Dialect.address(self, destination)
        kind = "topic" if destination.is_topic else "queue"
        if kind == "queue" and self._exists(destination.name):
            kind = "amq/queue"
        return f"/{kind}/{quote(destination.name, safe='.:-_~')}"

    def _exists(self, name: str) -> bool:
        # Queues of delays are always made here.
        return not _OF_A_DELAY.search(name) and any(
            fnmatchcase(name, pattern) for pattern in self.existing
        )

    def mode_header(self, *, persistent: bool) -> bytes:
        """Leave it out for a volatile message: ``persistent:false`` makes RabbitMQ
        declare the queue as one of this connection's own, which ends with it."""
        return b"persistent:true\n" if persistent else b""

    def blames_frame(self, said: str) -> bool:
        """RabbitMQ says with an ERROR, too, that an operator closes the connection."""
        code = re.search(r"server_initiated_close,\s*(\d+)", said)
        if code is not None:
            return code[1] in _CODES_OF_A_FRAME
        return not re.search("died|connection_forced|internal_error", said, re.I)

    def delayed(
        self, destination: Destination, delay_ms: int, *, transacted: bool
    ) -> tuple[Destination, dict[str, str]]:
        """Let the message wait in a queue that nobody reads, until it expires there
        and is dead-lettered to its destination.

        A queue lets only its first message expire, so there is one for each power of
        two of seconds: at worst a message waits twice as long, never for all longer
        ones. The longest delay is 49 days.
        """
        if transacted:
            raise UnsupportedOperationError(
                f"{self.name} proves no send by its COMMIT. Send a delayed message "
                "outside the transaction, or let the outbox hold it."
            )
        if delay_ms > MAX_EXPIRATION:
            raise UnsupportedOperationError(
                f"{self.name} delays a message by 49 days at most. Let the outbox hold "
                "it, which delays it for as long as you like."
            )
        seconds = 1 << ((delay_ms - 1) // 1000).bit_length()
        return Destination(f"{destination}.delay-{seconds}s"), {
            "expiration": str(delay_ms),
            "x-dead-letter-exchange": "amq.topic" if destination.is_topic else "",
            "x-dead-letter-routing-key": destination.name,
        }

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Keep the subscription's queue when its consumer goes."""
        return {
            "durable": "true",
            "auto-delete": "false",
            "x-queue-name": subscription,
        }

    @property
    def durable_needs_client_id(self) -> bool:
        """The queue's name alone identifies the subscription."""
        return False

    @property
    def deletes_durable_while_in_use(self) -> bool:
        """The frame that ends the subscription deletes its queue."""
        return True


ACTIVEMQ = Dialect()
ARTEMIS = ArtemisDialect()
RABBITMQ = RabbitMQDialect()
BY_NAME = {dialect.name: dialect for dialect in (ACTIVEMQ, ARTEMIS, RABBITMQ)}


def recognize(server: str) -> Dialect:
    """Tell the dialect from the ``server`` header of the CONNECTED frame.

    An unknown server is taken for ActiveMQ Classic: its names of destinations are the
    most common, and every send is proven by a receipt whatever the broker.
    """
    lowered = server.lower()
    if "artemis" in lowered:
        return ARTEMIS
    if "rabbitmq" in lowered:
        return RABBITMQ
    return ACTIVEMQ
