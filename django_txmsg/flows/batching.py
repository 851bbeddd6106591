"""`batch()` sends a group of messages. When stages have processed all of them, one more
message is sent.

Each batch is a run of this package's flow `Batches`. So deadlines, cancelling and
retention work the same as for other runs.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction

from .. import conf, wire
from ..envelope.message import check_destination
from ..errors import ConfigurationError, InvalidMessage
from ..models import Batch, Run
from ..models.run import WaitsFor
from ..sending.destination import Destination
from ..sending.outbox import Encoded, encoded
from . import joining
from .sending import identify, insist_on_one_transaction
from .values import BatchEnded


def batch(
    messages: Iterable[Mapping[str, Any]],
    *,
    then: str | Destination[BatchEnded, Any],
    enough: int | None = None,
    within: dt.timedelta | None = None,
) -> Batch:
    """Store messages in the caller's transaction. Each message is a dict of
    send_message()'s arguments. The batch ends when every message was processed or given
    up, when `enough` messages were processed, or after the time `within` (None: no
    deadline). Then `BatchEnded` is sent to `then`.

    The `progress` of the returned row counts the messages by outcome. The messages must
    go to stages. The result of a stage is the answer to its message, and the batch's
    rows keep the answers.

    Raises TransactionRequired outside a transaction. Raises InvalidMessage for a
    message that cannot be sent, or that has `unique` or `expires`. Raises
    ConfigurationError if `enough` is larger than the number of messages. Raises
    FlowError in a stage whose messages are not stored in its transaction.
    """
    if not conf.get().FLOWS.BATCHES:
        raise ConfigurationError(
            'batch() needs TXMSG["FLOWS"] = {"BATCHES": True}, in every process of '
            "this service: it declares the stage that takes the answers."
        )
    from .batches import Batches

    declared = Batches._declaration
    insist_on_one_transaction(declared.using, declared.steps_name)
    given = [dict(one) for one in messages]
    if any(one.get("unique") or one.get("expires") is not None for one in given):
        raise InvalidMessage(
            "A message of a flow batch has neither unique=, since one that is pending "
            "already answers to no batch, nor expires=, since an expired one never "
            "answers: give the batch a deadline, within=."
        )

    def content() -> tuple[object, ...]:
        bodies = [encoded(one.get("destination"), one.get("body")) for one in given]
        places = [(str(one.get("destination")), one.get("key")) for one in given]
        headers = [sorted((one.get("headers") or {}).items()) for one in given]
        for one, (body, content_type, name) in zip(given, bodies, strict=True):
            if "body" in one and content_type == wire.JSON:
                one["body"] = Encoded(body, name)  # each body is encoded once
        return declared.name, str(then), places, headers, bodies

    run_id, known = identify(declared.using, content, len(given) or 1)
    if known is not None:
        return Batch.objects.using(declared.using).get(run=known)
    run = Run(
        run_id=run_id,
        service=conf.get().SERVICE,
        flow=declared.name,
        version=declared.version,
        state=declared.encode(Batches()),
        caller={wire.REPLY_TO: check_destination(str(then))},
        first_run=run_id,
        correlation_id=str(run_id),
    )
    turn = uuid.uuid4()
    run.wait(WaitsFor.JOIN, "ended", turn=turn, within=within)
    of_run = {wire.CORRELATION_ID: run.correlation_id}
    stamped = [
        {**one, "headers": {**of_run, **(one.get("headers") or {})}} for one in given
    ]
    headers = {wire.FLOW: str(run_id)}
    with transaction.atomic(using=declared.using):
        run.save(using=declared.using, force_insert=True)
        stored, _ = joining.store(declared, run, turn, stamped, headers, enough)
    return stored
