"""Joins: a run sends many requests together, and after their answers a single message
continues the run.

Each answer is written to its branch in a transaction of its own, which does not lock
the run. If the answer may be the last, the transaction also stores a message to the
run. That message ends the join if all answers have arrived. The deadline ends the join
in any case.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import codecs, wire
from ..envelope.message import Message
from ..envelope.typed_body import BodyReader
from ..errors import ConfigurationError, DecodeError
from ..models import Batch, Branch, OutboxMessage, Run
from ..sending.answering import hop
from ..sending.outbox import send_parts
from ..sending.pending import reschedule_message
from . import undos
from .declaration import Declaration, Step
from .undos import AT_ONCE
from .unread import Unread
from .values import OURS, Answers, TimedOut

#: The end of a branch's ticket: its number, and that of the request that its answer
#: lets leave, if any. Or the undo that the answer to a cancel lets leave.
_BRANCH = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?|u([0-9a-f]{32})")


class StoredAnswers(Answers[Any]):
    """The answers of a batch, read from the batch's rows. Raises DecodeError if the
    code has changed and cannot read an older answer."""

    def __init__(self, batch: Batch, reader: BodyReader | None) -> None:
        self._batch, self._reader = batch, reader

    def __len__(self) -> int:
        return self._batch.total

    def __iter__(self) -> Iterator[Any]:
        rows = self._batch.rows().order_by("number")
        for first in range(0, len(self), AT_ONCE):
            yield from map(self._value, rows[first : first + AT_ONCE])

    def _value(self, row: Branch) -> Any:
        if row.left:
            return TimedOut()
        body = Unread(bytes(row.answer), row.content_type, row.answer_type or None)
        if row.failed:
            return body.read(codecs.reader(OURS[body.type]))
        return None if self._reader is None else body.read(self._reader)


def check_enough(enough: int | None, total: int) -> int:
    """Return the number of answers that ends a join, by default `total`. Raises
    ConfigurationError if `enough` is larger than `total` or not positive."""
    if enough is None:
        return total
    if isinstance(enough, bool) or not 1 <= enough <= total:
        raise ConfigurationError(
            f"enough={enough!r} of {total} requests: it is at least 1, and at most as "
            f"many as there are."
        )
    return enough


def store(
    declared: Declaration,
    run: Run,
    turn: uuid.UUID,
    messages: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    enough: int | None,
    at_once: int = 0,
) -> tuple[Batch, list[uuid.UUID]]:
    """Store a batch and its requests. The run will wait for the batch under `turn`.
    Each request is a dict of the arguments of `send_message()`. Returns the batch and
    the ids of the requests.

    With `at_once`, only that many requests are sent now, and the others are held back.
    The answer to each request releases the request that comes `at_once` places later.
    """
    using, broker = declared.using, declared.broker
    least = check_enough(enough, len(messages))
    back, address = {wire.REPLY_TO: declared.steps_name}, wire.ticket(run.run_id, turn)

    def branch(number: int) -> str:
        following = number + at_once
        held = at_once > 0 and following < len(messages)
        return f"{number}-{following}" if held else str(number)

    batch = Batch.objects.using(using).create(
        run=run, turn=turn, total=len(messages), enough=least
    )
    ids: list[uuid.UUID] = []
    for first in range(0, len(messages), AT_ONCE):
        sent = send_parts(
            [
                (one, {**headers, **back, wire.TICKET: f"{address}/{branch(number)}"})
                for number, one in enumerate(messages[first : first + AT_ONCE], first)
            ],
            using=using,
            broker=broker,
        )
        Branch.objects.using(using).bulk_create(
            [
                Branch(
                    batch=batch,
                    number=number,
                    destination=one.destination,
                    request_id=one.id,
                )
                for number, one in enumerate(sent, first)
            ]
        )
        ids += [one.id for one in sent]
    if not messages:
        declared.continue_run(run, turn, None, headers)
    return batch, ids


def answered(
    declared: Declaration, message: Message, turn: uuid.UUID, branch: str
) -> bool:
    """Write an answer to its branch, and continue the run if this answer may be the
    last. Returns False if the answer is late or a duplicate.

    Raises DecodeError if the step cannot read the answer. The branch then stays open.
    """
    body, found = message.body, _BRANCH.fullmatch(branch)
    if found is None:
        raise DecodeError("ticket", "it names no branch")
    if found[3]:
        return _release_undo(uuid.UUID(found[3]), message, declared.using)
    batches = Batch.objects.using(declared.using).select_related("run")
    batch = batches.filter(turn=turn, run__turn=turn).first()
    if batch is None:
        return False
    if body.type == "txmsg.Buried":
        _let_leave(batch, found)
        return True
    run, step = batch.run, declared.step(batch.run.step)
    failed = body.type in OURS and not step.reads(body.type)
    if not failed and not step.takes_nothing:
        body.read(step.reader, run.reads)
    request_id = batch.record(
        int(found[1]), body.body, body.content_type, body.header or "", failed=failed
    )
    if request_id is None:
        return False
    if body.type != "txmsg.Dead":
        undos.note_answer(run, request_id)
    _let_leave(batch, found)
    if batch.may_have_ended():
        following = {wire.HOP: str(hop(message.conversation))}
        declared.continue_run(run, turn, None, following)
    return True


def _let_leave(batch: Batch, branch: re.Match[str]) -> None:
    """Release the held-back request that the end of this branch releases, if any. If
    that request was cancelled, release the next one in its place, and so on. The `Dead`
    of a request that was cancelled while it was held back releases none."""
    if branch[2] is None:
        return
    first, rows = int(branch[2]), batch.rows()
    stored = OutboxMessage.objects.using(rows.db).filter(cancelled_at__isnull=False)
    for number in range(first, batch.total, max(1, first - int(branch[1]))):
        held = rows.get(number=number)
        if _release(held.request_id, rows.db):
            return
        # Before its `Dead` arrives, only its row says so. Later, the row may be pruned.
        cancelled = stored.filter(message_id=held.request_id)
        if held.answered_at is None and not cancelled.exists():
            return


def _release_undo(undo: uuid.UUID, answer: Message, using: str) -> bool:
    """Release the held-back undo that the answer to a cancel names. Returns False if
    the message with this id is not an undo of the same conversation: anyone can send
    an answer, and may name any message."""
    stored = OutboxMessage.objects.using(using).filter(message_id=undo)
    headers = stored.values_list("headers", flat=True).first() or {}
    of = headers.get(wire.FLOW)
    ours = wire.UNDOES in headers and of == answer.conversation.get(wire.FLOW)
    return ours and _release(undo, using)


def _release(message_id: uuid.UUID, using: str) -> bool:
    return reschedule_message(message_id, delay=dt.timedelta(0), using=using)


def leave(declared: Declaration, run: Run) -> Iterator[list[uuid.UUID]]:
    """Close the join for which a run waits. Return the ids of its requests without an
    answer, as `_unanswered()` does.

    An answer locks its branch, then the undos of its request, then the request that it
    releases. So the join is closed before the run cancels requests or deletes undos:
    else there would be deadlocks on PostgreSQL.
    """
    batch = _batch_of(declared, run)
    batch.close()
    return _unanswered(batch)


def _batch_of(declared: Declaration, run: Run) -> Batch:
    assert run.turn is not None  # it waits
    return Batch.objects.using(declared.using).get(turn=run.turn)


def _unanswered(batch: Batch) -> Iterator[list[uuid.UUID]]:
    """Yield the ids of a closed batch's requests without an answer, in lists of at most
    AT_ONCE, the list of the last ones first."""
    left = batch.rows().filter(left=True)
    for first in reversed(range(0, batch.total, AT_ONCE)):
        page = left.filter(number__gte=first, number__lt=first + AT_ONCE)
        yield list(page.values_list("request_id", flat=True))


def ended(
    declared: Declaration,
    run: Run,
    step: Step,
    headers: Mapping[str, str],
    *,
    timed_out: bool,
) -> Answers[Any] | None:
    """Close the join for which a run waits, send the undos of the requests without an
    answer, and return the answers. The run does not wait for these undos.

    Changes nothing and returns None if the join must still wait for an answer. This
    happens if the transaction that stored an answer was rolled back. That answer will
    be redelivered.
    """
    batch = _batch_of(declared, run)
    if not timed_out and not batch.has_ended():
        return None
    batch.close()
    for page in _unanswered(batch) if run.undos else ():
        undos.send_left(declared, run, page, headers)
    return StoredAnswers(batch, None if step.takes_nothing else step.reader)
