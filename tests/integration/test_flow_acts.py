"""The five actions of operators on runs, executed by the command. Each is audited."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_txmsg import Message, Refuse, cancel_message, stages, wire
from django_txmsg.consuming import bulk_thread
from django_txmsg.dead_letters import burial
from django_txmsg.envelope.failure import Failure
from django_txmsg.errors import AlreadyResumed, AlreadyRunning
from django_txmsg.flows import Flow, Next, acts, cancel, resume, start, step
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.models import (
    AuditEntry,
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.run import Outcome, WaitsFor
from django_txmsg.rules.outbox import REDELIVERED
from django_txmsg.sending import pending
from django_txmsg.testing import drain
from tests.docs.pages import ROOT
from tests.running import committing, declared, put, ship, txmsg
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved
from tests.trips import Done, Order, Shop, Trip, begin, pay, trips, unpay, waiting

pytestmark = [committing, pytest.mark.usefixtures("impatient", "shop")]


@pytest.fixture
def shop() -> Iterator[None]:
    with trips():
        yield


def again(run: Run) -> Run:
    run.refresh_from_db()
    return run


def command(*arguments: object) -> str:
    out = io.StringIO()
    call_command("txmsg", "flows", *map(str, arguments), stdout=out)
    return out.getvalue()


def audit() -> list[str]:
    return list(AuditEntry.objects.order_by("pk").values_list("text", flat=True))


def fire() -> None:
    Deadlines(["default"])._keep("default")


def test_list_and_show_tell_what_runs_wait_for() -> None:
    none = "No open run matches. --state answered lists ended ones.\n"
    assert command("list") == none
    run = waiting()

    line = command("list", "--flow", "acts.trip", "--key", "A-1")
    assert f"{run.run_id}  acts.trip A-1: approved waits for " in line
    assert command("list", "--state", "undo stuck") == "No run matches.\n"
    assert command("list", "--older-than", "1h") == none
    (listed,) = json.loads(command("list", "--json"))["runs"]
    assert (listed["step"], listed["waits_for"]) == ("approved", "resume")
    shown = json.loads(command("show", run.run_id, "--json"))
    assert [one["step"] for one in shown["steps"]] == ["start", "booked", "paid"]
    assert shown["state"] == {"number": 1, "said": ["first", "first"]}
    assert [one["destination"] for one in shown["undos"]] == [
        "acts.unbook",
        "acts.unpay",
    ]
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    (row,) = re.findall(r"^\| `txmsg flows list` \|.*\|(.*)\|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == listed.keys()
    assert shown.keys() - listed.keys() == {"state", "steps", "undos"}
    text = command("show", run.run_id)
    assert 'paid, then resume: {"number": 1, "said": ["first", "first"]}' in text
    assert "undo 2 acts.unpay: registered" in text


def test_resume_continues_a_run_and_is_audited() -> None:
    run = waiting()

    command("resume", run.run_id, "--value", "true", "--why", "a call")
    with pytest.raises(CommandError, match="Nothing waits for this token any more"):
        command("resume", run.run_id, "--value", "true")
    drain()

    assert json.loads(again(run).answer) == "True ['first', 'first']"
    assert audit() == [f"Resumed run {run.run_id} of flow acts.trip: a call"]
    assert f"{run.run_id}  acts.trip A-1: answered" in command("show", run.run_id)


def test_run_whose_resume_is_discarded_can_be_resumed_again() -> None:
    run = waiting()
    assert run.turn is not None
    command("resume", run.run_id, "--value", "true")
    OutboxMessage.objects.filter(dispatched_at=None).update(body=b'"unreadable"')
    drain(raises=False)
    assert DeadLetter.objects.get().reason == "invalid_body"

    call_command("dead_letters", "discard", "--all", stdout=io.StringIO())
    with transaction.atomic():
        resume(wire.ticket(run.run_id, run.turn), True)
    drain()

    assert json.loads(again(run).answer) == "True ['first', 'first']"


@pytest.mark.parametrize("again_first", [True, False])
def test_run_takes_one_value_if_its_discarded_resume_is_restored(
    again_first: bool,
) -> None:
    run = waiting()
    assert run.turn is not None
    token = wire.ticket(run.run_id, run.turn)
    command("resume", run.run_id, "--value", "true")
    OutboxMessage.objects.filter(dispatched_at=None).update(body=b'"unreadable"')
    drain(raises=False)
    call_command("dead_letters", "discard", "--all", stdout=io.StringIO())
    if again_first:
        with transaction.atomic():
            resume(token, False)

    out = io.StringIO()
    with suppress(CommandError):  # it reports what it has skipped
        call_command("dead_letters", "restore", "--all", stdout=out)

    resolution = DeadLetter.objects.get().resolution
    assert resolution == ("discarded" if again_first else "open")
    if not again_first:
        with transaction.atomic(), pytest.raises(AlreadyResumed):
            resume(token, False)
        call_command("dead_letters", "discard", "--all", stdout=io.StringIO())
        with transaction.atomic():
            resume(token, False)
    drain()
    assert json.loads(again(run).answer) == "False ['first', 'first']"


def _dead_letter_of(message: OutboxMessage, stage: str = "") -> DeadLetter:
    """Bury a message, as the relay or `consume` does if the broker gives up on it."""
    with transaction.atomic():
        return burial.bury(
            using="default",
            message_id=message.message_id,
            stage=stage,
            broker="default",
            destination=message.destination,
            headers=message.headers | {wire.CONTENT_TYPE: message.content_type},
            body=bytes(message.body),
            reason="broker",
            failure=Failure.because("broker", "expired"),
            attempts=0,
        )


def _discard(*letters: DeadLetter) -> None:
    ids = [str(one.pk) for one in letters]
    call_command("dead_letters", "discard", *ids, stdout=io.StringIO())


def _resume_again(run: Run) -> None:
    assert run.turn is not None
    with transaction.atomic():
        resume(wire.ticket(run.run_id, run.turn), False)


@pytest.mark.parametrize("place", ["inbox", "dead letter"])
def test_run_is_not_resumed_again_while_a_copy_of_its_resume_is_left(
    place: str,
) -> None:
    run = waiting()
    steps = "acts.trip.steps"
    command("resume", run.run_id, "--value", "true")
    message = OutboxMessage.objects.latest("pk")
    InboxMessage.objects.record(
        steps, [Message(id=message.message_id, destination=steps, body=None)]
    )
    copy, last = _dead_letter_of(message), None
    if place == "dead letter":
        last = _dead_letter_of(message, steps)
        row = InboxMessage.objects.get(message_id=message.message_id)
        InboxMessage.objects.mark_dead(row.pk, "unreadable")

    _discard(copy)

    with pytest.raises(AlreadyResumed):
        _resume_again(run)
    if last is not None:
        _discard(last)
        _resume_again(run)


def test_run_is_not_resumed_again_if_an_operators_answer_is_discarded() -> None:
    run = waiting()
    command("resume", run.run_id, "--value", "true")
    command("answer", run.run_id)
    answer = OutboxMessage.objects.latest("pk")
    assert answer.headers[wire.TYPE].startswith("txmsg.Dead")

    _discard(_dead_letter_of(answer))

    with pytest.raises(AlreadyResumed):
        _resume_again(run)


def test_resume_and_time_out_of_a_run_are_restored_together() -> None:
    run = waiting()
    command("resume", run.run_id, "--value", "true")
    command("time-out", run.run_id)
    fire()
    OutboxMessage.objects.filter(dispatched_at=None).update(body=b'"unreadable"')
    drain(raises=False)
    letters = DeadLetter.objects.filter(reason="invalid_body")
    _discard(*letters)

    call_command("dead_letters", "restore", "--all", stdout=io.StringIO())

    assert [one.resolution for one in letters.all()] == ["open", "open"]


def test_discard_of_two_resumes_queries_their_runs_together() -> None:
    letters = []
    for run in [waiting(key) for key in ("A-1", "A-2", "A-3")]:
        command("resume", run.run_id, "--value", "true")
        letters.append(_dead_letter_of(OutboxMessage.objects.latest("pk")))

    with CaptureQueriesContext(connection) as alone:
        _discard(letters[0])
    with CaptureQueriesContext(connection) as together:
        _discard(*letters[1:])

    about_runs = [
        len([one for one in queries if "txmsg_run" in one["sql"]])
        for queries in (alone, together)
    ]
    assert about_runs[0] == about_runs[1] > 0
    assert not Run.objects.exclude(resumed_at=None).exists()


@pytest.mark.postgresql
def test_resume_is_not_discarded_while_another_transaction_holds_its_run() -> None:
    """A signal may hold the run, and leave it waiting for the same turn."""
    run = waiting()
    command("resume", run.run_id, "--value", "true")
    letter = _dead_letter_of(OutboxMessage.objects.latest("pk"))
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                assert Run.objects.locked(run.run_id)
                held.set()
                assert go_on.wait(60)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            assert held.wait(60)
            with pytest.raises(CommandError, match="1 skipped"):
                _discard(letter)
        finally:
            go_on.set()
        holding.result(60)
    letter.refresh_from_db()
    assert letter.resolution == "open"

    _discard(letter)
    _resume_again(run)


def _asked(key: str = "A-1") -> tuple[Run, OutboxMessage]:
    """Return a run that has asked for a payment, and the request, which is sent."""
    run = begin(key)
    for name in ("acts.trip", "acts.book", "acts.trip.steps"):
        ship()
        take(stages.find([name])[0])
    ship()
    return run, OutboxMessage.objects.get(destination="acts.pay")


def test_discarded_copy_of_a_request_that_was_processed_sends_no_dead() -> None:
    run, request = _asked()
    take(stages.find(["acts.pay"])[0])

    _discard(_dead_letter_of(request))

    types = [one.headers.get(wire.TYPE, "") for one in OutboxMessage.objects.all()]
    assert not [one for one in types if one.startswith("txmsg.Dead")]
    drain()
    assert again(run).waits_for == WaitsFor.RESUME


def test_parked_request_is_never_processed_if_a_copy_of_it_is_discarded() -> None:
    run, request = _asked()
    Shop.error = ValueError("no money")
    take(stages.find(["acts.pay"])[0])
    Shop.error = None
    assert InboxMessage.objects.get(stage="acts.pay").due_at is not None

    _discard(_dead_letter_of(request))
    drain()

    assert Shop.did == ["book", "unbook"]
    assert json.loads(again(run).answer) == {"reason": "discarded"}


def test_show_says_why_a_run_has_failed() -> None:
    cancelled, answered = waiting("A-1"), waiting("A-2")
    assert "\n  answer" not in command("show", cancelled.run_id)
    assert (
        json.loads(command("show", cancelled.run_id, "--json"))["answer_type"] is None
    )
    command("cancel", cancelled.run_id, "--why", "closed")
    command("resume", answered.run_id, "--value", "true")
    drain()

    why = '  answer txmsg.Cancelled;v=1;min=1: {"why": "closed"}\n'
    assert why in command("show", cancelled.run_id)
    facts = json.loads(command("show", cancelled.run_id, "--json"))
    assert facts["answer"] == {"why": "closed"}
    assert facts["answer_type"] == "txmsg.Cancelled;v=1;min=1"
    assert "  answer: \"True ['first', 'first']\"\n" in command("show", answered.run_id)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ((), "takes a value"),
        (("--value", '"yes"'), r"Step 'approved' takes bool: \$: bool_type"),
        (("--value", "{"), "JSON"),
    ],
)
def test_resume_refuses_a_value_that_the_step_does_not_take(
    value: tuple[str, ...], error: str
) -> None:
    run = waiting()
    with pytest.raises(CommandError, match=error):
        command("resume", run.run_id, *value)
    assert again(run).resumed_at is None
    assert audit() == []


def test_time_out_fires_the_deadline_of_a_run_that_has_none() -> None:
    run = waiting()
    assert run.due_at is None

    command("time-out", run.run_id)
    fire()
    drain()

    assert json.loads(again(run).answer) == "TimedOut"
    assert Shop.did == ["book", "pay", "unpay", "unbook"]


@pytest.mark.parametrize("act", ["time-out", "resume"])
def test_act_is_refused_if_the_time_out_is_stored_already(act: str) -> None:
    run = waiting()
    command("time-out", run.run_id)
    fire()
    with pytest.raises(CommandError, match="The time-out of run"):
        command(act, run.run_id, "--value", "true")
    assert len(audit()) == 1


def test_run_of_a_former_service_name_times_out() -> None:
    run = waiting()
    Run.objects.update(service="before")

    with txmsg(FORMER_SERVICES=("before",)):
        command("time-out", run.run_id)
        fire()
        drain()

    assert json.loads(again(run).answer) == "TimedOut"


def test_open_run_of_a_former_service_name_holds_its_key() -> None:
    run = waiting("A-1")
    Run.objects.update(service="before")

    with txmsg(FORMER_SERVICES=("before",)), transaction.atomic():
        found = start(Trip, Order(2), key="A-1", on_conflict="skip")
        with pytest.raises(AlreadyRunning):
            start(Trip, Order(2), key="A-1")
        other = start(Trip, Order(2), key="A-2")

    assert found == run
    assert list(Run.objects.order_by("pk")) == [run, other]


def test_runs_of_a_former_service_name_go_back_together() -> None:
    run = waiting()
    Run.objects.update(service="before")

    which = bulk_thread.filters_of("acts.trip", "approved", "booked")
    assert not bulk_thread.matching(which, "default")
    with txmsg(FORMER_SERVICES=("before",)):
        assert list(bulk_thread.matching(which, "default")) == [run]


def test_answer_as_failed_gives_up_the_request_and_drops_its_late_answer() -> None:
    run = begin()
    take(stages.find(["acts.trip"])[0]) if ship() else None
    assert again(run).waits_for == WaitsFor.ANSWER

    command("answer", run.run_id)
    ship()
    take(stages.find(["acts.trip.steps"])[0])
    drain()

    assert json.loads(again(run).answer) == "Dead answered_as_failed"
    assert run.outcome == Outcome.FAILED
    assert Shop.did in ([], ["book", "unbook"])
    assert audit() == [f"Answered as failed run {run.run_id} of flow acts.trip."]


@pytest.mark.parametrize("act", ["answer", "go-back", "time-out"])
def test_an_act_closes_the_dead_letter_of_the_request_that_a_run_waits_for(
    act: str,
) -> None:
    Shop.error = ValueError("no money")
    run = waiting()
    letter = DeadLetter.objects.get()
    assert (letter.destination, letter.resolution) == ("acts.pay", "open")
    Shop.error = None

    command(act, run.run_id, "--to", "booked")
    fire()
    drain()

    letter.refresh_from_db()
    assert letter.resolution == "discarded"
    with pytest.raises(CommandError, match="its flow has gone on"):
        call_command("dead_letters", "redeliver", str(letter.pk))
    drain()
    again(run)
    if act == "go-back":
        assert (run.waits_for, Shop.did) == (WaitsFor.RESUME, ["book", "pay"])
    else:
        assert (run.outcome, Shop.did) == (Outcome.FAILED, ["book", "unbook"])


def test_cancel_undoes_a_run() -> None:
    run = waiting()
    command("cancel", run.run_id, "--why", "closed")
    drain()
    assert json.loads(again(run).answer) == {"why": "closed"}
    assert Shop.did == ["book", "pay", "unpay", "unbook"]


def test_run_waits_on_if_its_dead_undo_is_discarded_and_says_what_to_do() -> None:
    def unpaid(order: Order) -> None:
        raise ValueError("not now")

    run = waiting()
    stages.unregister("acts.unpay")
    with declared(unpaid, unpay, name="acts.unpay", undoes=pay):
        command("cancel", run.run_id)
        drain(raises=False)
    assert DeadLetter.objects.get().reason == "attempts_exhausted"
    call_command("dead_letters", "discard", "--all", stdout=io.StringIO())
    drain()
    assert again(run).waits_for == WaitsFor.UNDO
    advice = "Discard the dead letter only if its reason is undo_in_doubt"
    with pytest.raises(CommandError, match=advice):
        command("cancel", run.run_id)


def _undo(run: Run) -> uuid.UUID:
    command("cancel", run.run_id)
    ship()
    take(stages.find(["acts.trip.steps"])[0])
    found = again(run).request_id
    assert found is not None
    return found


def _resumed(run: Run) -> uuid.UUID:
    command("resume", run.run_id, "--value", "true")
    return OutboxMessage.objects.latest("pk").message_id


def _timed_out(run: Run) -> uuid.UUID:
    command("time-out", run.run_id)
    fire()
    return OutboxMessage.objects.latest("pk").message_id


@pytest.mark.parametrize("stored", [_undo, _resumed, _timed_out])
def test_message_that_a_run_waits_for_cannot_be_cancelled(
    stored: Callable[[Run], uuid.UUID],
) -> None:
    run = waiting()
    message_id = stored(run)

    with pytest.raises(CommandError, match="or a run of a flow waits for it"):
        call_command("txmsg", "cancel", str(message_id))

    drain()
    assert again(run).ended_at is not None


def test_first_message_of_a_started_run_cannot_be_cancelled() -> None:
    run = begin()
    assert not cancel_message(run.run_id)
    drain()
    assert again(run).step == "approved"


@pytest.mark.parametrize("replay_id", ["", f"{REDELIVERED}7-1"])
def test_run_gets_dead_if_its_request_is_cancelled(replay_id: str) -> None:
    """Also if its dead letter was redelivered, and waits to be sent again."""
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    request_id = again(run).request_id
    assert request_id is not None
    rows = OutboxMessage.objects.filter(message_id=request_id)
    rows.update(replay_id=replay_id)
    with transaction.atomic():
        assert cancel_message(request_id)
        transaction.set_rollback(True)
    assert OutboxMessage.objects.filter(dispatched_at=None).count() == 1

    call_command("txmsg", "cancel", str(request_id), "--why", "sold out")
    drain()

    assert again(run).outcome == Outcome.FAILED
    assert (json.loads(run.answer), Shop.did) == ("Dead cancelled", [])
    answer = OutboxMessage.objects.filter(destination="acts.trip.steps").earliest("pk")
    assert json.loads(bytes(answer.body)) == {"reason": "cancelled"}
    assert answer.correlation_id == run.correlation_id


def test_cancel_in_a_stage_that_sends_by_its_broker_is_answered_if_it_fails() -> None:
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])

    def cancels(message: Message) -> None:
        request_id = again(run).request_id
        assert request_id is not None
        assert cancel_message(request_id)
        raise Refuse("after all")

    with declared(cancels, transaction="broker_only") as stage:
        put(stage.destination)
        take(stage)
    drain()

    assert json.loads(again(run).answer) == "Dead cancelled"


def test_request_that_arrives_after_its_cancel_is_not_executed() -> None:
    """A relay has sent the request and received no answer from the broker."""
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    ship()
    rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
    rows.update(dispatched_at=None)

    assert cancel_message(rows.get().message_id)
    drain()

    assert json.loads(again(run).answer) == "Dead cancelled"
    assert Shop.did == []


@pytest.mark.postgresql
def test_cancel_does_not_wait_for_the_handler_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stage answers, and the later statements of the view wait as long as before.
    The first time, the handler's row is new, and no other transaction sees it."""
    monkeypatch.setattr(pending, "PATIENCE", 0.1)
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    row = OutboxMessage.objects.get(message_id=again(run).request_id)
    handler: Any = connection.copy()
    handler.set_autocommit(False)
    try:
        with handler.cursor() as cursor:
            cursor.execute(
                "INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,"
                " correlation_id, service, deliveries, attempts, first_received_at,"
                " last_received_at, last_error) VALUES ('acts.book', %s, 'acts.book',"
                " '', '', 1, 1, now(), now(), '')",
                [row.message_id],
            )
        with transaction.atomic():
            assert cancel_message(row.message_id)
            with connection.cursor() as cursor:
                cursor.execute("SHOW lock_timeout")
                assert cursor.fetchone() == ("0",)
    finally:
        handler.close()
    row.refresh_from_db()
    assert row.cancelled_at is not None
    assert not OutboxMessage.objects.filter(destination="acts.trip.steps").exists()


