"""Calls a step of a run with a message, and stores what follows from the result."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from .. import codecs, conf, signals, wire
from ..envelope.message import Message, check_headers
from ..errors import ConfigurationError, DecodeError, FlowError, InvalidMessage
from ..models import OutboxMessage, Run
from ..models.run import Outcome, WaitsFor
from ..sending.answering import Address, hop
from ..sending.destination import TypedName
from ..sending.outbox import Encoded, encoded
from ..sending.undoing import overtaken, undo_delays
from . import joining, undos
from .declaration import Declaration, Step, declarations
from .unread import Unread
from .values import (
    OURS,
    Ask,
    Cancelled,
    Continuation,
    Dead,
    Fail,
    Gather,
    HandOver,
    Later,
    Sleep,
    TimedOut,
    Wait,
    deadline_id,
)

log = logging.getLogger("django_txmsg.flows")

#: Steps since the last sleep or wait, over all flows of a conversation.
MAX_HOPS = 200
#: Characters of a flow's baggage, at most, names included.
MAX_BAGGAGE = 4096
#: The reason that `otherwise` gets if a flow, or a request in the outbox, was
#: cancelled.
CANCELLED = "cancelled"
#: What the history shows in place of a step when the run returns to an earlier one.
BACK = "go back"


class Going:
    """A run while one of its messages is processed. This object exists until the end of
    the transaction."""

    def __init__(self, declared: Declaration, run: Run, message: Message) -> None:
        self.declared, self.run, self._message = declared, run, message
        self._turn = run.turn
        self._before = dict(vars(run))
        self._hop = hop(message.conversation)
        self._flow = self._restored(run.state, run.version)
        self._step = run.step

    def _restored(self, state: str, version: int) -> Any:
        """Return an object of the flow's class with this state."""
        flow: Any = self.declared.cls(**self.declared.decode(state, version))
        flow._run_id, flow.baggage = self.run.run_id, dict(self.run.baggage)
        return flow

    def call(self, step: Step, *values: Any) -> Any:
        """Call a step, store the undos that the step has registered, and return the
        step's result. Raises FlowError if the step created a continuation and did not
        return it."""
        self._step = step.name
        arguments = () if step.takes_nothing else values
        result = step.call(self._flow, *arguments)
        undos.register(self.run, [undos.new(*one) for one in self._flow._undos])
        self._flow._undos.clear()
        made = self._flow._made
        if (made and made[-1] is not result) or len(made) > 1:
            raise FlowError(
                f"Step {step.name!r} of flow {self.declared.name!r} made "
                f"{len(made)} continuations and returned {type(result).__name__}: a "
                f"step makes one continuation, and returns it."
            )
        return result

    def continued(self) -> None:
        """Call the step for which the run waits, with the value in the message."""
        run, body = self.run, self._message.body
        assert isinstance(body, Unread)
        assert run.turn is not None
        given = self._message.conversation
        original = wire.original_id(self._message.id, given)
        timed_out = original == deadline_id(run.turn)
        step = self.declared.step(run.step)
        if timed_out:
            overtaken(run, run.turn, self.declared.using)
        if run.waits_for == WaitsFor.TIME:
            if timed_out:
                return self.apply(self.call(step))
            return late(self.declared, self._message, run.run_id)
        if run.waits_for == WaitsFor.JOIN:
            answers = joining.ended(
                self.declared, run, step, self._headers(), timed_out=timed_out
            )
            return None if answers is None else self.apply(self.call(step, answers))
        ours = OURS.get(body.type)
        if ours is not None and (timed_out or not step.reads(body.type)):
            value = body.read(codecs.reader(ours))
            if not run.otherwise:
                return self.apply(Fail(value))
            if isinstance(value, Cancelled):
                value = Dead(CANCELLED)
            return self.apply(self.call(self.declared.step(run.otherwise), value))
        if run.waits_for == WaitsFor.ANSWER and ours is not Dead:
            undos.note_answer(run, run.request_id)
        if step.takes_nothing:
            return self.apply(self.call(step))
        return self.apply(self.call(step, body.read(step.reader, run.reads)))

    def undone(self) -> None:
        """Record that the current undo is confirmed, and begin the next older undo."""
        unconfirmed = undos.unconfirmed(self.run)
        undo = unconfirmed[0]
        if self._message.body.type == "txmsg.Dead" and not undo.cancels:
            # A dead undo is not confirmed, because it must still be done. But a flow
            # that was cancelled may end with this answer.
            return late(self.declared, self._message, self.run.run_id)
        unconfirmed.filter(pk=undo.pk).update(confirmed_at=Now())
        self._step = "undo"
        self._undo_next()
        self.store()
        return None

    def signalled(self, result: Any) -> None:
        """Apply the result of a signal's method. If the result is None, the run waits
        for the same continuation as before. Otherwise the run's requests are cancelled
        if they have not been sent yet."""
        if result is None:
            return self.store()
        self._leave()
        return self.apply(result)

    def _leave(self) -> None:
        """End the wait of the run, before the run continues in another way. Its
        requests are cancelled if they have not been sent yet."""
        run, using = self.run, self.declared.using
        assert run.turn is not None  # it waits
        overtaken(run, run.turn, using)
        pages: Iterable[list[uuid.UUID]] = [[run.request_id]] if run.request_id else []
        if run.waits_for == WaitsFor.JOIN:
            pages = joining.leave(self.declared, run)
        why = f"the flow has gone on: {self._step}"
        for asked in pages:
            OutboxMessage.objects.db_manager(using).cancel(asked, why=why)

    def go_back(
        self, step: str, argument: Encoded, kept: int, state: str, version: int
    ) -> None:
        """Undo the run's work back to a step, and then call that step again, with this
        state. The first `kept` undos stay registered; all later undos are sent, one
        after the other."""
        run, self._flow = self.run, self._restored(state, version)
        self._step = BACK
        self._leave()
        run.failing, run.kept_undos, run.step = True, kept, step
        run.answer, run.answer_type = argument.body.decode(), argument.type
        self._undo_next()
        self.store()

    def apply(self, result: Any) -> None:
        """Apply the result of a step to the run, and store the run."""
        run, turn = self.run, uuid.uuid4()
        match result:
            case Ask() | Gather() | Later() | HandOver() if self._hop >= MAX_HOPS:
                # Before the request is sent: its work would be done for no answer.
                raise DecodeError(
                    "hops",
                    f"more than {MAX_HOPS} steps without a sleep or a wait: do they go "
                    f"in a circle?",
                )
            case Ask():
                to, body, key = result.destination, result.body, result.key
                asked = self._send(to, body, turn, key=key, expires=result.within)
                undos.register(run, undos.of_request(run, result, asked.id))
                run.wait(
                    WaitsFor.ANSWER,
                    result.then,
                    turn=turn,
                    otherwise=result.otherwise,
                    within=result.within,
                    asked=to.name,
                    request_id=asked.id,
                )
            case Gather():
                self._gather(result, turn)
                run.wait(WaitsFor.JOIN, result.then, turn=turn, within=result.within)
            case Wait():
                self._hop = 0
                run.wait(
                    WaitsFor.RESUME,
                    result.then,
                    turn=result.turn,
                    otherwise=result.otherwise,
                    within=result.within,
                )
            case Sleep():
                self._hop = 0
                run.wait(WaitsFor.TIME, result.then, within=result.duration)
            case Later():
                to = self.declared.address_of(self.declared.step(result.then))
                run.wait(WaitsFor.ITSELF, result.then, turn=turn)
                headers = self._headers()
                self.declared.continue_run(run, turn, result.value, headers, to=to)
            case HandOver():
                self._hand_over(result)
            case Fail():
                self._fail(result)
            case Continuation():
                raise FlowError(
                    f"A step returned {result!r}, which is neither an "
                    "answer nor a continuation."
                )
            case _:
                self._keep_answer(result)
                self._deliver()
                undos.forget(run)
                run.end(Outcome.ANSWERED)
        self.store()

    def store(self) -> None:
        """Store the changes of the run, and a row of its history."""
        run, using = self.run, self.declared.using
        run.state, run.version = self.declared.encode(self._flow), self.declared.version
        run.baggage, run.hop = checked(self._flow.baggage), self._hop
        moved = run.turn != self._turn
        if moved:
            waiting = self.declared.steps.get(run.step)
            run.reads = waiting.takes if waiting else ""
        now: dict[str, Any] = {"since": Now()} if moved else {}
        now |= {
            name: value
            for name, before in self._before.items()
            if (value := getattr(run, name)) != before
        }
        # Even where nothing has changed: the statement proves that the run waits.
        now.setdefault("hop", run.hop)
        step = self._step, self._message.id, _then(run) if moved else ""
        kept = step if conf.get().FLOWS.HISTORY else None
        rows = Run.objects.db_manager(using)
        if not rows.store(run, self._turn, now, step=kept):
            raise FlowError(f"Run {run.run_id} no longer waits for this message.")
        if run.turn is None:
            ended = partial(
                signals.flow_ended.send_robust,
                sender=None,
                flow=run.flow,
                run_id=run.run_id,
                outcome=str(run.outcome),
            )
            transaction.on_commit(ended, using=using)

    def _send(
        self, to: Any, body: Any, turn: uuid.UUID, undoes: str = "", **more: Any
    ) -> Message:
        """Store a message whose answer continues this run."""
        given = {**self._headers(), wire.REPLY_TO: self.declared.steps_name}
        if undoes:
            given[wire.UNDOES] = undoes
        return self.declared.continue_run(self.run, turn, body, given, to=to, **more)

    def _headers(self) -> dict[str, str]:
        given = {wire.PROP + k: v for k, v in checked(self._flow.baggage).items()}
        given[wire.FLOW] = str(self.run.first_run)
        given[wire.HOP] = str(self._hop + 1)
        return given

    def _keep_answer(self, value: Any) -> None:
        destination: Any = self.declared.name
        if not isinstance(value, (TimedOut, Dead, Cancelled)):
            answers = self.declared.destination.reply
            if value is None and answers not in (None, type(None)):
                raise FlowError(
                    f"Step {self._step!r} of flow {self.declared.name!r} returned "
                    "nothing. It must return an answer, or how the run continues."
                )
            if value is not None:
                destination = TypedName(self.declared.name, answers)
        body, _, of = encoded(destination, value)
        self.run.answer, self.run.answer_type = body.decode(), of

    def _deliver(self) -> None:
        """Send the run's answer to the caller, unless the answer was sent already."""
        run = self.run
        if not run.caller:
            return
        given = {
            **run.caller,
            wire.FLOW: str(run.first_run),
            wire.HOP: str(self._hop),
            wire.CORRELATION_ID: run.correlation_id,
        }
        Address(run.caller[wire.REPLY_TO], given).send(
            Encoded(run.answer.encode(), run.answer_type),
            using=self.declared.using,
            broker=self.declared.broker,
        )
        run.caller = {}

    def _hand_over(self, result: HandOver) -> None:
        run, name = self.run, result.destination.name
        (other,) = (one for one in declarations() if one.name == name)
        here = other.using == self.declared.using
        given = self._headers() | run.caller
        if run.caller and not here:
            # If the message dies, only a caller with a ticket gets `Dead`. There is no
            # row of the other run that an operator could cancel.
            given.setdefault(wire.TICKET, str(run.run_id))
        asked = self.declared.send(
            result.body,
            given,
            to=result.destination,
            correlation_id=run.correlation_id,
        )
        if wire.TICKET not in run.caller and here:
            # The caller is the `answer_to` of start(). The other flow's first step may
            # not accept it as a header. Without a caller, ask() or a view may wait for
            # the other run, which may be cancelled before it begins.
            other.new_run(
                run_id=asked.id,
                caller=run.caller,
                first_run=run.first_run,
                baggage=checked(self._flow.baggage),
                correlation_id=run.correlation_id,
            ).save(using=other.using, force_insert=True)
        undos.forget(run)
        run.end(Outcome.HANDED_OVER)
        run.asked, run.request_id = name, asked.id

    def _fail(self, result: Fail) -> None:
        self._keep_answer(result.value)
        self.run.failing = True
        if result.answer_first:
            self._deliver()
        self._undo_next()

    def _gather(self, result: Gather, turn: uuid.UUID) -> None:
        run, at_once = self.run, result.at_once or 0
        correlated = {wire.CORRELATION_ID: run.correlation_id}
        messages = [
            {
                "destination": one.destination,
                "body": one.body,
                "key": one.key,
                "expires": result.within,
                "delay": result.within if 0 < at_once <= number else None,
                "headers": correlated,
            }
            for number, one in enumerate(result.requests)
        ]
        declared, headers, enough = self.declared, self._headers(), result.enough
        _, ids = joining.store(declared, run, turn, messages, headers, enough, at_once)
        asked = zip(result.requests, ids, strict=True)
        of_each = (undos.of_request(run, *one) for one in asked)
        undos.register(run, chain.from_iterable(of_each))

    def _undo_next(self) -> None:
        """Send the newest undo that is not confirmed. If all undos are confirmed, end
        the run. But if the run goes back to a step, call this step instead."""
        unconfirmed = undos.unconfirmed(self.run)
        row = unconfirmed.first() if self.run.undos else None
        if row is None and self.run.kept_undos is not None:
            self._repeat()
            return
        if row is None:
            self._deliver()
            self.run.end(Outcome.FAILED)
            return
        turn, self._hop = uuid.uuid4(), 0
        body, undoes = Encoded(bytes(row.body), row.body_type), undos.undoes(row)
        one = unconfirmed.filter(pk=row.pk)
        delay = undo_delays(one, self.declared.using).get(row.request_id)
        sent = self._send(row.destination, body, turn, undoes, delay=delay)
        self.run.wait(
            WaitsFor.UNDO,
            self.run.step,
            turn=turn,
            asked=row.destination,
            request_id=sent.id,
        )

    def _repeat(self) -> None:
        """Send the message that calls the step to which the run goes back."""
        run, turn = self.run, uuid.uuid4()
        run.failing, run.kept_undos = False, None
        run.wait(WaitsFor.ITSELF, run.step, turn=turn, otherwise=run.step)
        argument = Encoded(run.answer.encode(), run.answer_type)
        run.answer = run.answer_type = ""
        self.declared.continue_run(run, turn, argument, self._headers())


