"""RabbitMQ's STOMP, which its plugin translates to AMQP.

Tested with RabbitMQ 3.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from urllib.parse import quote

from .destination import Destination
from .dialect import Dialect
from .errors import MessageFormatError, UnsupportedOperationError

#: Most milliseconds after which RabbitMQ can expire a message.
MAX_EXPIRATION = 2**32 - 1
#: Most bytes of a header's name, and of values that AMQP stores in a property.
MAX_PROPERTY = 255
_AMQP_PROPERTIES = frozenset(
    {
        "amqp-message-id", "app-id", "content-encoding", "content-type",
        "correlation-id", "reply-to", "type", "user-id",
    }
)  # fmt: skip
_OF_A_DELAY = re.compile(r"\.delay-\d+s$")
#: AMQP's codes for errors of one frame; the others concern the connection.
_CODES_OF_A_FRAME = frozenset({"311", "313", "403", "404", "405", "406"})


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
    #: Patterns of existing queues, of any type.
    existing: tuple[str, ...] = ()

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Also refuse headers that RabbitMQ accepts by STOMP and cannot deliver by
        AMQP: it would hang up on every consumer that the message is delivered to."""
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
        """Use ``/amq/queue/`` for these queues, which declares nothing; ``/queue/``
        declares a classic queue, and fails if the queue has another type."""
        return replace(self, existing=tuple(filter(None, existing.split(","))))

    def address(self, destination: Destination) -> str:
        """Percent-encode the name: RabbitMQ decodes percent escapes."""
        Dialect.address(self, destination)
        kind = "topic" if destination.is_topic else "queue"
        if kind == "queue" and self._exists(destination.name):
            kind = "amq/queue"
        return f"/{kind}/{quote(destination.name, safe='.:-_~')}"

    def _exists(self, name: str) -> bool:
        # Delay queues are always declared here.
        return not _OF_A_DELAY.search(name) and any(
            fnmatchcase(name, pattern) for pattern in self.existing
        )

    def mode_header(self, *, persistent: bool) -> bytes:
        """Omit the header for a volatile message: ``persistent:false`` makes RabbitMQ
        declare the queue as exclusive to this connection, and delete it at its end."""
        return b"persistent:true\n" if persistent else b""

    def blames_frame(self, said: str) -> bool:
        """An ERROR may also mean that an operator closes the connection."""
        code = re.search(r"server_initiated_close,\s*(\d+)", said)
        if code is not None:
            return code[1] in _CODES_OF_A_FRAME
        return not re.search("died|connection_forced|internal_error", said, re.I)

    def delayed(
        self, destination: Destination, delay_ms: int, *, transacted: bool
    ) -> tuple[Destination, dict[str, str]]:
        """Send the message to a delay queue without consumers, from which it expires
        and is dead-lettered to its destination.

        Only the first message of a queue expires, so there is one queue for each power
        of two of seconds: at worst a message waits twice as long, never as long as the
        longest delay before it. The longest delay is 49 days.
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
        """Keep the subscription's queue when its consumer disconnects."""
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
