"""Flows under all events in any order.

The events are copies, late and poison answers, deadlines, signals, cancels and repeated
resumes. Operators redeliver, discard and edit messages. Some sub-flows hand their
request over to a new run. Some sub-flows fail and answer before they undo their work.
Code is replaced and rolled back.

Hypothesis chooses the events. In every case each run ends once and answers once. Each
failed run is undone exactly, newest work first, and no row remains.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_txmsg import Destination, Refuse, stages, upgrade, wire
from django_txmsg.dead_letters import bulk, resolution
from django_txmsg.errors import TxmsgError
from django_txmsg.flows import (
    AlreadyResumed,
    Cancelled,
    Dead,
    Flow,
    Next,
    TimedOut,
    acts,
    cancel,
    resume,
    signal,
    start,
    step,
)
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.models import (
    Attempt,
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.queue import QueueMessage
from tests.app.models import Effect
from tests.running import committing, put, ship, txmsg
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

MINUTE = dt.timedelta(minutes=1)
DAY = dt.timedelta(days=1)


@dataclass
class Job:
    name: str
    #: What each request of it meets, in their order, see FATES.
    fates: list[str]


@dataclass
class Work:
    name: str
    number: int
    fate: str


@dataclass
class Done:
    number: int


@dataclass
class Refused:
    number: int


@dataclass
class Halt:
    why: str


@dataclass
class Extra:
    """A signal that makes the run do additional work."""

    name: str
    fate: str


#: Of a request: it is done, answered by no, refused, fails until it is mended; its undo
#: is refused until it is mended; the flow that gets it answers before it undoes it,
#: hands it over, or fails to begin until it is mended.
FATES = ("ok", "ok", "ok", "no", "refuse", "fail", "sour", "first", "hand", "stuck")

do = Destination("machine.do", Work, reply=Done | Refused)
undo = Destination("machine.undo", Work)
undo_inner = Destination("machine.undo_inner", Work)
undo_own = Destination("machine.undo_own", Work)


@shelved
class Inner(Flow[Work, Done | Refused], name="machine.inner", within=3 * MINUTE):
    """A flow that sends one request, and undoes it if the flow fails."""

    number: int = 0
    first: bool = False

    @step
    def start(self, work: Work) -> Next[Done | Refused]:
        if work.fate == "stuck" and not Participant.mended:
            raise ValueError("not yet")
        if work.fate == "hand":
            return self.hand_over(Inner, Work(work.name, work.number, "first"))
        self.number, self.first = work.number, work.fate == "first"
        return self.ask(do, work, then=self.done, undo=undo, otherwise=self.given_up)

    @step
    def done(self, reply: Done | Refused) -> Next[Done | Refused]:
        if isinstance(reply, Refused) or self.first:
            return self.fail(reply, answer_first=self.first)
        return reply

    @step
    def given_up(self) -> Next[Done | Refused]:
        return self.fail(Refused(self.number))


@shelved
class Outer(Flow[Job, str], name="machine.outer", within=5 * MINUTE):
    """A flow that sends one request for each fate and then waits for a signal. A fate
    says how a request ends (`FATES`).

    Every second request starts a sub-flow. The work is numbered in the order in which
    the undos are registered.
    """

    name: str = ""
    fates: list[str] = []
    asked: int = 0
    works: int = 0

    @step
    def start(self, job: Job) -> Next[str]:
        self.name, self.fates = job.name, job.fates
        return self.later(self.go_on, 0)

    @step
    def go_on(self, number: int) -> Next[str]:
        if number == len(self.fates):
            return self.wait(then=self.told, otherwise=self.given_up)
        self.asked = number + 1
        work = self._work(self.fates[number])
        if number % 2:
            return self.ask(
                Inner,
                work,
                then=self.done,
                undo=undo_inner,
                otherwise=self.given_up,
            )
        return self.ask(do, work, then=self.done, undo=undo, otherwise=self.given_up)

    @step
    def done(self, reply: Done | Refused) -> Next[str]:
        if isinstance(reply, Refused):
            return self.fail("refused")
        self._do(self.fates[self.asked - 1])
        return self.sleep(MINUTE, then=self.rested)

    @step
    def rested(self) -> Next[str]:
        return self.later(self.go_on, self.asked)

    @step
    def told(self, yes: bool) -> Next[str]:
        return "told" if yes else self.fail("told no")

    @step
    def given_up(self, why: TimedOut | Dead) -> Next[str]:
        return self.fail("given up")

    @signal
    def halted(self, halt: Halt) -> Next[str]:
        return self.fail(halt.why)

    @signal
    def extra(self, extra: Extra) -> None:
        self.name = extra.name
        self._do(extra.fate)

    def _work(self, fate: str) -> Work:
        self.works += 1
        return Work(self.name, self.works, fate)

    def _do(self, fate: str) -> None:
        """Do work in the step's own transaction, and register its undo."""
        work = self._work(fate)
        _note("do", work)
        self.undo(undo_own, work)

    @signal
    def cancelled(self, by: Cancelled) -> Next[str]:
        return self.fail("cancelled")


