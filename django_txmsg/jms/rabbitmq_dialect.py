"""RabbitMQ's manner of speaking STOMP, which its plugin translates to AMQP.

RabbitMQ 3.10 was run for it.
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
