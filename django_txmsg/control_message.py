"""Step 3's control message on the wire: whom to look for, and no body.

A session sends it to its own service before it commits (`control.py`).
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.db import connections
from django.utils import timezone
from django.utils.connection import ConnectionDoesNotExist

from . import conf, wire
from .brokers.base import Delivery, Outgoing

SESSION = "txmsg-session"
USING = "txmsg-using"
ORACLE = "txmsg-oracle"
TRANSACTION = "txmsg-transaction"
MAX_COMMIT_DURATION = "txmsg-max-commit-duration"
COMMIT_DELAY_INCREMENT = "txmsg-commit-delay-increment"


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """Whom to look for, where, and how to learn whether it has committed.

    `oracle` is "transaction" (ask the database for `transaction`), "delay" (wait), or
    "arrival" (the control message itself was committed with the session).
    """

    id: str
    session_id: uuid.UUID
    using: str
    oracle: str
    transaction: str = ""
    max_commit_duration: float = 15.0
    commit_delay_increment: float = 0.5
    sent_at: dt.datetime | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, delivery: Delivery) -> ControlMessage:
        """Raises ValueError when the delivery is no control message."""
        headers = delivery.headers
        using = headers.get(USING, "")
        try:
            connections[using]
        except ConnectionDoesNotExist:
            raise ValueError(f"there is no database {using!r}") from None
        try:
            sent_at = wire.parse_instant(headers.get(wire.CREATED, ""))
        except ValueError:
            sent_at = None
        return cls(
            id=headers.get(wire.MESSAGE_ID) or delivery.broker_message_id,
            session_id=uuid.UUID(headers.get(SESSION, "")),
            using=using,
            oracle=headers.get(ORACLE, ""),
            transaction=headers.get(TRANSACTION, ""),
            max_commit_duration=float(headers.get(MAX_COMMIT_DURATION, 15.0)),
            commit_delay_increment=float(headers.get(COMMIT_DELAY_INCREMENT, 0.5)),
            sent_at=sent_at,
            headers=dict(headers),
        )

    def outgoing(self) -> Outgoing:
        """The message as it goes on the wire: durable, without a body."""
        service = conf.get().SERVICE
        headers = {
            **self.headers,
            wire.CONTENT_TYPE: wire.BYTES,
            wire.MESSAGE_ID: self.id,
            wire.SERVICE: service,
            wire.CREATED: wire.format_instant(timezone.now()),
            SESSION: str(self.session_id),
            USING: self.using,
            ORACLE: self.oracle,
            MAX_COMMIT_DURATION: f"{self.max_commit_duration:g}",
            COMMIT_DELAY_INCREMENT: f"{self.commit_delay_increment:g}",
        }
        if self.transaction:
            headers[TRANSACTION] = self.transaction
        return Outgoing(wire.control_destination(service), headers, b"")