@shelved
class Newer(Outer, name="machine.outer", within=5 * MINUTE, version=2):
    """A newer version of the flow, which can read the older state."""


@upgrade("machine.outer", from_version=1)
def renewed(state: dict[str, Any]) -> dict[str, Any]:
    return state


class Participant:
    """The service that does and undoes work, and records it in rows. A faulty request
    fails until the fault is repaired."""

    mended: ClassVar[bool] = False

    @classmethod
    def work(cls, work: Work) -> Done | Refused:
        if work.fate == "refuse":
            raise Refuse("never")
        if work.fate == "fail" and not cls.mended:
            raise ValueError("not yet")
        _note("do", work)
        return Refused(work.number) if work.fate == "no" else Done(work.number)

    @classmethod
    def back(cls, work: Work) -> None:
        if work.fate == "fail" and not cls.mended:
            raise ValueError("not yet")
        if work.fate == "sour" and not cls.mended:
            raise Refuse("not yet")
        _note("undo", work)


def _note(what: str, work: Work) -> None:
    name = f"{what} {work.name} {work.number} {work.fate}"
    Effect.objects.create(name=name, message_id="")


def work(work: Work) -> Done | Refused:
    return Participant.work(work)


def back(work: Work) -> None:
    Participant.back(work)


def back_inner(work: Work) -> None:
    """Undo the work of a sub-flow that succeeded. A failed sub-flow has already undone
    its own work."""
    named = f"{work.name} {work.number} "
    found = [one for one in effects() if f" {named}" in one]
    if [one.split()[0] for one in found] == ["do"]:
        Participant.back(work)


def effects() -> list[str]:
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


TABLES = (
    FlowStep, FlowUndo, Run, OutboxMessage, InboxMessage, DeadLetter, QueueMessage,
    Effect, Attempt,
)  # fmt: skip


NAMES = (
    "machine.outer", "machine.outer.steps", "machine.inner", "machine.inner.steps",
    "machine.do", "machine.undo", "machine.undo_inner", "machine.undo_own",
)  # fmt: skip
UNDOS = NAMES[5:]


