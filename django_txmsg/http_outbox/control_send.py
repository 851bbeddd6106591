"""Step 3 of an HTTP request: a session sends a control message before it commits.

The session's own service receives the message, and checks whether the session's
messages were dispatched. If the process dies right after the commit, the receiver
(`control_receive.py`) dispatches them.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from collections.abc import Mapping

from django.db import connections

from .. import conf, signals
from ..django_internals import in_testcase
from ..envelope.message import new_id
from ..errors import BrokerError, CommitTimedOut
from ..models import SessionRecord
from . import database_identity
from .control_connection import control_channel
from .control_message import ControlMessage

log = logging.getLogger("django_txmsg.control")


def announce(
    using: str,
    session_id: uuid.UUID,
    metadata: Mapping[str, str] | None = None,
    transaction: str | None = None,
) -> None:
    """Send the control message of a session that is about to commit. `transaction` is
    the id of the session's transaction, if known.

    Raises BrokerError if the message cannot be sent and the setting ON_CONTROL_FAILURE
    is "fail". Raises CommitTimedOut if the receiver has already given up the session.
    The session must then roll back.
    """
    settings = conf.get().HTTP
    if settings.CONTROL_MESSAGE == "off":
        return
    channel, connection = control_channel(), connections[using]
    if in_testcase(connection):
        return
    mark = ""
    if channel.broker.stored_in == using:
        # The broker's tables are in this very transaction.
        kind = "arrival"
    elif settings.CONTROL_MESSAGE_ORACLE == "auto" and database_identity.can_tell(
        connection
    ):
        kind = "transaction"
        mark = transaction or database_identity.transaction_id(connection)
    else:
        kind = "delay"
    # Messages in the database itself are visible to this session only.
    database = "" if kind == "arrival" else database_identity.current(using)
    try:
        send(
            control_message(using, session_id, kind, mark, metadata, database=database)
        )
    except BrokerError as error:
        # A failed INSERT has aborted the transaction that it shares.
        if settings.ON_CONTROL_FAILURE == "fail" or kind == "arrival":
            raise
        log.info("session %s commits without a control message: %s", session_id, error)
    else:
        if kind == "delay":
            _leave_a_record(using, session_id)


def control_message(
    using: str,
    session_id: uuid.UUID,
    oracle: str,
    transaction: str = "",
    metadata: Mapping[str, str] | None = None,
    joined_until: dt.datetime | None = None,
    database: str = "",
) -> ControlMessage:
    """Return a control message with a new id."""
    return ControlMessage(
        id=str(new_id()),
        session_id=session_id,
        using=using,
        oracle=oracle,
        transaction=transaction,
        joined_until=joined_until,
        database=database,
        headers=dict(metadata or {}),
    )


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