@shelved
class Charge(Flow[Order, str], name="acts.charge", within=dt.timedelta(hours=1)):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.ask(pay, order, then=self.paid)

    @step
    def paid(self, done: Done) -> Next[str]:
        return done.by


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("mode", ["none", "best_effort_1pc"])
def test_stage_that_runs_without_a_lock_answers_its_cancelled_request(
    mode: str, failures: int
) -> None:
    """Also if the request was parked after a failure, and is claimed again."""
    charging, ends = threading.Event(), threading.Event()
    left = [None] * failures

    def charge(order: Order) -> Done:
        if left:
            left.pop()
            raise ValueError("not now")
        charging.set()
        assert ends.wait(30)
        return Done("charged")

    def work() -> None:
        take(stage, 1 + failures)
        connections.close_all()

    stages.unregister("acts.pay")
    with at_hand(Charge), declared(charge, pay, name="acts.pay", transaction=mode):
        (stage,) = stages.find(["acts.pay"])
        with transaction.atomic():
            run = start(Charge, Order(1))
        ship()
        take(stages.find(["acts.charge"])[0])
        ship()
        rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
        rows.update(dispatched_at=None)  # its relay got no answer from the broker
        with ThreadPoolExecutor() as pool:
            worker = pool.submit(work)
            assert charging.wait(30)
            assert cancel_message(rows.get().message_id)
            ends.set()
            worker.result()
        drain()

    assert json.loads(again(run).answer) == "charged"


