"""Flows under all events in any order: copies, late and poison answers, deadlines,
signals, cancels, repeated resumes, operators, sub-flows.

Hypothesis chooses the events. Whatever they are, each run ends once, each failed run is
undone exactly, newest first, and nothing is left over.
"""

from __future__ import annotations

import datetime as dt
import os
import uuid
from collections import Counter, defaultdict
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

from django_txmsg import Destination, Refuse, stages, wire
from django_txmsg.dead_letters import bulk
from django_txmsg.flows import (
    AlreadyResumed,
    Cancelled,
    Dead,
    Flow,
    Next,
    TimedOut,
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
    #: What each request of it meets, in their order: ok, no, refuse, fail.
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


do = Destination("machine.do", Work, reply=Done | Refused)
undo = Destination("machine.undo", Work)
undo_inner = Destination("machine.undo_inner", Work)


@shelved
class Inner(Flow[Work, Done | Refused], name="machine.inner", within=3 * MINUTE):
    """A flow that asks once, and undoes the request if it fails."""

    number: int = 0

    @step
    def start(self, work: Work) -> Next[Done | Refused]:
        self.number = work.number
        return self.ask(do, work, then=self.done, undo=undo, otherwise=self.given_up)

    @step
    def done(self, reply: Done | Refused) -> Next[Done | Refused]:
        return self.fail(reply) if isinstance(reply, Refused) else reply

    @step
    def given_up(self) -> Next[Done | Refused]:
        return self.fail(Refused(self.number))


@shelved
class Outer(Flow[Job, str], name="machine.outer", within=5 * MINUTE):
    """A flow that asks for each fate, every second time through another flow, and then
    waits for a signal."""

    name: str = ""
    fates: list[str] = []
    asked: int = 0

    @step
    def start(self, job: Job) -> Next[str]:
        self.name, self.fates = job.name, job.fates
        return self.later(self.go_on, 0)

    @step
    def go_on(self, number: int) -> Next[str]:
        if number == len(self.fates):
            return self.wait(then=self.told, otherwise=self.given_up)
        self.asked = number + 1
        work = Work(self.name, number, self.fates[number])
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
    def cancelled(self, by: Cancelled) -> Next[str]:
        return self.fail("cancelled")


class Participant:
    """Does and undoes by rows. A request with a fault fails until the fault is
    repaired."""

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
        _note("undo", work)


def _note(what: str, work: Work) -> None:
    Effect.objects.create(name=f"{what} {work.name} {work.number}", message_id="")


def work(work: Work) -> Done | Refused:
    return Participant.work(work)


def back(work: Work) -> None:
    Participant.back(work)


def back_inner(work: Work) -> None:
    """Undo the work of an inner flow that succeeded. A failed one has undone it
    itself."""
    found, named = effects(), f"{work.name} {work.number}"
    if f"do {named}" in found and f"undo {named}" not in found:
        Participant.back(work)


def effects() -> list[str]:
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


TABLES = (
    FlowStep, FlowUndo, Run, OutboxMessage, InboxMessage, DeadLetter, QueueMessage,
    Effect, Attempt,
)  # fmt: skip


NAMES = (
    "machine.outer", "machine.outer.steps", "machine.inner", "machine.inner.steps",
    "machine.do", "machine.undo", "machine.undo_inner",
)  # fmt: skip


class World(RuleBasedStateMachine):
    """The events of the runs."""

    def __init__(self) -> None:
        super().__init__()
        for model in TABLES:
            model.objects.all().delete()
        Participant.mended = False
        self._names = 0
        self._at_hand = at_hand(Inner, Outer)
        self._at_hand.__enter__()
        stages.stage(do)(work)
        stages.stage(undo, undoes=do)(back)
        stages.stage(undo_inner, undoes=Inner.destination)(back_inner)

    @rule(
        fates=st.lists(
            st.sampled_from(["ok", "ok", "ok", "no", "refuse", "fail"]), max_size=3
        )
    )
    def begin(self, fates: list[str]) -> None:
        self._names += 1
        name = f"job{self._names}"
        with transaction.atomic():
            start(Outer, Job(name, fates), key=name)

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
        """Let a stage process one message, if one waits for it."""
        here = QueueMessage.objects.filter(queue=name).exists()
        parked = InboxMessage.objects.filter(
            stage=name, due_at__lte=Now(), needs_version=None
        ).exists()
        if here or parked:
            take(stages.find([name])[0])
        return here or parked

    @rule(ahead=st.sampled_from([2 * MINUTE, 4 * MINUTE, 10 * MINUTE]))
    def time_passes(self, ahead: dt.timedelta) -> None:
        for model in (Run, OutboxMessage, InboxMessage):
            model.objects.filter(due_at__isnull=False).update(
                due_at=F("due_at") - ahead
            )

    @precondition(lambda self: OutboxMessage.objects.exists())
    @rule(which=st.integers(0, 1000), fresh=st.booleans())
    def a_copy_comes(self, which: int, fresh: bool) -> None:
        """Deliver a copy of any message, late or early. Only messages that continue
        runs get a new id, like a repeated answer."""
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
            Outer.signal(f"job{which}", Halt("halted"))

    @rule(kind=st.sampled_from(["redeliver", "discard"]), mend=st.booleans())
    def an_operator_comes(self, kind: str, mend: bool) -> None:
        Participant.mended = Participant.mended or mend
        letters: dict[str, Any] = {}
        if kind == "discard":
            # An undo has to be done: who discards one has done it by hand.
            letters = {"stage": "machine.do"}
        bulk.finish(bulk.start(kind, letters))

    def _open(self, which: int) -> Run:
        runs = Run.objects.filter(ended_at=None).order_by("id")
        return runs[which % runs.count()]

    def teardown(self) -> None:
        """Repair everything: each run ends, once, and no row is left."""
        try:
            Participant.mended = True
            OutboxMessage.objects.update(lease_until=None)
            for _ in range(12):
                self.everything_goes_on()
                for name in ("machine.undo", "machine.undo_inner"):
                    bulk.finish(bulk.start("redeliver", {"stage": name}))
                if not Run.objects.filter(ended_at=None).exists():
                    break
                self.time_passes(20 * MINUTE)
            self.time_passes(DAY)
            self.everything_goes_on()
            self._judge()
        finally:
            stages.unregister("machine.do")
            stages.unregister("machine.undo")
            stages.unregister("machine.undo_inner")
            self._at_hand.__exit__(None, None, None)

    def _judge(self) -> None:
        open_runs = Run.objects.filter(ended_at=None)
        assert not open_runs.exists(), [(r, r.step, r.waits_for) for r in open_runs]
        left = FlowUndo.objects.filter(confirmed_at=None)
        assert not left.exists(), "an undo is not confirmed"
        found = effects()
        counts = Counter(found)
        assert all(count == 1 for count in counts.values()), counts
        outcomes = {
            run.key: run.outcome for run in Run.objects.filter(flow="machine.outer")
        }
        done: dict[str, list[int]] = defaultdict(list)
        undone: dict[str, list[int]] = defaultdict(list)
        for effect in found:
            what, name, number = effect.split()
            (done if what == "do" else undone)[name].append(int(number))
        for name, outcome in outcomes.items():
            if outcome == "failed":
                assert sorted(undone[name]) == sorted(done[name]), (name, found)
                assert undone[name] == sorted(undone[name], reverse=True), found
            else:
                assert outcome == "answered"
                assert not undone[name], (name, found)


@committing
@pytest.mark.timeout(600)
def test_whatever_happens_each_run_ends_once_and_is_undone_exactly() -> None:
    with txmsg(BROKERS={"default": {"URL": "database://?poll=0.01"}}):
        run_state_machine_as_test(
            World,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=20,
                deadline=None,
                # To find the smallest world takes minutes of a busy machine.
                phases=[Phase.explicit, Phase.reuse, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )


#: Worlds that are played; each takes seconds. More of them: TXMSG_FLOW_EXAMPLES=60.
EXAMPLES = int(os.environ.get("TXMSG_FLOW_EXAMPLES", "8"))
