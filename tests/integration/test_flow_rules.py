"""The rules of flows. After each rule, the list gives the tests that check the rule.
The named tests are in `test_flows.py`. "Two here" means two more tests, which are in
this file.

- Of all messages that could continue a run, exactly one does:
  `test_one_of_a_concurrent_answer_deadline_and_copies_continues_the_run`,
  `test_redelivered_copies_do_not_change_a_run`,
  `test_the_first_who_resumes_is_the_only_one`.
- The first message to commit continues the run, not the first to arrive:
  `test_an_unreadable_answer_does_not_disarm_the_deadline`, one here.
- A flow that continues closes the dead letters of its messages: two here.
- A deadline is a column of the run, and each time-out is one message: one here.
- A signal locks the run's row too, between two steps:
  `test_a_signal_replaces_what_the_run_waits_for`,
  `test_a_signal_before_its_run_waits_for_it_and_for_no_other`, two here.
- Each branch of a join is a row, and its answer is stored without a common lock. One
  continuation ends the join: all of `test_flow_joins.py`.
- `within=` is required: one here.
- A request expires with its deadline, and then no message is buried: three here.
- An undo is registered in the transaction that sends its request: two here.
- An undo runs only if its request was done. It runs once, never before the request:
  `test_a_deadline_goes_on_once_and_revokes_what_has_not_come`,
  `test_an_answer_that_is_late_is_dropped_and_what_was_done_is_undone`,
  `test_an_undo_waits_for_a_request_in_progress_and_reverses_it`,
  `test_an_undo_older_than_the_inbox_is_for_a_person`,
  `test_an_undo_whose_request_is_done_elsewhere_is_an_error_of_the_checks`.
- Undos run one after the other, newest first, and each is confirmed:
  `test_cancelling_cancels_what_was_asked_before_anything_older`,
  `test_an_undo_that_is_dead_stops_there_and_goes_on_when_redelivered`,
  `test_a_flow_that_answers_first_is_undone_before_anything_older`.
- A run that answers deletes its undos. A run that is cancelled revokes its request:
  `test_a_run_asks_waits_and_answers`, `test_cancelling_undoes_and_answers`,
  `test_run_cancelled_before_its_start_arrives_never_starts`.
- A request that is given up is answered at once:
  `test_a_request_that_is_refused_is_answered_at_once_and_revoked`,
  `test_a_request_that_an_operator_discards_is_answered`,
  `test_no_copy_of_a_revoked_request_is_executed`, one here.
- The state has a version: `test_what_waits_for_newer_code_continues_with_it`, one here.
- Code keeps the keys of a state that it does not know: three here.
- Messages address a step by its name:
  `test_a_step_that_this_code_does_not_have_waits_for_code_that_has`, one here.
- If an open run waits for a step that the code does not have, `check --database`
  reports the step: two here.
- Ended runs are kept for a time, open runs for ever, each with its steps:
  `test_ended_runs_are_pruned_with_their_steps_and_open_ones_are_not`, one here.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import DatabaseError, connection, transaction
from django.db.models import F
from django.utils import timezone
from pydantic import AliasChoices, Field

from django_txmsg import Destination, send_message, stages, upgrade, wire
from django_txmsg.checks import check_databases
from django_txmsg.dead_letters import bulk
from django_txmsg.errors import ConfigurationError
from django_txmsg.flows import (
    Flow,
    Next,
    TimedOut,
    acts,
    cancel,
    signal,
    start,
    step,
)
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.flows.values import deadline_id
from django_txmsg.models import (
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.fields import clock
from django_txmsg.models.queue import QueueMessage
from django_txmsg.models.run import Outcome, WaitsFor
from django_txmsg.signals import flow_late
from django_txmsg.testing import drain
from tests.forgetting import forget_flow
from tests.running import committing, copies_dropped, declared, put, ship, txmsg
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

MINUTE = dt.timedelta(minutes=1)
HOUR = dt.timedelta(hours=1)


@dataclass
class Ruled:
    number: int


@dataclass
class Remark:
    text: str


@dataclass
class Over:
    why: str


JSON = {"content-type": "application/json", "txmsg-id": str(uuid.uuid4())}

ask_for = Destination("rules.do", Ruled, reply=Ruled)
take_back = Destination("rules.undo", Ruled)


@shelved
class Obedient(Flow[Ruled, int], name="rules.flow"):
    number: int = 0
    remarks: list[str] = []
    within: ClassVar[dt.timedelta | None] = HOUR

    @step
    def start(self, ruled: Ruled) -> Next[int]:
        self.number = ruled.number
        asked = self.ask(
            ask_for,
            ruled,
            then=self.done,
            undo=take_back,
            within=self.within,
            otherwise=self.late,
        )
        if ruled.number < 0:
            raise ValueError("after it has asked")
        return asked

    @step
    def done(self, reply: Ruled) -> Next[int]:
        return reply.number

    @step
    def late(self, why: TimedOut) -> Next[int]:
        return self.fail(-1)

    @signal
    def over(self, over: Over) -> Next[int]:
        return self.fail(-2)

    @signal
    def remarked(self, remark: Remark) -> None:
        self.remarks = [*self.remarks, remark.text]


@shelved
class Changed(Flow[Ruled, int], name="rules.flow", within=HOUR, version=2):
    """The flow's next version, with another field and a renamed step."""

    amount: int = 0

    @step
    def start(self, ruled: Ruled) -> Next[int]:
        return ruled.number

    @step(was="done")
    def finished(self, reply: Ruled) -> Next[int]:
        return self.amount + reply.number