def test_request_that_is_parked_at_an_unlocked_stage_is_not_executed_again() -> None:
    charged: list[Order] = []

    def charge(order: Order) -> Done:
        charged.append(order)
        raise ValueError("not now")

    stages.unregister("acts.pay")
    with at_hand(Charge), declared(charge, pay, name="acts.pay", transaction="none"):
        with transaction.atomic():
            run = start(Charge, Order(1))
        ship()
        take(stages.find(["acts.charge"])[0])
        ship()
        take(stages.find(["acts.pay"])[0])
        rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
        rows.update(dispatched_at=None)  # its relay got no answer from the broker
        assert cancel_message(rows.get().message_id)
        drain()

    assert json.loads(again(run).answer) == {"reason": "cancelled"}
    assert len(charged) == 1


@pytest.mark.parametrize("replay_id", ["again", "new/copies"])
def test_cancel_of_a_replay_does_not_answer_the_first_request(replay_id: str) -> None:
    """The first request still waits in its queue: its stage is paused, for example."""
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    ship()
    rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
    replayed = rows.get()
    replayed.pk, replayed.replay_id, replayed.dispatched_at = None, replay_id, None
    if replay_id != "again":
        replayed.message_id = uuid.uuid4()
    OutboxMessage.objects.bulk_create([replayed])

    assert cancel_message(replayed.message_id)
    drain()

    assert (again(run).step, Shop.did) == ("approved", ["book", "pay"])


