"""Step 3's control message on the wire: its headers name a session and are signed. It
has no body.

A session sends the message to its own service before the session commits
(`control_send.py`). Anyone who may write to the queue can write anything. So the
receiver does not trust a message that is not signed with this project's SECRET_KEY, and
takes all durations from the settings.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.core import signing
from django.db import connections
from django.utils import timezone

from .. import conf, wire
from ..brokers.base import Delivery, Outgoing

SESSION = "txmsg-session"
USING = "txmsg-using"
ORACLE = "txmsg-oracle"
TRANSACTION = "txmsg-transaction"
JOINED_UNTIL = "txmsg-joined-until"
#: The identity of the sender's database.
DATABASE = "txmsg-database"
#: The names of the signed headers, as a JSON list.
SIGNED = "txmsg-signed"
SIGNATURE = "txmsg-signature"

_SALT = "django_txmsg.control"
#: Seconds, beyond the longest commit, for which a broker keeps it for its receiver.
KEPT = 86_400.0


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """Says which session to check. `oracle` says how to find out whether the session
    has committed:

    - "transaction": query the database for the id `transaction`.
    - "delay": wait for the session's record.
    - "arrival": it has. The message was committed together with the session.
    - "group": find out whether the whole group has ended. Its sessions share
      `session_id`, and further sessions may join until `joined_until`.
    - "": unknown. The message is not `signed`, so its other fields cannot be trusted.

    `database` identifies the session's database. It is "" in messages of an earlier
    release.
    """

    id: str
    session_id: uuid.UUID
    using: str
    oracle: str
    transaction: str = ""
    joined_until: dt.datetime | None = None
    database: str = ""
    signed: bool = True
    sent_at: dt.datetime = field(default_factory=timezone.now)
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, delivery: Delivery) -> ControlMessage:
        """Return the control message of a delivery. Raises ValueError if the delivery
        is no control message."""
        if delivery.problem or delivery.body:
            raise ValueError(delivery.problem or "it has a body")
        signed = _verified(delivery.headers)
        headers = delivery.headers if signed is None else signed
        try:
            using = headers[USING]
            if using not in connections:
                raise ValueError(f"there is no database {using!r}")
            return cls(
                id=headers[wire.MESSAGE_ID],
                session_id=uuid.UUID(headers[SESSION]),
                using=using,
                oracle="" if signed is None else headers[ORACLE],
                transaction="" if signed is None else headers.get(TRANSACTION, ""),
                joined_until=wire.parse_instant(headers[JOINED_UNTIL])
                if signed and JOINED_UNTIL in signed
                else None,
                database="" if signed is None else signed.get(DATABASE, ""),
                signed=signed is not None,
                sent_at=wire.parse_instant(headers[wire.CREATED]),
                headers=signed or {},
            )
        except KeyError as error:
            raise ValueError(f"it has no header {error}") from None
        except (AttributeError, TypeError) as error:
            # The embedded broker's headers are JSON, and may be other values than text.
            raise ValueError(str(error)) from None

    def outgoing(self) -> Outgoing:
        """Return the message to send. The message is durable, and expires when its
        session need not be checked any more."""
        service = conf.get().SERVICE
        signed = {
            **self.headers,
            wire.MESSAGE_ID: self.id,
            wire.SERVICE: service,
            wire.CREATED: wire.format_instant(self.sent_at),
            SESSION: str(self.session_id),
            USING: self.using,
            ORACLE: self.oracle,
        }
        if self.transaction:
            signed[TRANSACTION] = self.transaction
        if self.database:
            signed[DATABASE] = self.database
        if self.joined_until is not None:
            signed[JOINED_UNTIL] = wire.format_instant(self.joined_until)
        headers = {
            **signed,
            SIGNED: json.dumps(sorted(signed)),
            SIGNATURE: signing.Signer(salt=_SALT).signature(_text(signed)),
            wire.CONTENT_TYPE: wire.BYTES,
        }
        destination = wire.control_destination(service)
        return Outgoing(destination, headers, b"", time_to_live=max(1.0, self.left))

    @property
    def left(self) -> float:
        """Approximate seconds until the session need not be checked any more. The
        sender's clock and this process's clock may differ."""
        age = (timezone.now() - self.sent_at).total_seconds()
        return conf.get().HTTP.MAX_COMMIT_DURATION + KEPT - age


def _verified(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the signed headers, or None if the signature is not valid."""
    try:
        signed = {name: headers[name] for name in json.loads(headers[SIGNED])}
        given = f"{_text(signed)}:{headers[SIGNATURE]}"
        signing.Signer(salt=_SALT).unsign(given)
    except (KeyError, TypeError, ValueError, RecursionError, signing.BadSignature):
        return None
    return signed


def _text(signed: Mapping[str, str]) -> str:
    return json.dumps(signed, sort_keys=True)