def late(declared: Declaration, message: Message, run_id: uuid.UUID | None) -> None:
    """Log a message that arrived after its run had continued, and send the signal
    `flow_late` after the commit: a receiver that fails must not make the message a dead
    letter. The message has no other effect."""
    log.info(
        "flow %s: message %s arrived after run %s had continued, and is dropped",
        declared.name,
        message.id,
        run_id,
    )
    dropped = partial(
        signals.flow_late.send_robust,
        sender=None,
        id=message.id,
        flow=declared.name,
        run_id=run_id,
    )
    transaction.on_commit(dropped, using=declared.using)


def _then(run: Run) -> str:
    waits = f"{run.waits_for} {run.asked}".strip()
    return (waits or str(run.outcome))[:300]


def checked(baggage: dict[str, str]) -> dict[str, str]:
    """Return a copy of the baggage, the headers that all messages of a flow have.
    Raises ConfigurationError for values that are invalid in a header."""
    for name, value in baggage.items():
        fits = isinstance(name, str) and isinstance(value, str) and name
        if not fits or not name.isascii() or not value.isprintable():
            raise ConfigurationError(
                f"The baggage of a flow is text by name, of one line; {name!r} is not."
            )
    try:
        check_headers({f"x-{name}": value for name, value in baggage.items()})
    except InvalidMessage as error:
        raise ConfigurationError(f"No message can carry the baggage: {error}") from None
    if sum(len(name) + len(value) for name, value in baggage.items()) > MAX_BAGGAGE:
        raise ConfigurationError(f"The baggage is longer than {MAX_BAGGAGE}.")
    return dict(baggage)