def test_request_of_a_removed_broker_can_be_cancelled() -> None:
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
    rows.update(broker="removed")

    assert cancel_message(rows.get().message_id)
    assert rows.get().cancelled_at is not None
    assert not OutboxMessage.objects.filter(destination="acts.trip.steps").exists()


def test_request_that_has_arrived_is_not_executed_after_its_cancel() -> None:
    """A relay has sent the request and died before it recorded that."""
    run = begin()
    ship()
    take(stages.find(["acts.trip"])[0])
    ship()
    rows = OutboxMessage.objects.filter(message_id=again(run).request_id)
    rows.update(dispatched_at=None)
    InboxMessage.objects.record(
        "acts.book",
        [Message(id=rows.get().message_id, destination="acts.book", body=None)],
    )

    assert cancel_message(rows.get().message_id)
    drain()

    assert again(run).outcome == Outcome.FAILED
    assert Shop.did == []


def test_go_back_undoes_what_came_later_and_calls_the_step_again() -> None:
    run = waiting()
    Shop.by = "second"

    command("go-back", run.run_id, "--to", "booked", "--why", "wrong price")
    assert again(run).waits_for == WaitsFor.UNDO
    drain()

    assert Shop.did == ["book", "pay", "unpay", "pay"]
    assert again(run).waits_for == WaitsFor.RESUME
    assert json.loads(run.state) == {"number": 1, "said": ["first", "second"]}
    history = FlowStep.objects.filter(run=run).order_by("pk")
    assert [(one.step, one.left) for one in history] == [
        ("start", False),
        ("booked", True),
        ("paid", True),
        ("go back", False),
        ("undo", False),
        ("booked", False),
        ("paid", False),
    ]
    command("resume", run.run_id, "--value", "true")
    drain()
    assert json.loads(again(run).answer) == "True ['first', 'second']"
    assert audit()[0] == (
        f"Sent back to step booked run {run.run_id} of flow acts.trip: wrong price"
    )