class World(RuleBasedStateMachine):
    """The state machine. Each rule is an event that can happen to the runs."""

    def __init__(self) -> None:
        super().__init__()
        for model in TABLES:
            model.objects.all().delete()
        Participant.mended = False
        self._names = 0
        #: The keys of the runs that went back to a step.
        self._back: set[str] = set()
        self._code: type[Outer] = Newer
        self._deployed = ExitStack()
        self.code_is_replaced(newer=False)
        stages.stage(do)(work)
        stages.stage(undo, undoes=do)(back)
        stages.stage(undo_inner, undoes=Inner.destination)(back_inner)
        stages.stage(undo_own)(back)

    @rule(newer=st.booleans())
    def code_is_replaced(self, newer: bool) -> None:
        """Replace the code by the newer version of the flow, or by the older one."""
        self._deployed.close()
        self._code = Newer if newer else Outer
        self._deployed.enter_context(at_hand(Inner, self._code))

    @rule(fates=st.lists(st.sampled_from(FATES), max_size=3))
    def begin(self, fates: list[str]) -> None:
        self._names += 1
        name = f"job{self._names}"
        with transaction.atomic():
            start(self._code, Job(name, fates), key=name, answer_to="machine.answers")

    @rule()
    def relay(self) -> None:
        Deadlines(["default"]).tick()
        ship()

    @rule(name=st.sampled_from(NAMES))
    def consume(self, name: str) -> None:
        self._work(name)

    @rule()
    def everything_goes_on(self) -> None:
        moved = True
        while moved:
            self.relay()
            moved = sum(self._work(name) for name in NAMES) > 0

    def _work(self, name: str) -> bool:
        """Let a stage process one message. Return False if there is none."""
        here = QueueMessage.objects.filter(queue=name).exists()
        parked = InboxMessage.objects.filter(stage=name, due_at__lte=Now())
        if self._code is Outer:
            parked = parked.filter(needs_version=None)
        if found := here or parked.exists():
            take(stages.find([name])[0])
        return found

    @rule(ahead=st.sampled_from([2 * MINUTE, 4 * MINUTE, 10 * MINUTE]))
    def time_passes(self, ahead: dt.timedelta) -> None:
        for model in (Run, OutboxMessage, InboxMessage):
            model.objects.filter(due_at__isnull=False).update(
                due_at=F("due_at") - ahead
            )

    @precondition(lambda self: OutboxMessage.objects.exists())
    @rule(which=st.integers(0, 1000), fresh=st.booleans())
    def a_copy_comes(self, which: int, fresh: bool) -> None:
        """Deliver a copy of any stored message. If `fresh` is true and the message
        continues a run, the copy gets a new id, as if its sender had sent it twice."""
        row = OutboxMessage.objects.order_by("id")[
            which % OutboxMessage.objects.count()
        ]
        headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
        if fresh and row.destination.endswith(".steps") and wire.UNDOES not in headers:
            headers[wire.MESSAGE_ID] = str(uuid.uuid4())
        put(row.destination, bytes(row.body), headers)

    @precondition(lambda self: Run.objects.filter(ended_at=None).exists())
    @rule(which=st.integers(0, 1000))
    def poison_comes(self, which: int) -> None:
        run = self._open(which)
        headers = {
            wire.MESSAGE_ID: str(uuid.uuid4()),
            wire.CONTENT_TYPE: wire.JSON,
            wire.TICKET: f"{run.run_id.hex}.{run.turn.hex}",
            wire.TYPE: "tests.Job;v=1;min=1",
        }
        if not run.failing and run.waits_for != "start":
            put(f"{run.flow}.steps", b'"poison"', headers)

    @precondition(lambda self: Run.objects.filter(flow="machine.outer").exists())
    @rule(which=st.integers(0, 1000), yes=st.booleans(), twice=st.booleans())
    def somebody_says(self, which: int, yes: bool, twice: bool) -> None:
        runs = Run.objects.filter(flow="machine.outer").order_by("id")
        run = runs[which % runs.count()]
        token = f"{run.run_id.hex}.{(run.turn or uuid.uuid4()).hex}"
        for _ in range(1 + twice):
            try:
                with transaction.atomic():
                    resume(token, yes)
            except AlreadyResumed:
                continue

    @precondition(lambda self: Run.objects.exists())
    @rule(which=st.integers(0, 1000))
    def somebody_cancels(self, which: int) -> None:
        runs = Run.objects.order_by("id")
        with transaction.atomic():
            cancel(runs[which % runs.count()], "cancelled")

    @rule(which=st.integers(1, 6))
    def somebody_halts(self, which: int) -> None:
        with transaction.atomic():
            self._code.signal(f"job{which}", Halt("halted"))

    @rule(which=st.integers(1, 6), fate=st.sampled_from(["ok", "sour"]))
    def somebody_wants_more(self, which: int, fate: str) -> None:
        with transaction.atomic():
            self._code.signal(f"job{which}", Extra(f"job{which}", fate))

    @rule(kind=st.sampled_from(["redeliver", "discard", "restore"]), mend=st.booleans())
    def an_operator_comes(self, kind: str, mend: bool) -> None:
        Participant.mended = Participant.mended or mend
        bulk.finish(bulk.start(kind, {}))

    @precondition(lambda self: _editable().exists())
    @rule(which=st.integers(0, 1000))
    def an_operator_edits(self, which: int) -> None:
        letters = _editable().order_by("id")
        letter = letters[which % letters.count()]
        body = json.loads(bytes(letter.body)) | {"fate": "ok"}
        with suppress(TxmsgError):  # it is revoked
            resolution.redeliver_copy(
                letter, headers={}, body=json.dumps(body).encode()
            )

    @precondition(lambda self: FlowStep.objects.exists())
    @rule(which=st.integers(0, 1000))
    def an_operator_goes_back(self, which: int) -> None:
        """Send a run back to one of its steps, if that is still possible."""
        steps = FlowStep.objects.filter(run__flow="machine.outer").order_by("id")
        if not steps:
            return
        step = steps[which % len(steps)]
        with suppress(TxmsgError), transaction.atomic():
            acts.act("go-back", step.run, acts.Given(to=str(step.pk)))
            self._back.add(step.run.key)

    def _open(self, which: int) -> Run:
        runs = Run.objects.filter(ended_at=None).order_by("id")
        return runs[which % runs.count()]

    def teardown(self) -> None:
        """Repair all faults, and check that each run ends once and that no row
        remains."""
        try:
            Participant.mended = True
            self.code_is_replaced(newer=True)
            OutboxMessage.objects.update(lease_until=None)
            for _ in range(12):
                self.everything_goes_on()
                for name in UNDOS:
                    # An undo has to be done, also one that was discarded.
                    bulk.finish(bulk.start("restore", {"stage": name}))
                    bulk.finish(bulk.start("redeliver", {"stage": name}))
                if not Run.objects.filter(ended_at=None).exists():
                    break
                self.time_passes(20 * MINUTE)
            self.time_passes(DAY)
            self.everything_goes_on()
            self._judge()
        finally:
            for name in ("machine.do", *UNDOS):
                stages.unregister(name)
            self._deployed.close()

    def _judge(self) -> None:
        open_runs = Run.objects.filter(ended_at=None)
        assert not open_runs.exists(), [(r, r.step, r.waits_for) for r in open_runs]
        left = FlowUndo.objects.filter(confirmed_at=None)
        assert not left.exists(), "an undo is not confirmed"
        works: dict[str, Works] = defaultdict(Works)
        for effect in effects():
            what, name, number, fate = effect.split()
            works[name].repeats = name in self._back
            works[name].note(what, int(number), fate)
        for run in Run.objects.filter(flow="machine.outer"):
            works[run.key].judge(run.outcome)
            answers = OutboxMessage.objects.filter(
                destination="machine.answers", correlation_id=run.correlation_id
            )
            assert answers.count() == 1, run


