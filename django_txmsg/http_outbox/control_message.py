"""Step 3 of an HTTP request: a session sends a control message before it commits.

The message's headers name the session and are signed. It has no body. The session's own
service receives the message, and checks whether the session's messages were dispatched.
If the process dies right after the commit, the receiver (`control_receive.py`)
dispatches them.

Anyone who may write to the queue can write anything. So the receiver does not trust a
message that is not signed with this project's SECRET_KEY, and takes all durations from
the settings.
"""

from __future__ import annotations

import datetime as dt
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.core import signing
from django.db import connections
from django.utils import timezone

from .. import conf, signals, wire
from ..brokers.base import Delivery, Outgoing
from ..django_internals import in_testcase
from ..envelope.message import new_id
from ..errors import BrokerError, CommitTimedOut
from ..models import SessionRecord
from . import database_identity
from .control_connection import control_channel

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
    """Says which session to check. The field `oracle` says how to find out whether the
    session has committed:

    - "transaction": query the database for the id `transaction`.
    - "delay": wait for the session's record.
    - "arrival": the session has committed. The transaction of the session also stored
      this control message.
    - "group": find out whether the whole group has ended. Its sessions share
      `session_id`, and further sessions may join until `joined_until`.
    - "": unknown. The message is not `signed`, so its other fields cannot be trusted.

    The field `database` identifies the session's database. If the field is "", the
    receiver does not check from which database the message comes. The field is "" on
    SQLite, in messages with the oracle "arrival", in messages that are not signed, and
    in messages of an earlier release.
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
        headers, trusted = delivery.headers if signed is None else signed, signed or {}
        try:
            using = headers[USING]
            if using not in connections:
                raise ValueError(f"there is no database {using!r}")
            return cls(
                id=str(uuid.UUID(headers[wire.MESSAGE_ID])),
                session_id=uuid.UUID(headers[SESSION]),
                using=using,
                oracle="" if signed is None else headers[ORACLE],
                transaction=trusted.get(TRANSACTION, ""),
                joined_until=wire.parse_instant(trusted[JOINED_UNTIL])
                if JOINED_UNTIL in trusted
                else None,
                database=trusted.get(DATABASE, ""),
                signed=signed is not None,
                sent_at=wire.parse_instant(headers[wire.CREATED]),
                headers=trusted,
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
        optional = {TRANSACTION: self.transaction, DATABASE: self.database}
        signed |= {name: value for name, value in optional.items() if value}
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
        """For how many more seconds the session must be checked. The number is only
        approximate, because the sender's clock and this process's clock may differ."""
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


def announce(
    using: str,
    session_id: uuid.UUID,
    metadata: Mapping[str, str],
    transaction: str | None,
) -> None:
    """Send the control message of a session that is about to commit. `transaction` is
    the id of the session's transaction, if known.

    Raises BrokerError if the message cannot be sent. Raises CommitTimedOut if the
    receiver has already given up the session, which must then roll back.
    """
    settings = conf.get().HTTP
    if settings.CONTROL_MESSAGE == "off":
        return
    channel, connection = control_channel(), connections[using]
    if in_testcase(connection):
        return
    mark, vendor = "", connection.vendor
    if channel.broker.stored_in == using:
        # The broker's tables are in this very transaction.
        kind = "arrival"
    elif settings.CONTROL_MESSAGE_ORACLE == "auto" and vendor == "postgresql":
        kind = "transaction"
        mark = transaction or database_identity.transaction_id(connection)
    else:
        kind = "delay"
    # Messages in the database itself are visible to this session only.
    database = "" if kind == "arrival" else database_identity.current(using)
    send(
        ControlMessage(
            str(new_id()),
            session_id,
            using,
            kind,
            transaction=mark,
            database=database,
            headers=metadata,
        )
    )
    if kind == "delay":
        _leave_a_record(using, session_id)


def send(control: ControlMessage) -> None:
    """Send the control message to the broker, and report the result with the signal
    `control_message_sent`. Raises BrokerError if the broker does not confirm the
    message."""
    began = time.monotonic()
    error: BrokerError | None = None
    try:
        control_channel().send(control.outgoing())
    except BrokerError as caught:
        error = caught
    signals.control_message_sent.send_robust(
        sender=None,
        session_id=control.session_id,
        using=control.using,
        outcome="failed" if error else "sent",
        duration=time.monotonic() - began,
        error=error,
    )
    if error is not None:
        raise error


def _leave_a_record(using: str, session_id: uuid.UUID) -> None:
    if not SessionRecord.objects.db_manager(using).commit(session_id):
        raise CommitTimedOut(
            f"Session {session_id} on database {using!r} took longer than "
            f'TXMSG["HTTP"]["MAX_COMMIT_DURATION"] = '
            f"{conf.get().HTTP.MAX_COMMIT_DURATION:g} s from its control message to "
            f"its commit, and was given up. It was rolled back: nothing was stored and "
            f"nothing is sent. If this recurs, raise that setting."
        )