def test_go_back_to_the_start_undoes_everything_and_begins_again() -> None:
    run = waiting()

    command("go-back", run.run_id, "--to", "start", "--value", '{"number": 7}')
    drain()

    assert Shop.did == ["book", "pay", "unpay", "unbook", "book", "pay"]
    assert json.loads(again(run).state)["number"] == 7
    open_undos = FlowUndo.objects.filter(run=run, confirmed_at=None)
    assert [one.destination for one in open_undos.order_by("number")] == [
        "acts.unbook",
        "acts.unpay",
    ]
    command("cancel", run.run_id)
    drain()
    assert again(run).outcome == Outcome.FAILED
    assert Shop.did[6:] == ["unpay", "unbook"]


def test_go_back_cancels_the_request_that_has_not_been_sent() -> None:
    run = begin()
    for name in ("acts.trip", "acts.book", "acts.trip.steps"):
        ship()
        take(stages.find([name])[0])
    asked = OutboxMessage.objects.get(destination="acts.pay")
    command("go-back", run.run_id, "--to", "booked")
    drain()
    asked.refresh_from_db()
    assert asked.cancelled_at is not None
    assert asked.dispatched_at is None
    assert again(run).step == "approved"
    assert Shop.did == ["book", "pay"]


def test_a_second_go_back_is_from_the_new_history() -> None:
    run = waiting()
    left = FlowStep.objects.get(run=run, step="paid")
    command("go-back", run.run_id, "--to", "booked")
    drain()

    with pytest.raises(CommandError, match="cannot go back"):
        command("go-back", run.run_id, "--to", left.pk)
    command("go-back", run.run_id, "--to", "paid")
    drain()

    assert Shop.did == ["book", "pay", "unpay", "pay"], "paid again, nothing to undo"
    command("go-back", run.run_id, "--to", "booked")
    drain()
    assert Shop.did[4:] == ["unpay", "pay"]
    assert json.loads(again(run).state)["said"] == ["first", "first"]