def _editable() -> Any:
    return DeadLetter.objects.filter(
        stage__in=("machine.inner", "machine.do", *UNDOS), resolution="open"
    )


class Works:
    """The work that one run of Outer has done and undone, by number. `repeats` is true
    if the run was sent back to a step, and so may repeat undone work."""

    def __init__(self) -> None:
        self.repeats = False
        self._standing: dict[int, str] = {}
        self._gone: dict[int, str] = {}

    def note(self, what: str, number: int, fate: str) -> None:
        """Record one effect, and check that it is allowed.

        Work is done once and undone once, and the newest work is undone first. Only
        work with the fate `first` may be undone in another order, because the flow of
        this work answers before it undoes the work.
        """
        if what == "do":
            if self.repeats:
                self._gone.pop(number, None)
            assert number not in self._standing | self._gone, "it is done twice"
            self._standing[number] = fate
        else:
            assert number in self._standing, "it is undone twice, or was not done"
            done_as = self._standing.pop(number)
            self._gone[number] = done_as
            newer = [one for one in self._standing if one > number]
            assert done_as == "first" or not newer, "it is not the newest"

    def judge(self, outcome: str) -> None:
        """Check the work against the outcome of the run."""
        if outcome == "failed":
            assert not self._standing, "it is not undone"
        else:
            assert outcome == "answered"
            needless = set(self._gone.values()) - {"first"}
            assert self.repeats or not needless, "it is undone for nothing"


@committing
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("worlds", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_whatever_happens_each_run_ends_once_and_is_undone_exactly(worlds: int) -> None:
    """Each example takes about a second. TXMSG_FLOW_EXAMPLES sets the number of
    examples."""
    with txmsg(BROKERS={"default": {"URL": "database://?poll=0.01"}}):
        run_state_machine_as_test(
            World,
            settings=settings(
                max_examples=int(os.environ.get("TXMSG_FLOW_EXAMPLES", worlds)),
                stateful_step_count=20,
                deadline=None,
                # To find the smallest world takes minutes of a busy machine.
                phases=[Phase.explicit, Phase.reuse, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