@shelved
class Enlarged(Obedient, name="rules.flow", within=HOUR):
    """The flow with another field, and no new version."""

    amount: Decimal = Decimal(0)

    @signal
    def remarked(self, remark: Remark) -> None:
        self.amount += Decimal(remark.text)


@shelved
class Numbered(Flow[Ruled, int], name="rules.flow"):
    """A flow with a set."""

    numbers: set[int] = set()

    @step
    def start(self, ruled: Ruled) -> Next[int]:
        return ruled.number


@shelved
class Aliased(Flow[Ruled, int], name="rules.flow", within=HOUR):
    """The flow with a renamed field, which is also read from its former name."""

    notes: Annotated[
        list[str], Field(validation_alias=AliasChoices("remarks", "notes"))
    ] = []

    @step
    def start(self, ruled: Ruled) -> Next[int]:
        return ruled.number

    @signal
    def remarked(self, remark: Remark) -> None:
        self.notes = [*self.notes, remark.text]


@shelved
class Lenient(Obedient, name="rules.lenient"):
    """Its signal takes an optional body."""

    @signal
    def remarked(self, remark: Remark | None) -> None:
        self.remarks = [*self.remarks, remark.text if remark else ""]


@upgrade("rules.flow", from_version=1)
def with_amount(state: dict[str, Any]) -> dict[str, Any]:
    return {"amount": 100 * state["number"]}


@pytest.fixture
def undone() -> Iterator[list[int]]:
    """Declare the flow and its undo. Yields a list, to which the undo adds the number
    of each undone request."""
    numbers: list[int] = []

    def undo(ruled: Ruled) -> None:
        numbers.append(ruled.number)

    with (
        at_hand(Obedient),
        declared(undo, take_back, name="rules.undo", undoes=ask_for),
    ):
        yield numbers


@pytest.fixture
def late() -> Iterator[list[uuid.UUID | None]]:
    """Collect the ids of runs for which a message came too late."""
    runs: list[uuid.UUID | None] = []

    def note(run_id: uuid.UUID | None, **_: Any) -> None:
        runs.append(run_id)

    flow_late.connect(note)
    yield runs
    flow_late.disconnect(note)


def begun(number: int = 1) -> Run:
    """Start a run. The run has stored its request, which is not relayed yet."""
    with transaction.atomic():
        run = start(Obedient, Ruled(number), key=str(number))
    ship()
    take(stages.find(["rules.flow"])[0])
    run.refresh_from_db()
    return run