def test_run_whose_history_began_later_does_not_go_back_to_its_first_row() -> None:
    run = begin()
    with txmsg(FLOWS={"HISTORY": False}):
        for name in ("acts.trip", "acts.book", "acts.trip.steps"):
            ship()
            take(stages.find([name])[0])
    drain()
    assert again(run).step == "approved"

    with pytest.raises(CommandError, match="the state before it is unknown"):
        command("go-back", run.run_id, "--to", "paid")

    assert FlowStep.objects.get(run=run).left is False
    assert (again(run).waits_for, Shop.did) == (WaitsFor.RESUME, ["book", "pay"])


def test_run_cancelled_while_it_goes_back_is_undone_and_does_not_go_on() -> None:
    run = waiting()
    command("go-back", run.run_id, "--to", "booked")
    with transaction.atomic():
        cancel(again(run), "never mind")
    ship()
    take(stages.find(["acts.trip.steps"])[0])
    drain()

    assert again(run).outcome == Outcome.FAILED
    assert json.loads(run.answer) == {"why": "never mind"}
    assert Shop.did == ["book", "pay", "unpay", "unbook"]


def test_go_back_without_a_step_says_what_to_give() -> None:
    run = waiting()
    with pytest.raises(CommandError, match="required: --to"):
        command("go-back", run.run_id)
    assert again(run).waits_for == WaitsFor.RESUME


