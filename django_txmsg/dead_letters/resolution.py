"""The operators' actions on dead letters, one locked batch at a time.

`bulk.py` selects and locks the batches, for the admin and for `manage.py dead_letters`.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import router, transaction
from django.db.models.functions import Now

from .. import conf, wire
from ..envelope import serializers
from ..envelope.message import carried, check_headers, new_id
from ..errors import InvalidMessage, TxmsgError
from ..models import (
    BulkOperation,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    Run,
    StopRequest,
    Worker,
)
from ..models.dead_letter import Resolution
from ..models.fields import KEY_LENGTH, clock
from ..models.outbox_store import NewMessage
from ..models.run import WaitsFor
from ..models.turn import Turn
from ..models.worker import living
from ..rules.dead_letters import BODY_TOO_LONG, GONE_ON, TAKEN_IN
from ..rules.outbox import REDELIVERED
from ..sending import answering, storing, undoing
from ..stages import all_stages, consumers
from . import burial, resuming


@dataclass
class Tally:
    """The result of an action: how many dead letters it changed, and why it skipped
    others. `skipped` maps the id of a dead letter to the reason."""

    done: int = 0
    skipped: dict[int, str] = field(default_factory=dict)


def redeliver(
    operation: BulkOperation, batch: list[DeadLetter], tally: Tally, using: str
) -> None:
    """Redeliver open dead letters that the caller's transaction has locked.
    `operation` is the bulk operation that does this. With its `force`, messages that a
    stage has processed are redelivered too, and those whose body was cut.

    A stage's dead letter is parked in the stage's inbox again, and is due immediately.
    So only that stage gets the message, and no broker is needed. But if the stage does
    not park its messages in this database (`_stages_here()`), the dead letter is stored
    in the outbox instead, and its inbox row is deleted. A relay's dead letter is always
    stored in the outbox.
    """
    inbox, force = InboxMessage.objects.using(using), operation.force
    known = _known(batch, using)
    here = _stages_here(using, batch)
    parked, sent, gone, ended = [], [], [], []
    now = clock(using)
    for letter in batch:
        stage, row = letter.stage, known.get((letter.message_id, letter.stage))
        if revoked := revoked_why(letter, known.get(_place(letter)), now):
            tally.skipped[letter.pk] = revoked
            gone.append(letter)
        elif row is not None and row.processed_at is not None and not force:
            tally.skipped[letter.pk] = (
                f"stage {stage!r} has processed message {letter.message_id} in the "
                f"meantime"
            )
        elif letter.reason == BODY_TOO_LONG and not force:
            tally.skipped[letter.pk] = (
                "only the beginning of its body was kept; force sends that"
            )
        elif stage in here:
            parked.append(letter)
        elif why := _unsendable_why(letter):
            tally.skipped[letter.pk] = why
        elif not force and (why := _everyones_why(letter, using)):
            tally.skipped[letter.pk] = f"{why}; force sends it"
        else:
            sent.append(letter)
            ended += [row.pk] if row is not None else []
    if parked:
        _park_again(parked, using, force)
    if sent:
        # The stage may be gone for ever, and would leave an open row. If a worker still
        # runs it, the arrival of the message inserts a row again.
        inbox.filter(pk__in=ended, revoked_at=None).delete()
        _store_again(sent, using)
    _resolve(gone, using, Resolution.DISCARDED, GONE_ON)
    if again := [*parked, *sent]:
        # They came too late to stop the attempt that failed.
        requests = StopRequest.objects.using(using)
        requests.filter(message_id__in={one.message_id for one in again}).delete()
        tally.done += _resolve(
            again, using, Resolution.REDELIVERED, operation.by, operation=operation.pk
        )


def revoked_why(letter: DeadLetter, row: InboxMessage | None, now: dt.datetime) -> str:
    """Return why a dead letter must be closed instead of redelivered, or "".

    A dead letter is closed in two cases. The message was revoked. Or the message is a
    flow's request for which the flow does not wait any more: the request has expired,
    or the flow got `Dead` as the answer. A stage's request is revoked with that answer.
    A request that never reached a stage has no inbox row that says so, and the row of
    another request may be pruned before the dead letter.
    """
    until = wire.expires(wire.conversation(letter.headers))
    discarded = letter.asks and letter.resolution == Resolution.DISCARDED
    gone_on = (until is not None and until <= now) or letter.given_up
    gone_on |= (row is None and discarded) or letter.resolved_by == GONE_ON
    if not gone_on and (row is None or row.revoked_at is None):
        return ""
    return (
        f"message {letter.message_id} is revoked: the flow that sent it has gone on "
        f"without it, and would not undo it"
    )


def _unsendable_why(letter: DeadLetter) -> str:
    """Return why no relay would send a dead letter that is stored again, or ""."""
    if letter.broker in conf.get().BROKERS:
        return ""
    if _sender(letter) not in conf.get().services:
        return ""  # another service, whose brokers are not known here
    return (
        f'the broker {letter.broker!r} is not in TXMSG["BROKERS"], so no relay would '
        f"send the message. Add the broker again, or discard the message"
    )


def _everyones_why(letter: DeadLetter, using: str) -> str:
    """Return why a dead letter that no stage here can park must not be sent, or "". To
    a topic, a relay sends only the messages that it has not sent before."""
    if not wire.is_topic(letter.destination):
        return ""
    if letter.stage:
        why = f"stage {letter.stage!r} is not declared here for database {using!r}"
        do = "Declare the stage again, with its name=, or discard"
    elif letter.reason in TAKEN_IN:
        why = "the broker does not report whose copy this is"
        do = "Discard"
    else:
        return ""
    return (
        f"{why}, and if sent to {letter.destination!r} the message would reach "
        f"every subscriber. {do} the message"
    )


def _place(letter: DeadLetter) -> tuple[uuid.UUID, str]:
    """Return the message id and the stage of the inbox row that revokes a dead letter.
    The first message of a run that a relay has buried is revoked at the flow's stage,
    whose name is the destination."""
    return letter.message_id, letter.stage or letter.destination


def _known(
    batch: list[DeadLetter], using: str
) -> dict[tuple[uuid.UUID, str], InboxMessage]:
    """Return the inbox rows of dead letters, by message id and stage. Waits for workers
    that are processing such a message."""
    inbox = InboxMessage.objects.using(using)
    inbox = inbox.only("message_id", "stage", "processed_at", "dead_at", "revoked_at")
    pairs = set(map(_place, batch))
    known = {
        (row.message_id, row.stage): row
        for row in inbox.filter(message_id__in={mid for mid, _ in pairs})
        if (row.message_id, row.stage) in pairs
    }
    # A worker may be processing a copy of what was buried unread: wait for its end.
    in_hand = [
        row.pk for row in known.values() if not (row.dead_at or row.processed_at)
    ]
    if in_hand:
        rows = inbox.filter(pk__in=in_hand).order_by("pk").select_for_update()
        known |= {(row.message_id, row.stage): row for row in rows}
    return known


def _stages_here(using: str, batch: Iterable[DeadLetter]) -> set[str]:
    """Return the names of the stages that park their messages in this database: the
    stages that this service declares for this database, and the undeclared stages that
    run in a live worker. If this service declares every stage of `batch`, return only
    the declared stages, without a query for the workers."""
    declared = {one.name: one.definition.using for one in all_stages()}
    here = {name for name, alias in declared.items() if alias == using}
    if all(one.stage in declared for one in batch if one.stage):
        return here
    workers = Worker.objects.using(router.db_for_write(Worker)).filter(living())
    served = {
        name for names in workers.values_list("stages", flat=True) for name in names
    }
    return here | (served - declared.keys())


def discard(
    operation: BulkOperation, batch: list[DeadLetter], tally: Tally, using: str
) -> None:
    """Discard open dead letters that the caller's transaction has locked. An undo in
    doubt that is discarded counts as done: its flow continues. If its stage is not
    declared here, it is skipped, unless the `operation` has `force`. A run that
    `start()` has stored is cancelled if its first message is discarded: nothing else
    would ever continue or end the run. A run whose resume() is discarded can be resumed
    again."""
    undone = {
        one.pk: _undone_by(one) for one in batch if one.reason == undoing.IN_DOUBT
    }
    tally.skipped |= {
        one.pk: f"this service does not declare stage {one.stage!r}, so it cannot "
        "revoke the request that the undo reverses: discard the undo in the service "
        "of that stage; or, if the stage is gone, with `dead_letters discard --force`"
        for one in batch
        if undone.get(one.pk, []) is None and not operation.force
    }
    resumed = resuming.waiting_runs(batch, using)
    tally.skipped |= {
        pk: "its run is busy: try again" for pk, run in resumed.items() if run is None
    }
    batch = [one for one in batch if one.pk not in tally.skipped]
    if not operation.force:
        overtaking = _overtaking(batch, using)
        tally.skipped |= overtaking
        batch = [one for one in batch if one.pk not in overtaking]
    tally.done += _resolve(
        batch, using, Resolution.DISCARDED, operation.by, operation=operation.pk
    )
    starting = Run.objects.using(using).filter(waits_for=WaitsFor.START)
    ids = {one.pk: wire.original_id(one.message_id, one.headers) for one in batch}
    runs = {run.run_id: run for run in starting.filter(run_id__in=ids.values())}
    for one in batch:
        if one.pk in undone:
            undoing.confirm(one, undone[one.pk] or [], using)
        elif run := runs.get(ids[one.pk]):
            InboxMessage.objects.db_manager(using).revoke(run.flow, one.message_id)
            undoing.cancel(run, "discarded", using, one.broker)
        else:
            answering.answer_dead(one, "discarded", using=using)
    resuming.let_resume_again(batch, resumed, using)
    unburied = [one.message_id for one in batch if not one.stage]
    OutboxMessage.objects.db_manager(using).give_up(unburied)
    order = InboxMessage.order.db_manager(using)
    ordered = {one.name for one in all_stages() if one.ordered}
    for stage in ordered & {one.stage for one in batch}:
        order.wake(stage, [one.message_id for one in batch if one.stage == stage])


def _overtaking(batch: list[DeadLetter], using: str) -> dict[int, str]:
    """Return the dead letters that were buried unread, and whose predecessor still
    blocks its followers and is not discarded with them, each with the reason to skip
    it. If they were discarded, the messages behind them would overtake the
    predecessor."""
    blocking = {one.name for one in all_stages() if one.ordered == "block"}
    order = InboxMessage.order.db_manager(using)
    going = {(one.message_id, one.stage) for one in batch}
    found: dict[int, str] = {}
    unread = [
        (after, one)
        for one in batch
        if one.reason == burial.REASON and one.stage in blocking
        if (after := wire.after(one.headers))
    ]
    for (before, at), one in sorted(unread, key=lambda pair: pair[0][1]):
        if (before, one.stage) in going:
            continue
        row = order.filter(message_id=before, stage=one.stage)
        turn = Turn(one.stage, "", False, before, at)
        if row.exists() and not order.has_come(turn):
            found[one.pk] = f"first resolve the message before it in its key, {before}"
            going.discard((one.message_id, one.stage))
    return found


def _undone_by(undo: DeadLetter) -> list[str] | None:
    """Return the stages whose work an undo reverses. Return None if this service does
    not declare the undo's stage."""
    for one in all_stages():
        if one.name == undo.stage and one.undoes is not None:
            return consumers(one.undoes, one.broker)
    return None


