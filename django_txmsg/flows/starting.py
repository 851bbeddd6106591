"""Starts runs of flows, and batches.

`start()` starts a run in the caller's transaction. `ask()` and `aask()` start a run in
a separate transaction, and wait for the run's answer, for example in a view. If the
caller stops waiting, the run continues. `FlowView` returns a run as JSON, for a web
page that waits for the run.

`batch()` sends a group of messages. When stages have processed all of them, one more
message is sent. Each batch is a run of this package's flow `Batches`. So deadlines,
cancelling and retention work the same as for other runs.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections, models, transaction
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.views import View

from .. import codecs, conf, wire
from ..django_internals import in_block
from ..envelope.message import check_destination, check_key
from ..errors import AlreadyRunning, ConfigurationError, FlowError, InvalidMessage
from ..models import Batch, Run
from ..models.run import Outcome, WaitsFor
from ..sending.destination import Destination
from ..sending.outbox import Encoded, destination_name, encoded
from ..sending.scope import current_scope
from . import joining
from .flow import Flow
from .sending import identify, insist_on_one_transaction
from .unread import Unread
from .values import OURS, BatchEnded, Cancelled, Dead, TimedOut

In = TypeVar("In")
Out = TypeVar("Out")

#: Seconds between two queries of the run: at first, and at most.
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

#: The longest `?wait=`, in seconds.
MAX_WAIT = 30.0


def start(
    flow: type[Flow[In, Any]],
    body: In,
    *,
    key: str | None = None,
    on_conflict: Literal["error", "skip"] = "error",
    answer_to: str | None = None,
) -> Run:
    """Store a run and its first message in the open transaction, and return the run's
    row. The run starts only if that transaction commits.

    Only one run of a `key` is open at a time. If a run of this `key` is open,
    `on_conflict="skip"` returns that run and stores nothing. The answer is sent to the
    destination `answer_to`. If an earlier attempt of the stage has committed this run,
    this function returns that run.

    Raises AlreadyRunning if a run of this `key` is open, TransactionRequired outside a
    transaction, and InvalidMessage for a body of another type. Raises FlowError in a
    stage whose `transaction` is not "outbox", except inside an outbox session. At
    REPEATABLE READ or SERIALIZABLE, raises FlowError if the open run was committed
    after this transaction began: repeat the transaction.
    """
    if on_conflict not in ("error", "skip"):
        raise ConfigurationError(
            f'on_conflict={on_conflict!r} is neither "error" nor "skip".'
        )
    declared = flow._declaration
    using = declared.using
    insist_on_one_transaction(using, declared.name)
    caller = {} if answer_to is None else {wire.REPLY_TO: check_destination(answer_to)}
    run = declared.new_run(key=check_key(key), caller=caller)
    run.run_id, known = identify(
        declared,
        lambda: (declared.name, run.key, caller, encoded(declared.destination, body)),
    )
    if known is not None:
        return known
    run.first_run = run.run_id
    open_runs = Run.objects.using(using).filter(
        service__in=conf.get().services, flow=run.flow, key=run.key, ended_at=None
    )
    # The database keeps keys unique only within one name of the service.
    renamed = run.key and conf.get().FORMER_SERVICES
    found: Run | None = open_runs.first() if renamed else None
    for again in () if found else (True, True, False):
        try:
            with transaction.atomic(using=using):
                message = declared.send(
                    body, {}, to=declared.destination, message_id=run.run_id
                )
                run.correlation_id = message.correlation_id or str(message.id)
                run.save(using=using, force_insert=True)
                return run
        except IntegrityError as error:
            if not run.key:
                raise
            found = open_runs.first()
            if found is not None:
                break
            if not again:  # else the run that was open has ended meanwhile
                raise FlowError(
                    f"A run of {declared.name!r} with the key {key!r} was committed "
                    f"after this transaction began, which cannot see it. Repeat the "
                    f"transaction."
                ) from error
    assert found is not None
    if on_conflict == "skip":
        return found
    raise AlreadyRunning(
        f"A run of {declared.name!r} with the key {key!r} is open: {found.run_id}. "
        f'Wait for its end, use another key, or say on_conflict="skip".',
        found.run_id,
    )


def ask(
    flow: type[Flow[In, Out]],
    body: In,
    *,
    within: float | dt.timedelta,
    key: str | None = None,
) -> Out | TimedOut | Dead | Cancelled:
    """Start a run, wait for its answer, and return the answer. `within` is the longest
    time to wait, in seconds or as a timedelta.

    Raises TimeoutError if there is no answer within that time. The error has the
    `run_id` of the run, which continues. Raises FlowError inside a transaction, a stage
    or a session of the HTTP outbox, because the run's first message would be sent only
    after their end. Raises AlreadyRunning if a run of this `key` is open, and
    InvalidMessage for a body of another type.
    """
    run = _started(flow, body, key)
    if (done := awaited(run, within)) is None:
        raise _late(run)
    answer: Out | TimedOut | Dead | Cancelled = _answer(flow, done)
    return answer


async def aask(
    flow: type[Flow[In, Out]],
    body: In,
    *,
    within: float | dt.timedelta,
    key: str | None = None,
) -> Out | TimedOut | Dead | Cancelled:
    """Start a run, wait for its answer, and return the answer, like ask(). The wait
    does not block the event loop."""
    run = await sync_to_async(_started)(flow, body, key)
    for pause in _pauses(within):
        await asyncio.sleep(pause)
        if (done := await sync_to_async(ended)(run)) is not None:
            answer: Out | TimedOut | Dead | Cancelled = _answer(flow, done)
            return answer
    raise _late(run)


def _started(flow: type[Flow[In, Any]], body: In, key: str | None) -> Run:
    declared = flow._declaration
    current = current_scope()
    if current is not None or in_block(connections[declared.using]):
        where = "an open transaction"
        if current is not None:
            where = f"stage {current.stage!r}" if current.stage else "an outbox session"
        raise FlowError(
            f"ask() of {declared.name!r} would wait for itself: it was called in "
            f"{where}, and its message leaves only after that. Call it outside "
            f"atomic(), in a view under @transaction.non_atomic_requests; or use "
            f"start(), and look at the run later."
        )
    with transaction.atomic(using=declared.using):
        return start(flow, body, key=key)


def awaited(run: Run, within: float | dt.timedelta) -> Run | None:
    """Wait until a run has ended, and return what `ended()` returns. Return None if the
    run does not end in time."""
    for pause in _pauses(within):
        threading.Event().wait(pause)
        if (done := ended(run)) is not None:
            return done
    return None


def _pauses(within: float | dt.timedelta) -> Iterator[float]:
    """Yield how many seconds to wait before each query for the run's state. Stop when
    `within` has passed."""
    seconds = within.total_seconds() if isinstance(within, dt.timedelta) else within
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, LONGEST_PAUSE)


def _late(run: Run) -> TimeoutError:
    error: Any = TimeoutError(
        f"Run {run.run_id} of {run.flow!r} has no answer yet. It goes on; look at it "
        f"later."
    )
    error.run_id = run.run_id
    return cast("TimeoutError", error)


def ended(run: Run) -> Run | None:
    """Return the run if the run has ended, else None. If the run has handed over to
    another run, check and return that run instead."""
    found = latest(run)
    return None if found is None or found.ended_at is None else found


def latest(run: Run) -> Run | None:
    """Return the current row of a run. If the run has handed over to another run,
    return that run instead, or None if it is not in this database."""
    runs = Run.objects.using(run._state.db)
    found = runs.filter(run_id=run.run_id).first()
    while found is not None and found.outcome == Outcome.HANDED_OVER:
        found = runs.filter(run_id=found.request_id).first()
    return found


def _answer(flow: type[Flow[Any, Any]], run: Run) -> Any:
    """Return the answer of a run that has ended. Raises DecodeError if the answer
    cannot be read, because its type has changed since the run ended."""
    if run.answer == "null":
        return None
    body = Unread(run.answer.encode(), wire.JSON, run.answer_type or None)
    reader = codecs.reader(flow.destination.reply)
    if body.type in OURS and not any(one.name == body.type for one in reader.types):
        reader = codecs.reader(OURS[body.type])
    return body.read(reader)


class FlowView(View):
    """Answers GET with the JSON of a run: `run_id`, `key`, `step`, `waits_for`,
    `outcome` ("" while the run is open), `answer` and `answer_type` (such as
    "txmsg.TimedOut;v=1;min=1"). `?wait=20` waits up to 20 seconds for the end of the
    run. The longest wait is 30 seconds.

    Add the view to your URLs: `path("orders/<uuid:run_id>/",
    FlowView.as_view(flow=Checkout))`. Anyone who has the URL can read the answer. So
    add a mixin such as LoginRequiredMixin, and limit `runs()` to the runs of
    `self.request.user`.
    """

    flow: type[Flow[Any, Any]] | None = None

    @classmethod
    def as_view(cls, **options: Any) -> Callable[..., HttpResponseBase]:
        """Return the view function. Neither ATOMIC_REQUESTS nor OutboxMiddleware opens
        a transaction for this view, so no transaction is open while the view waits."""
        # Not on dispatch(), which a mixin may replace.
        view: Any = super().as_view(**options)
        for using in connections:
            view = transaction.non_atomic_requests(using)(view)
        return cast("Callable[..., HttpResponseBase]", view)

    def runs(self) -> models.QuerySet[Run]:
        """Return the runs that the view may show, by default all runs of the flow."""
        assert self.flow is not None, "Write FlowView.as_view(flow=…)."
        declared = self.flow._declaration
        runs: models.QuerySet[Run] = Run.objects.using(declared.using).filter(
            flow=declared.name, service__in=conf.get().services
        )
        return runs

    def get(self, request: HttpRequest, run_id: uuid.UUID) -> JsonResponse:
        """Return the run as JSON. The status is 404 if the run does not exist, and 400
        if `wait` is not a number."""
        try:
            wait = min(float(request.GET.get("wait", 0)), MAX_WAIT)
        except ValueError:
            return JsonResponse({"error": "wait= is not a number."}, status=400)
        run = self.runs().filter(run_id=run_id).first()
        if run is None:
            return JsonResponse({"error": "There is no such run."}, status=404)
        done = ended(run) or awaited(run, wait)
        run.refresh_from_db(using=run._state.db)  # not a router's replica
        found = run if done is None else done
        return JsonResponse(
            {
                "run_id": str(run.run_id),
                "key": run.key,
                "step": found.step,
                "waits_for": found.waits_for,
                "outcome": "" if done is None else done.outcome,
                "answer": None if done is None else json.loads(done.answer),
                "answer_type": None if done is None else done.answer_type,
            }
        )


def batch(
    messages: Iterable[Mapping[str, Any]],
    *,
    then: str | Destination[BatchEnded, Any],
    enough: int | None = None,
    within: dt.timedelta | None = None,
) -> Batch:
    """Store messages in the caller's transaction. Each message is a dict of
    send_message()'s arguments. The batch ends when all messages have been processed or
    given up, when `enough` messages have been processed, or after the time `within`
    (None: no deadline). Then `BatchEnded` is sent to `then`.

    The `progress` of the returned row counts the messages by outcome. The messages must
    go to stages. The result of a stage is the answer to its message, and the batch's
    rows keep the answers.

    Raises TransactionRequired outside a transaction. Raises InvalidMessage for a
    message that cannot be sent, or that has `unique` or `expires`. Raises
    ConfigurationError if `enough` is larger than the number of messages, or if
    `TXMSG["FLOWS"]["BATCHES"]` is not set. Raises FlowError in a stage whose
    `transaction` is not "outbox", except inside an outbox session.
    """
    if not conf.get().FLOWS.BATCHES:
        raise ConfigurationError(
            'batch() needs TXMSG["FLOWS"] = {"BATCHES": True}, in every process of '
            "this service: it declares the stage that takes the answers."
        )
    from .batches import Batches

    declared, then = Batches._declaration, destination_name(then)
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
        return declared.name, then, places, headers, bodies

    run_id, known = identify(declared, content, len(given) or 1)
    if known is not None:
        return Batch.objects.using(declared.using).get(run=known)
    run = declared.new_run(
        run_id=run_id,
        caller={wire.REPLY_TO: then},
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