def test_go_back_without_the_message_of_the_step_needs_its_value() -> None:
    run = waiting()
    OutboxMessage.objects.all().delete()

    with pytest.raises(CommandError, match="give the value of the step"):
        command("go-back", run.run_id, "--to", "booked")
    assert again(run).waits_for == WaitsFor.RESUME
    with pytest.raises(CommandError, match="by: missing"):
        command("go-back", run.run_id, "--to", "booked", "--value", "{}")
    command("go-back", run.run_id, "--to", "booked", "--value", '{"by": "hand"}')
    drain()

    assert json.loads(again(run).state)["said"] == ["hand", "first"]


@pytest.mark.parametrize("act", ["resume", "time-out", "cancel", "answer", "go-back"])
def test_no_act_changes_a_run_that_has_ended(act: str) -> None:
    run = waiting()
    command("resume", run.run_id, "--value", "true")
    drain()
    before = Run.objects.values().get(pk=run.pk)

    with pytest.raises(CommandError, match="has ended"):
        command(act, run.run_id, "--to", "paid", "--value", "true")

    assert Run.objects.values().get(pk=run.pk) == before
    assert len(audit()) == 1


def test_acts_on_many_runs_need_a_choice_and_are_rated() -> None:
    runs = [waiting(f"A-{number}") for number in range(3)]
    with pytest.raises(CommandError, match="say --all"):
        command("cancel")
    assert command("cancel", "--flow", "acts.trip", "--dry-run") == "3 to cancel.\n"
    for option in ("--flow", "--key", "--step", "--older-than", "--value"):
        with pytest.raises(CommandError, match=r"is blank|not a duration"):
            command("cancel", "--all", option, "")
    with pytest.raises(CommandError, match="unrecognized arguments: --limit"):
        command("cancel", "--flow", "acts.trip", "--limit=1")
    for rate in ("nan", "0"):
        with pytest.raises(CommandError, match="greater than zero"):
            command("cancel", "--flow", "acts.trip", "--rate", rate)
    for more in ([], ["--dry-run"]):
        with pytest.raises(CommandError, match="No run matches"):
            command("cancel", "--flow", "acts.tirp", *more)
        with pytest.raises(CommandError, match="No run 00000000"):
            command("cancel", f"{0:032}", *more)
    assert audit() == []

    command("go-back", "--step", "approved", "--to", "paid", "--rate", "50")
    drain()

    assert len(audit()) == 3
    assert {again(run).waits_for for run in runs} == {WaitsFor.RESUME}
    with pytest.raises(CommandError, match="No run"):
        command("cancel", "01234567-89ab-cdef-0123-456789abcdef")


