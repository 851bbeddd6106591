"""A broker's variations of STOMP that a client must know.

ActiveMQ Classic's are the default. The facts behind each field are in
``docs/explanation/broker-facts.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .destination import Destination
from .errors import (
    InvalidDestinationError,
    MessageFormatError,
    UnsupportedOperationError,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One broker's variations; the values here are ActiveMQ Classic's."""

    name: str = "activemq"
    #: Characters that have a special meaning in a destination.
    forbidden_in_names: str = ",?*>"
    #: Header of SUBSCRIBE that limits the unacknowledged deliveries.
    prefetch_header: str = "activemq.prefetchSize"
    #: One message of prefetch, in the header's unit.
    prefetch_unit: int = 1
    #: Header of SEND with the moment a message expires, in epoch milliseconds ...
    expires_header: str | None = "expires"
    #: ... or with the remaining milliseconds.
    time_to_live_header: str | None = None
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
    #: JMS clients consume its messages, and `amq-msg-type` makes one a text message.
    serves_jms: bool = True

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

    def told(self, existing: str) -> Dialect:
        """Return a dialect that does not declare the queues that match these
        patterns."""
        return self

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Return the headers of every SEND to the destination."""
        return {"destination": self.address(destination)}

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Refuse headers on which this broker closes the connection without an error.

        Raises ``MessageFormatError``.
        """
        for name in self.number_headers.intersection(headers):
            value = headers[name]
            if not (isinstance(value, str) and value.isascii() and value.isdigit()):
                raise MessageFormatError(
                    f"Header {name} is a whole number on {self.name}, not {value!r}."
                )

    def mode_header(self, *, persistent: bool) -> bytes:
        """Return the SEND header that makes the message survive a restart, or not."""
        return b"persistent:true\n" if persistent else b"persistent:false\n"

    def blames_frame(self, said: str) -> bool:
        """Return whether an ERROR without a receipt id is about a frame, rather than
        about the end of the connection."""
        return True

    def expiry_headers(self, now_ms: int, time_to_live_ms: int) -> dict[str, str]:
        """Return the headers that let a message expire."""
        if self.expires_header:
            return {self.expires_header: str(now_ms + time_to_live_ms)}
        return {str(self.time_to_live_header): str(time_to_live_ms)}

    def delayed(
        self, destination: Destination, delay_ms: int, *, transacted: bool
    ) -> tuple[Destination, dict[str, str]]:
        """Return the destination and headers of a message that must arrive later by
        this delay.

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

    @property
    def durable_needs_client_id(self) -> bool:
        """Return whether a durable subscription belongs to a connection's client id."""
        return True

    @property
    def deletes_durable_while_in_use(self) -> bool:
        """Return whether one frame both ends and deletes a durable subscription."""
        return False