@contextmanager
def deployed(flow: type[Flow[Ruled, int]]) -> Iterator[None]:
    """Register `flow` as the present code of the flow."""
    forget_flow("rules.flow")
    for address in ("rules.flow", "rules.flow.steps"):
        stages.unregister(address)
    with at_hand(flow):
        yield


def do(ruled: Ruled) -> Ruled:
    return ruled


def outcome(run: Run) -> str:
    run.refresh_from_db()
    return run.outcome


def expire() -> None:
    """Make all messages expire now. The deadlines of their runs do not change."""
    past = clock("default") - MINUTE
    OutboxMessage.objects.update(expires_at=past)
    for model in (QueueMessage, InboxMessage):
        for row in model.objects.exclude(headers__isnull=True):
            row.headers[wire.EXPIRES] = wire.format_instant(past)
            row.save(update_fields=["headers"])


@pytest.mark.parametrize("where", ["outbox", "queue", "parked"])
def test_a_request_expires_with_its_deadline_and_nothing_is_buried(
    undone: list[int], where: str
) -> None:
    done: list[int] = []

    def broken_once(ruled: Ruled) -> Ruled:
        done.append(ruled.number)
        raise ValueError("broken")

    run = begun()
    with declared(broken_once, ask_for, name="rules.do") as stage:
        if where != "outbox":
            ship()
        if where == "parked":
            take(stage)
        done.clear()
        expire()
        with copies_dropped() as dropped:
            drain()
        assert done == [], "it is too late"
        assert dropped == []
        assert outcome(run) == Outcome.OPEN, "its deadline ends it"
        drain(ahead=2 * HOUR)
    assert outcome(run) == Outcome.FAILED
    assert undone == []
    assert not DeadLetter.objects.exists()


def test_a_request_that_died_expires_too(undone: list[int]) -> None:
    done: list[int] = []

    def broken(ruled: Ruled) -> Ruled:
        done.append(ruled.number)
        raise ValueError("broken")

    begun()
    with declared(broken, ask_for, name="rules.do"):
        drain(raises=False)
        bulk.finish(bulk.start("redeliver", {}))
        expire()
        drain()
        assert len(done) == 3, "it was redelivered in time, and processed too late"
        (letter,) = DeadLetter.objects.all()
        letter.headers[wire.EXPIRES] = "2000-01-01T00:00:00.000000+00:00"
        letter.resolution, letter.resolved_at = "open", None
        letter.save()
        operation = bulk.start("redeliver", {})
        bulk.finish(operation)
        drain()
    letter.refresh_from_db()
    assert len(done) == 3
    assert (letter.resolution, letter.resolved_by) == (
        "discarded",
        "revoked: its flow has gone on",
    )