def restore(
    operation: BulkOperation, batch: list[DeadLetter], tally: Tally, using: str
) -> None:
    """Reopen discarded dead letters that the caller's transaction has locked. Skips
    revoked messages, because no stage processes them any more, and the message of a
    resume() whose run was resumed again. Records the operation, so that operations that
    were requested before leave the dead letters alone."""
    known, kept, now = _known(batch, using), [], clock(using)
    resumed = resuming.waiting_runs(batch, using)
    for letter in batch:
        if revoked := revoked_why(letter, known.get(_place(letter)), now):
            tally.skipped[letter.pk] = revoked
        elif not resuming.resumes(letter, resumed, now, using):
            tally.skipped[letter.pk] = "the run was resumed again, or continues now"
        else:
            kept.append(letter.pk)
    tally.done += (
        DeadLetter.objects.using(using)
        .filter(pk__in=kept, resolution=Resolution.DISCARDED)
        .update(
            resolution=Resolution.OPEN,
            resolved_at=None,
            resolved_by="",
            operation=operation.pk,
        )
    )


def redeliver_copy(
    letter: DeadLetter, *, headers: Mapping[str, str], body: bytes, by: str = ""
) -> uuid.UUID:
    """Send an edited copy of a dead letter, and close the dead letter. Returns the
    copy's id.

    The copy of a stage's dead letter has a new id, which the dead letter records. Other
    copies keep the message's id: messages of its key may wait for this id, and an undo
    revokes a request by this id. An expired message was never sent, so its copy has a
    new id, too.

    Raises InvalidMessage if a header cannot be sent or a JSON body cannot be parsed.
    Raises TxmsgError if the dead letter is no longer open, if its message is revoked,
    if the copy would reach every subscriber of a topic, or if the settings do not name
    its broker.
    """
    using = letter._state.db or "default"
    content_type = letter.content_type or wire.BYTES
    try:
        serializers.decode(body, content_type)
    except TxmsgError as error:
        raise InvalidMessage(
            f"The edited body is not valid {content_type}: {error}"
        ) from error
    same = not letter.stage and letter.reason != "expired"
    first = wire.original_id(letter.message_id, letter.headers)
    original = {} if same else {wire.COPY_OF: str(first)}
    copy = NewMessage(
        message_id=letter.message_id if same else new_id(),
        replay_id=_replay_id(letter) if same else "",
        broker=letter.broker,
        destination=letter.destination,
        key=_key(letter),
        correlation_id=letter.correlation_id,
        headers=_copied_headers(letter, headers) | original,
        content_type=content_type,
        body=body,
        service=_sender(letter),
    )
    with transaction.atomic(using=using):
        resolution = Resolution.REDELIVERED if same else Resolution.REPLACED
        other_id = None if same else copy.message_id
        if not _resolve([letter], using, resolution, by, replaced_by=other_id):
            raise TxmsgError(f"Dead letter {letter.pk} is not open any more.")
        row = _known([letter], using).get(_place(letter))
        if revoked := revoked_why(letter, row, clock(using)):
            raise TxmsgError(f"No copy was sent: {revoked}.")
        if letter.stage in _stages_here(using, [letter]):
            _park_copy(letter, copy, using)
            InboxMessage.order.db_manager(using).wait_for_copy(
                letter.stage, letter.message_id, copy.message_id
            )
        elif why := _unsendable_why(letter) or _everyones_why(letter, using):
            raise TxmsgError(f"No copy was sent: {why}.")
        else:
            storing.store([copy], using)
    return copy.message_id