def test_run_that_goes_on_after_the_choice_is_left_alone() -> None:
    first, second = waiting("A-1"), waiting("A-2")

    class Terminal(io.StringIO):
        """When the command reports the first run, the second run goes on."""

        def write(self, text: str) -> int:
            with transaction.atomic():
                to_paid = acts.Given(to="paid")
                acts.act("go-back", Run.objects.get(pk=second.pk), to_paid)
            return super().write(text)

    with pytest.raises(CommandError, match=f"run {second.run_id} has gone on"):
        call_command("txmsg", "flows", "cancel", "--all", stdout=Terminal())
    drain()

    assert again(first).outcome == Outcome.FAILED
    assert again(second).waits_for == WaitsFor.RESUME


def test_an_act_that_is_rolled_back_leaves_no_trace() -> None:
    run = waiting()
    sent = OutboxMessage.objects.count()
    before = list(FlowStep.objects.values_list("pk", "left"))

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if all(word in sql.lower() for word in ("insert into", "auditentry")):
            raise RuntimeError("no audit")
        return execute(sql, *rest)

    with (
        connections["default"].execute_wrapper(refuse),
        pytest.raises(RuntimeError),
    ):
        command("go-back", run.run_id, "--to", "booked")

    assert again(run).waits_for == WaitsFor.RESUME
    assert OutboxMessage.objects.count() == sent
    assert list(FlowStep.objects.values_list("pk", "left")) == before