@pytest.mark.parametrize("by", ["deadline", "signal", "signal without a deadline"])
def test_a_dead_letter_whose_flow_has_gone_on_is_closed_by_it(
    undone: list[int], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow has two dead letters: one of an answer, and one of a request without an
    undo. When a deadline or a signal continues the flow, both are closed."""
    if by == "signal without a deadline":
        monkeypatch.setattr(Obedient, "within", None)

    def broken(ruled: Ruled) -> Ruled:
        raise ValueError("broken")

    run = begun(2)
    with declared(broken, ask_for, name="rules.do"):
        drain(raises=False)
        FlowUndo.objects.all().delete()
        Run.objects.update(undos=0)
        headers = {
            "content-type": wire.JSON,
            wire.TICKET: wire.ticket(run.run_id, run.turn or uuid.uuid4()),
            wire.CORRELATION_ID: run.correlation_id,
        }
        put("rules.flow.steps", b'"nonsense"', headers)
        drain()
        assert DeadLetter.objects.filter(resolution="open").count() == 2
        if by != "deadline":
            with transaction.atomic():
                Obedient.signal("2", Over("that is enough"))
        drain(ahead=2 * HOUR)
        assert outcome(run) == Outcome.FAILED
        letters = DeadLetter.objects.values_list("resolution", "resolved_by")
        assert set(letters) == {("discarded", "revoked: its flow has gone on")}
        bulk.finish(bulk.start("restore", {}))
        drain()
    assert not DeadLetter.objects.filter(resolution="open").exists()


def test_a_message_with_the_correlation_id_of_nothing_is_dead_at_once(
    undone: list[int],
) -> None:
    for text in ("order 7", "signal;one;2;3"):
        with transaction.atomic():
            send_message("rules.flow.steps", None, headers={"correlation-id": text})
    drain()
    assert list(DeadLetter.objects.values_list("reason", "attempts")) == [
        ("ticket", 1),
        ("ticket", 1),
    ]


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(
    "ticket",
    ["signal;", "signal;x", "signal;x;yesterday;k", "signal;x;2026-01-01T00:00:00Z;"],
)
def test_a_malformed_ticket_of_a_signal_is_dead_at_once(ticket: str) -> None:
    put("rules.flow.steps", headers={**JSON, wire.TICKET: ticket})
    take(stages.find(["rules.flow.steps"])[0])
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("ticket", 1)


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(
    ("name", "value"), [("\xe9", "a"), ("", "a"), ("a", "b\nc"), ("a", "b" * 5000)]
)
def test_baggage_that_no_message_can_carry_is_dead_at_once(
    name: str, value: str
) -> None:
    caller = {wire.REPLY_TO: "another.steps", wire.TICKET: "1"}
    headers = {**JSON, **caller, wire.PROP + name: value}
    put("rules.flow", b'{"number": 1}', headers)
    take(stages.find(["rules.flow"])[0])
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("malformed_headers", 1)
    assert not Run.objects.exists()
    answer = OutboxMessage.objects.get(destination="another.steps")
    assert bytes(answer.body) == b'{"reason":"malformed_headers"}'


def test_a_request_that_is_unreadable_is_answered_at_once_and_revoked(
    undone: list[int],
) -> None:
    done: list[str] = []

    def reads_otherwise(remark: Remark) -> Ruled:
        done.append(remark.text)
        return Ruled(1)

    run = begun()
    with declared(reads_otherwise, ask_for.name, name="rules.do"):
        drain()
        assert outcome(run) == Outcome.FAILED, "without its deadline"
        (letter,) = DeadLetter.objects.all()
        assert letter.reason == "invalid_body"
        row = InboxMessage.objects.get(message_id=letter.message_id, stage="rules.do")
        assert row.revoked_at is not None
        bulk.finish(bulk.start("redeliver", {}))
        drain()
    assert (done, undone) == ([], [])


def test_a_dead_request_does_not_disarm_the_deadline(undone: list[int]) -> None:
    def broken(ruled: Ruled) -> Ruled:
        raise ValueError("broken")

    run = begun()
    with declared(broken, ask_for, name="rules.do"):
        drain(raises=False)
        assert DeadLetter.objects.get().reason == "attempts_exhausted"
        drain(ahead=2 * HOUR)
    assert outcome(run) == Outcome.FAILED
    assert undone == [], "it was not done"
    assert not DeadLetter.objects.filter(resolution="open").exists()


@pytest.mark.usefixtures("undone")
def test_repeated_time_outs_of_one_turn_store_one_message() -> None:
    run = begun()
    for _ in range(3):
        Run.objects.update(due_at=F("due_at") - 2 * HOUR)
        Deadlines(["default"]).tick()
    steps = OutboxMessage.objects.filter(destination="rules.flow.steps")
    assert steps.get().message_id == uuid.uuid5(run.turn or uuid.uuid4(), "deadline")


@contextmanager
def refusing(message_id: uuid.UUID) -> Iterator[None]:
    """Let the database refuse to store this message."""
    table = "django_txmsg_outboxmessage"
    create = [
        f"CREATE TRIGGER refusing BEFORE INSERT ON {table}"
        f" WHEN NEW.message_id = '{message_id.hex}'"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END"
    ]
    drop = ["DROP TRIGGER refusing"]
    if connection.vendor == "postgresql":
        create = [
            "CREATE FUNCTION refusing() RETURNS trigger LANGUAGE plpgsql"
            " AS $$BEGIN RAISE 'refused'; END$$",
            f"CREATE TRIGGER refusing BEFORE INSERT ON {table} FOR EACH ROW"
            f" WHEN (NEW.message_id = '{message_id}') EXECUTE FUNCTION refusing()",
        ]
        drop = [f"DROP TRIGGER refusing ON {table}", "DROP FUNCTION refusing()"]
    with connection.cursor() as cursor:
        for statement in create:
            cursor.execute(statement)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            for statement in drop:
                cursor.execute(statement)


@pytest.mark.usefixtures("undone")
def test_time_out_that_the_database_refuses_keeps_no_other_from_being_stored() -> None:
    runs = [begun(number) for number in range(3)]
    Run.objects.update(due_at=F("due_at") - 2 * HOUR)
    ids = [deadline_id(run.turn) for run in runs if run.turn is not None]
    steps = OutboxMessage.objects.filter(destination="rules.flow.steps")
    with refusing(ids[0]):
        Deadlines(["default"]).tick()
        assert set(steps.values_list("message_id", flat=True)) == set(ids[1:])
        Run.objects.update(due_at=F("due_at") - HOUR)
        Run.objects.filter(pk__in=[run.pk for run in runs[1:]]).update(due_at=None)
        with pytest.raises(DatabaseError, match="refused"):
            Deadlines(["default"]).tick()
    Deadlines(["default"]).tick()
    assert steps.count() == 3


def test_a_signal_after_the_end_is_late(
    undone: list[int], late: list[uuid.UUID | None]
) -> None:
    run = begun()
    with transaction.atomic():
        Obedient.signal("1", Remark("in time"))
    with declared(do, ask_for, name="rules.do"):
        drain()
        assert outcome(run) == Outcome.ANSWERED
        with transaction.atomic():
            Obedient.signal("1", Remark("too late"))
        # It was sent before the end, and was on its way.
        Run.objects.update(ended_at=F("ended_at") + HOUR)
        drain()
    assert len(late) == 1
    run.refresh_from_db()
    assert run.state == '{"number":1,"remarks":["in time"]}'
    assert undone == []


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("minutes", [-20, -10, 10])
def test_a_signal_reaches_a_new_run_of_a_used_key_whatever_its_hosts_clock(
    minutes: int, late: list[uuid.UUID | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with the same key has just ended. The signal overtakes the first message of
    the new run, and the clock of the signal's host is wrong."""
    with declared(do, ask_for, name="rules.do"):
        first = begun()
        drain()
        assert outcome(first) == Outcome.ANSWERED
        now = timezone.now
        with monkeypatch.context() as host, transaction.atomic():
            host.setattr(timezone, "now", lambda: now() + minutes * MINUTE)
            second = start(Obedient, Ruled(1), key="1")
            Obedient.signal("1", Remark("in time"))
        ship()
        take(stages.find(["rules.flow.steps"])[0])
        drain("rules.flow", "rules.flow.steps", ahead=2 * MINUTE)
        drain()
    second.refresh_from_db()
    assert '"remarks":["in time"]' in second.state
    assert (late, DeadLetter.objects.count()) == ([], 0)


def test_a_signal_may_take_an_optional_body() -> None:
    with at_hand(Lenient):
        with transaction.atomic():
            run = start(Lenient, Ruled(1), key="1")
            Lenient.signal("1", Remark("well"))
        drain("rules.lenient", "rules.lenient.steps")
    run.refresh_from_db()
    assert run.state == '{"number":1,"remarks":["well"]}'


def test_a_signal_during_the_undo_is_late(
    undone: list[int], late: list[uuid.UUID | None]
) -> None:
    run = begun()
    asked = OutboxMessage.objects.filter(destination="rules.do")
    asked.update(due_at=F("due_at") + HOUR)
    with transaction.atomic():
        cancel(run)
    ship()
    take(stages.find(["rules.flow.steps"])[0])
    run.refresh_from_db()
    assert run.waits_for == WaitsFor.UNDO
    with transaction.atomic():
        Obedient.signal("1", Remark("too late"))
    with declared(do, ask_for, name="rules.do"):
        drain()
    assert outcome(run) == Outcome.FAILED
    assert late == [run.run_id]
    assert '"remarks":[]' in run.state
    assert undone == [], "its request was revoked"


def test_a_receiver_that_fails_does_not_make_a_late_message_a_dead_letter(
    undone: list[int],
) -> None:
    """The receiver's query breaks the transaction in which it runs."""
    run = begun()
    told: list[uuid.UUID] = []

    def receiver(run_id: uuid.UUID, **_: Any) -> None:
        told.append(run_id)
        Run.objects.create(run_id=run_id, flow=run.flow)

    with transaction.atomic():
        cancel(run)
    ship()
    take(stages.find(["rules.flow.steps"])[0])
    with transaction.atomic():
        Obedient.signal("1", Remark("too late"))
    flow_late.connect(receiver)
    try:
        drain("rules.flow.steps")
    finally:
        flow_late.disconnect(receiver)
    assert told == [run.run_id]
    assert not DeadLetter.objects.exists()


@pytest.mark.usefixtures("undone")
def test_asking_or_waiting_needs_a_deadline() -> None:
    flow = Obedient()
    with pytest.raises(ConfigurationError, match="without a deadline"):
        flow.ask(ask_for, Ruled(1), then=flow.done)
    with pytest.raises(ConfigurationError, match="without a deadline"):
        flow.wait(then=flow.late)
    assert flow.wait(then=flow.late, within=None).within is None


@pytest.mark.usefixtures("undone")
def test_an_undo_is_registered_with_its_request() -> None:
    run = begun()
    undo = FlowUndo.objects.get(run=run)
    request = OutboxMessage.objects.get(destination="rules.do")
    assert (undo.destination, undo.request_id) == ("rules.undo", request.message_id)


@pytest.mark.usefixtures("undone")
def test_no_undo_is_registered_if_the_step_fails_after_it_has_asked() -> None:
    begun(-1)
    assert not FlowUndo.objects.exists()
    assert not OutboxMessage.objects.filter(destination="rules.do").exists()


@pytest.mark.usefixtures("undone")
def test_an_older_state_is_upgraded_when_it_is_read() -> None:
    run = begun(3)
    with deployed(Changed), declared(do, ask_for, name="rules.do"):
        drain()
        run.refresh_from_db()
    assert (run.answer, run.version, run.state) == ("303", 2, '{"amount":300}')


@pytest.mark.usefixtures("undone")
def test_a_renamed_step_is_found_by_its_former_name() -> None:
    run = begun()
    assert run.step == "done"
    with deployed(Changed), declared(do, ask_for, name="rules.do"):
        drain()
    assert outcome(run) == Outcome.ANSWERED
    last = FlowStep.objects.filter(run=run).order_by("id").last()
    assert last is not None
    assert last.step == "finished"


@dataclass
class Overruled:
    number: int


@shelved
class Narrowed(Flow[Ruled, int], name="rules.flow", within=HOUR):
    """The flow's code without one step, and with another type of reply."""

    number: int = 0
    remarks: list[str] = []

    @step
    def start(self, ruled: Ruled) -> Next[int]:
        return ruled.number

    @step
    def done(self, reply: Overruled) -> Next[int]:
        return reply.number


def lacking() -> list[str]:
    """Return the steps and types that `check --database default` reports as missing."""
    return [
        one.msg.partition("does not have: ")[2].rstrip(".")
        for one in check_databases(databases=["default"])
        if one.id == "txmsg.E064"
    ]


@pytest.mark.usefixtures("undone")
def test_check_finds_what_open_runs_wait_for_and_the_code_does_not_have() -> None:
    run = begun()
    begun(2)
    assert lacking() == [], "the code that runs them has all"
    with deployed(Narrowed):
        assert lacking() == [
            "the step 'late', tests.Ruled version 1, as step 'done' took it"
        ]
        with pytest.raises(SystemCheckError, match="2 open runs of flow"):
            call_command("check", tags=["database"], databases=["default"])
        assert check_databases(databases=["other"]) == []
    with deployed(Changed):
        assert lacking() == ["the step 'late'"], "the other has a former name"
        Run.objects.update(otherwise="", version=2)
        assert lacking() == []
    with deployed(Narrowed):
        assert "version 2 of its state" in lacking()[0]
    forget_flow("rules.flow")
    assert lacking() == ["the flow itself"]
    with txmsg(SERVICE="renamed", FORMER_SERVICES=["tests"]):
        assert lacking() == ["the flow itself"]
    with txmsg(SERVICE="another"):
        assert lacking() == []
    with transaction.atomic():
        run.end(Outcome.ANSWERED)
        run.save()
        Run.objects.exclude(pk=run.pk).delete()
    assert lacking() == [], "none waits any more"


@pytest.mark.usefixtures("undone")
def test_a_run_that_undoes_its_work_waits_for_no_step() -> None:
    run = begun()
    with transaction.atomic():
        cancel(run)
    ship()
    take(stages.find(["rules.flow.steps"])[0])
    run.refresh_from_db()
    assert run.waits_for == WaitsFor.UNDO
    with deployed(Narrowed), declared(do, ask_for, name="rules.do"):
        assert lacking() == []
        drain()
    assert outcome(run) == Outcome.FAILED


@pytest.mark.usefixtures("undone")
def test_a_run_that_goes_back_waits_for_the_step_to_which_it_goes() -> None:
    run = begun()
    with transaction.atomic():
        acts.act("go-back", run, acts.Given(to="start"))
    assert Run.objects.get().waits_for == WaitsFor.UNDO
    assert lacking() == []
    Run.objects.update(step="earlier")
    assert lacking() == ["the step 'earlier'"]


@pytest.mark.usefixtures("undone")
def test_no_steps_are_kept_without_history() -> None:
    with (
        txmsg(FLOWS={"HISTORY": False}),
        declared(do, ask_for, name="rules.do"),
    ):
        run = begun()
        drain()
    assert outcome(run) == Outcome.ANSWERED
    assert not FlowStep.objects.exists()


def remark(text: str) -> dict[str, Any]:
    """Let the deployed code process a signal, and return the state of the run."""
    with transaction.atomic():
        Obedient.signal("1", Remark(text))
    ship()
    take(stages.find(["rules.flow.steps"])[0])
    state: dict[str, Any] = json.loads(Run.objects.get().state)
    return state


@pytest.mark.usefixtures("undone")
def test_older_code_keeps_a_field_that_newer_code_has_added() -> None:
    begun()
    with deployed(Enlarged):
        remark("12345678901234567.89")
    with deployed(Obedient):
        assert remark("old")["remarks"] == ["old"]
    with deployed(Enlarged):
        remark("0.01")
    with deployed(Obedient):
        assert remark("new")["remarks"] == ["old", "new"]
    run = Run.objects.get()
    kept = Enlarged._declaration.decode(run.state, run.version)
    assert kept["amount"] == Decimal("12345678901234567.90")


def test_unknown_field_is_kept_beside_a_set_in_another_order() -> None:
    declared = Numbered._declaration
    stored = '{"numbers": [1, 2, 3, 4, 8], "amount": "0.1"}'
    flow = Numbered(**declared.decode(stored, 1))
    flow.numbers.remove(4)
    kept = json.loads(declared.encode(flow))
    assert sorted(kept.pop("numbers")) == [1, 2, 3, 8]
    assert kept == {"amount": "0.1"}


@pytest.mark.usefixtures("undone")
def test_former_name_that_is_an_alias_does_not_keep_an_old_value() -> None:
    begun()
    remark("old")
    with deployed(Aliased):
        remark("new")
    run = Run.objects.get()
    assert Aliased._declaration.decode(run.state, 1)["notes"] == ["old", "new"]