def _park_again(letters: list[DeadLetter], using: str, force: bool) -> None:
    """Park dead letters again, without two headers. The link to the predecessor is
    removed, because the message's turn had come before the message died. Only a message
    that was buried unread keeps the link: its predecessor may be a dead letter, too.
    The expiry is removed, because an operator decided to redeliver the message. Only a
    flow's request keeps its expiry."""

    def passed(letter: DeadLetter) -> tuple[str, ...]:
        unread = letter.reason == burial.REASON
        return (wire.EXPIRES,) if unread else (wire.EXPIRES, wire.AFTER)

    DeadLetter.objects.db_manager(using).park_again(
        [
            {
                "id": one.pk,
                "headers": {
                    k: v for k, v in one.headers.items() if k not in passed(one)
                }
                | wire.conversation(one.headers),
                "service": one.headers.get(wire.SERVICE, "")[:255],
            }
            for one in letters
        ],
        force=force,
    )


def _park_copy(letter: DeadLetter, copy: NewMessage, using: str) -> None:
    """Park the copy at the stage, so that only this stage gets it. A copy sent to a
    topic would reach the other subscribers, too."""
    kept = (wire.SERVICE, wire.CREATED, wire.KEY, wire.CORRELATION_ID, wire.TYPE)
    headers = {name: letter.headers[name] for name in kept if name in letter.headers}
    headers |= {**copy.headers, wire.CONTENT_TYPE: copy.content_type}
    InboxMessage.objects.using(using).create(
        stage=letter.stage,
        message_id=copy.message_id,
        destination=letter.destination,
        correlation_id=letter.correlation_id,
        service=letter.headers.get(wire.SERVICE, "")[:255],
        created_at=letter.message_created_at,
        due_at=Now(),
        headers=headers,
        body=copy.body,
    )


def _store_again(letters: list[DeadLetter], using: str) -> None:
    """Insert dead letters into the outbox, with the same message ids. One statement
    copies them, so that large bodies do not pass through Python."""
    stored = DeadLetter.objects.db_manager(using).store_again(
        [
            {
                "id": one.pk,
                "key": _key(one),
                "headers": wire.of_a_copy(one.headers),
                "replay_id": _replay_id(one),
                "service": _sender(one),
            }
            for one in letters
        ]
    )
    by_message = {one.message_id: one for one in letters}
    by_broker: dict[str, dict[int, uuid.UUID]] = {}
    for pk, message_id in stored:
        by_broker.setdefault(by_message[message_id].broker, {})[pk] = message_id
    for broker, rows in by_broker.items():
        storing.after_commit(using, broker, new=rows)


def _replay_id(letter: DeadLetter) -> str:
    """Return a text that only the outbox row of this redelivery has."""
    return f"{REDELIVERED}{letter.pk}-{letter.deaths}"


def _key(letter: DeadLetter) -> str:
    """Return the message's key as the outbox can have it: the key of a foreign message
    may be too long."""
    return carried(letter.headers.get(wire.KEY, ""), KEY_LENGTH)


def _sender(letter: DeadLetter) -> str:
    """Return the service whose relay must send the message again.

    A relay's dead letter is sent by the service that stored the message, because that
    service has the broker. All other dead letters are sent by this service: any service
    may have stored the message, and its relay may not read this database.
    """
    ours = letter.stage or letter.reason in TAKEN_IN
    stored = "" if ours else letter.headers.get(wire.SERVICE, "")
    return stored[:100] or conf.get().SERVICE


def _copied_headers(letter: DeadLetter, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an edited copy: the edited headers, and the headers that an
    operator cannot edit (the type of the body, the conversation, and the link to the
    predecessor, unless the message's turn has come at a stage)."""
    kept = wire.conversation(letter.headers)
    came = letter.stage and letter.reason != burial.REASON
    for name in (wire.TYPE,) if came else (wire.TYPE, wire.AFTER):
        if name in letter.headers:
            kept[name] = letter.headers[name]
    given = check_headers(wire.senders(headers))
    given.pop(wire.CORRELATION_ID, None)  # a column of its own
    return given | kept


def _resolve(
    batch: Iterable[DeadLetter],
    using: str,
    resolution: Resolution,
    by: str,
    **more: Any,
) -> int:
    return (
        DeadLetter.objects.using(using)
        .filter(pk__in=[one.pk for one in batch], resolution=Resolution.OPEN)
        .update(resolution=resolution, resolved_at=Now(), resolved_by=by[:255], **more)
    )
