"""Flows: each request is answered once. Each failed run is undone once, newest step
first."""

from __future__ import annotations

import datetime as dt
import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from django.db import connection, connections, transaction
from django.db.models import F, Model
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_txmsg import (
    Destination,
    Message,
    RedeliveryPolicy,
    Refuse,
    cancel_message,
    message_type,
    outbox_session,
    send_message,
    stages,
    upgrade,
    wire,
)
from django_txmsg.checks.stages import check
from django_txmsg.dead_letters import bulk, burial, resolution
from django_txmsg.errors import (
    ConfigurationError,
    DuplicateMessage,
    FlowError,
    TxmsgError,
)
from django_txmsg.flows import (
    AlreadyResumed,
    AlreadyRunning,
    Answers,
    Cancelled,
    Dead,
    Flow,
    Next,
    TimedOut,
    acts,
    cancel,
    going,
    resume,
    signal,
    start,
    step,
)
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.models import (
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.queue import QueueMessage
from django_txmsg.models.run import Outcome, WaitsFor
from django_txmsg.monitoring import retention
from django_txmsg.sending.outbox import encoded
from django_txmsg.signals import flow_late
from django_txmsg.testing import drain
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.running import (
    committing,
    declared,
    put,
    running,
    send,
    ship,
    txmsg,
)
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.usefixtures("impatient", "shop")]

MINUTE = dt.timedelta(minutes=1)
HOUR = dt.timedelta(hours=1)
DAY = dt.timedelta(days=1)


@dataclass
class PlaceOrder:
    number: str
    rest: str = ""


@dataclass
class Reserve:
    number: str


@dataclass
class Reserved:
    shelf: str


@dataclass
class SoldOut:
    number: str


@dataclass
class Placed:
    number: str
    shelf: str


@dataclass
class Stop:
    why: str


@dataclass
class Note:
    text: str


Answer = Placed | SoldOut | Cancelled

stock_reserve = Destination("shop.reserve", Reserve, reply=Reserved | SoldOut)
stock_release = Destination("shop.release", Reserve)
invoice = Destination("shop.invoice", Reserve)
invoice_void = Destination("shop.void", Reserve)


@shelved
class Checkout(Flow[PlaceOrder, Answer], name="shop.checkout", within=5 * MINUTE):
    number: str = ""
    shelf: str = ""
    notes: list[str] = []

    @step
    def start(self, order: PlaceOrder) -> Next[Answer]:
        self.number = order.number
        Order.objects.create(number=order.number)
        return self.ask(
            stock_reserve,
            Reserve(order.number),
            then=self.reserved,
            undo=stock_release,
            otherwise=self.expired,
        )

    @step
    def reserved(self, reply: Reserved | SoldOut) -> Next[Answer]:
        if isinstance(reply, SoldOut):
            return self.fail(reply)
        self.shelf = reply.shelf
        wait = self.wait(then=self.approved, within=30 * DAY, otherwise=self.expired)
        Order.objects.filter(number=self.number).update(note=wait.token)
        return wait

    @step
    def approved(self, yes: bool) -> Next[Answer]:
        return Placed(self.number, self.shelf) if yes else self.expired()

    @step
    def expired(self, why: TimedOut | Dead | None = None) -> Next[Answer]:
        return self.fail(SoldOut(self.number))

    @signal
    def stopped(self, by: Stop) -> Next[Answer]:
        return self.fail(Cancelled(by.why))

    @signal
    def noted(self, note: Note) -> None:
        self.notes = [*self.notes, note.text]


class Stock:
    """The service that answers the flow. It records each request as an effect."""

    said: ClassVar[list[str]] = []
    answer: ClassVar[Any] = None

    @classmethod
    def reserve(cls, request: Reserve) -> Reserved | SoldOut:
        Effect.objects.create(name=f"reserve {request.number}", message_id="")
        if isinstance(cls.answer, Exception):
            raise cls.answer
        return cls.answer or Reserved("A7")

    @staticmethod
    def release(request: Reserve) -> None:
        Effect.objects.create(name=f"release {request.number}", message_id="")


def reserve(request: Reserve) -> Reserved | SoldOut:
    return Stock.reserve(request)


def release(request: Reserve) -> None:
    Stock.release(request)


@pytest.fixture
def shop() -> Iterator[None]:
    Stock.answer = None
    with ExitStack() as stack:
        stack.enter_context(at_hand(Checkout))
        stages.stage(stock_reserve)(reserve)
        stages.stage(stock_release, undoes=stock_reserve)(release)
        stack.callback(stages.unregister, "shop.reserve")
        stack.callback(stages.unregister, "shop.release")
        yield


def place(number: str = "1", **more: Any) -> Run:
    with transaction.atomic():
        return start(Checkout, PlaceOrder(number), key=number, **more)


def again(run: Run) -> Run:
    run.refresh_from_db()
    return run


def effects() -> list[str]:
    return list(Effect.objects.values_list("name", flat=True))


def token(number: str = "1") -> str:
    return Order.objects.get(number=number).note


def say(yes: object, number: str = "1") -> None:
    with transaction.atomic():
        resume(token(number), yes)


def operate(kind: str, **options: Any) -> int:
    """Apply an operator's action to all dead letters, and return their number."""
    return bulk.finish(bulk.start(kind, {}, **options)).done


def answered(run: Run) -> Any:
    assert again(run).outcome == Outcome.ANSWERED
    return json.loads(run.answer)


def failed(run: Run) -> dict[str, Any]:
    assert again(run).outcome == Outcome.FAILED
    assert not FlowUndo.objects.filter(run=run, confirmed_at=None).exists()
    return json.loads(run.answer)


def test_a_run_asks_waits_and_answers() -> None:
    run = place()
    drain()
    assert (again(run).waits_for, run.step) == (WaitsFor.RESUME, "approved")
    assert json.loads(run.state) == {"number": "1", "shelf": "A7", "notes": []}

    say(True)
    drain()

    assert answered(run) == {"number": "1", "shelf": "A7"}
    assert effects() == ["reserve 1"]
    steps = FlowStep.objects.filter(run=run).order_by("id")
    assert [one.step for one in steps] == ["start", "reserved", "approved"]
    assert not FlowUndo.objects.exists(), "an answer forgets the undos"


def test_flow_starts_only_if_the_callers_transaction_commits() -> None:
    with transaction.atomic():
        start(Checkout, PlaceOrder("1"))
        transaction.set_rollback(True)
    drain()
    assert not Run.objects.exists()
    assert not Order.objects.exists()


def test_second_run_of_an_open_key_is_refused() -> None:
    run = place()
    with pytest.raises(AlreadyRunning) as raised, transaction.atomic():
        start(Checkout, PlaceOrder("2"), key="1")
    assert raised.value.run_id == run.run_id
    assert place(on_conflict="skip").pk == run.pk
    drain()
    say(True)
    drain()
    Order.objects.all().delete()
    assert place().pk != run.pk


@pytest.mark.postgresql
@pytest.mark.parametrize("on_conflict", ["error", "skip"])
def test_start_at_repeatable_read_cannot_see_a_run_of_a_later_transaction(
    on_conflict: Any,
) -> None:
    def begin() -> Any:
        return start(Checkout, PlaceOrder("2"), key="1", on_conflict=on_conflict)

    def begin_late() -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                cursor.execute("SELECT 1")
            with ThreadPoolExecutor(1) as elsewhere:
                elsewhere.submit(placed_elsewhere).result(30)
            begin()

    with pytest.raises(FlowError, match="Repeat the transaction"):
        begin_late()
    run = Run.objects.get()
    # The repeated transaction sees the run.
    if on_conflict == "skip":
        with transaction.atomic():
            assert begin().pk == run.pk
        return
    with pytest.raises(AlreadyRunning) as raised, transaction.atomic():
        begin()
    assert raised.value.run_id == run.run_id


def placed_elsewhere() -> None:
    try:
        place("1")
    finally:
        connection.close()


def test_a_run_that_ends_while_another_starts_gives_its_key_back() -> None:
    opened = place("1")
    left = [opened.pk]

    def end_it(execute: Any, sql: str, *rest: Any) -> Any:
        """End the open run between the refused INSERT and the look for the run."""
        if left and sql.startswith("SELECT") and "ended_at" in sql:
            Run.objects.filter(pk=left.pop()).delete()
        return execute(sql, *rest)

    with connection.execute_wrapper(end_it), transaction.atomic():
        started = start(Checkout, PlaceOrder("2"), key=opened.key)

    assert not left
    assert Run.objects.get() == started


@pytest.mark.parametrize("key", [None, "1"])
def test_a_run_that_an_earlier_attempt_has_committed_is_started_once(
    key: str | None,
) -> None:
    runs: list[Run] = []

    def handler(message: Message) -> None:
        with outbox_session():
            runs.append(start(Checkout, PlaceOrder("1"), key=key))
        if len(runs) == 1:
            raise ValueError

    with declared(handler, transaction="none") as one:
        send(one.destination)
        take(one, times=2)
    assert runs == [Run.objects.get()] * 2
    assert OutboxMessage.objects.filter(destination="shop.checkout").count() == 1


@pytest.mark.parametrize("undone", [(True, False), (False, True), (True, True)])
def test_a_start_that_was_rolled_back_does_not_count(
    undone: tuple[bool, bool],
) -> None:
    """Each attempt starts two equal runs in a session. In the attempts that `undone`
    names, a rolled-back block starts such a run before."""
    runs: list[Run] = []

    def handler(message: Message) -> None:
        with outbox_session():
            if undone[len(runs) // 2]:
                with suppress(ValueError), transaction.atomic():
                    start(Checkout, PlaceOrder("1"))
                    raise ValueError
            runs.extend(start(Checkout, PlaceOrder("1")) for _ in range(2))
        if len(runs) == 2:
            raise ValueError

    with declared(handler, transaction="none") as one:
        send(one.destination)
        take(one, times=2)
    assert runs == [*Run.objects.order_by("pk")] * 2
    assert len(runs) == 4
    assert OutboxMessage.objects.filter(destination="shop.checkout").count() == 2


@pytest.mark.parametrize("kept", [OutboxMessage, InboxMessage])
def test_a_run_that_is_pruned_before_its_messages_cannot_be_started_again(
    kept: type[Model],
) -> None:
    """The reason for the check `txmsg.W012`."""
    raised: list[Exception] = []

    def handler(message: Message) -> None:
        try:
            with outbox_session():
                start(Checkout, PlaceOrder("1"))
        except DuplicateMessage as error:
            raised.append(error)
        raise ValueError

    with declared(handler, transaction="none") as one:
        send(one.destination)
        take(one)
    drain()
    say(True)
    drain()
    Run.objects.filter(ended_at__isnull=False).delete()
    if kept is InboxMessage:
        OutboxMessage.objects.filter(destination="shop.checkout").delete()
    with declared(handler, one.destination, transaction="none") as one:
        take(one)
    drain()
    if kept is OutboxMessage:
        assert len(raised) == 1
        assert not Run.objects.exists()
    else:
        assert Run.objects.get(ended_at=None).waits_for == "start"


def test_a_stage_that_runs_again_after_it_started_a_run_sends_the_same_ids() -> None:
    sent: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        start(Checkout, PlaceOrder("1"))
        sent.append(send_message("tests.next", None).id)

    with declared(handler) as one:
        message = send(one.destination)
        take(one)
        InboxMessage.objects.all().delete()
        put(one.destination, message_id=message.id)
        take(one)
    assert len(sent) == 2
    assert len(set(sent)) == 1


@pytest.mark.parametrize("what", ["key", "answer_to"])
def test_no_run_is_taken_for_a_run_that_an_attempt_has_skipped(what: str) -> None:
    """The first attempt starts a run. The second and the third attempt start a run that
    differs from the first run only in `what`. After each attempt, the message that
    starts the run is pruned. The third attempt still finds the run of the second
    attempt, and not the first run."""
    runs: list[Run] = []

    def handler(message: Message) -> None:
        differs: Any = {what: str(min(len(runs), 1))}
        with outbox_session():
            runs.append(start(Checkout, PlaceOrder("1"), **differs))
        if len(runs) < 3:
            raise ValueError

    with declared(handler, transaction="none") as one:
        send(one.destination)
        for _ in range(3):
            take(one)
            OutboxMessage.objects.filter(destination="shop.checkout").delete()
    assert runs[0] != runs[1] == runs[2]
    assert Run.objects.count() == 2


def test_request_refused_by_the_participant_fails_and_undoes_the_run() -> None:
    Stock.answer = SoldOut("1")
    run = place()
    drain()
    assert failed(run) == {"number": "1"}
    assert effects() == ["reserve 1", "release 1"]


def test_caller_is_answered_after_all_undos() -> None:
    Stock.answer = SoldOut("1")
    got: list[Message] = []
    stages.stage("tests.answers")(got.append)
    try:
        run = place(answer_to="tests.answers")
        drain()
    finally:
        stages.unregister("tests.answers")
    assert [one.body for one in got] == [{"number": "1"}]
    assert got[0].correlation_id == run.correlation_id


def test_the_answer_of_a_run_cancelled_at_once_has_its_correlation_id() -> None:
    run = place(answer_to="tests.answers")
    with transaction.atomic():
        cancel(run, "changed my mind")
    ship()
    take(stages.find(["shop.checkout.steps"])[0])
    answer = OutboxMessage.objects.get(destination="tests.answers")
    assert answer.correlation_id == run.correlation_id


@pytest.mark.parametrize("reason", ["refused", "discarded"])
def test_the_notice_of_a_dead_request_has_its_correlation_id(reason: str) -> None:
    Stock.answer = Refuse("never") if reason == "refused" else ValueError("broken")
    run = place()
    take_start()
    ship()
    take(stages.find(["shop.reserve"])[0], 3)
    if reason == "discarded":
        operate("discard")
    notice = OutboxMessage.objects.get(destination="shop.checkout.steps")
    assert json.loads(bytes(notice.body)) == {"reason": reason}
    assert notice.correlation_id == run.correlation_id


def test_a_deadline_goes_on_once_and_revokes_what_has_not_come() -> None:
    run = place()
    take_start()
    request = OutboxMessage.objects.get(destination="shop.reserve")
    OutboxMessage.objects.filter(pk=request.pk).update(due_at=F("due_at") + DAY)

    drain(ahead=HOUR)

    assert failed(run) == {"number": "1"}
    assert effects() == [], "neither done nor undone"
    row = InboxMessage.objects.get(stage="shop.reserve", message_id=request.message_id)
    assert row.revoked_at is not None
    drain(ahead=2 * DAY)
    assert effects() == [], "what comes late does nothing"


def test_undo_with_a_reply_is_confirmed_if_there_is_nothing_to_undo() -> None:
    def restock(request: Reserve) -> Reserved:
        raise AssertionError("nothing was reserved")

    stages.unregister("shop.release")
    released = Destination("shop.release", Reserve, reply=Reserved)
    stages.stage(released, undoes=stock_reserve)(restock)
    run = place()
    take_start()
    asked = OutboxMessage.objects.filter(destination="shop.reserve")
    asked.update(due_at=F("due_at") + DAY)
    with transaction.atomic():
        cancel(run, "closed")
    drain()
    assert failed(run) == {"why": "closed"}
    drain(ahead=2 * DAY)
    assert effects() == []


def test_an_answer_that_is_late_is_dropped_and_what_was_done_is_undone() -> None:
    late: list[uuid.UUID] = []

    def note(run_id: uuid.UUID, **_: Any) -> None:
        late.append(run_id)

    flow_late.connect(note)
    try:
        run = place()
        take_start()
        ship()
        take(stages.find(["shop.reserve"])[0])
        answer = OutboxMessage.objects.get(destination="shop.checkout.steps")
        OutboxMessage.objects.filter(pk=answer.pk).update(due_at=F("due_at") + DAY)
        drain(ahead=HOUR)
        assert failed(run)
        assert effects() == ["reserve 1", "release 1"]
        drain(ahead=2 * DAY)
    finally:
        flow_late.disconnect(note)
    assert late == [run.run_id]
    assert effects() == ["reserve 1", "release 1"]


def take_start() -> None:
    ship()
    take(stages.find(["shop.checkout"])[0])


def test_an_unreadable_answer_does_not_disarm_the_deadline() -> None:
    run = place()
    take_start()
    OutboxMessage.objects.filter(destination="shop.reserve").update(
        due_at=F("due_at") + DAY
    )
    ticket = f"{run.run_id.hex}.{again(run).turn.hex}"
    message_id = uuid.uuid4()
    headers = {
        "txmsg-id": str(message_id),
        "content-type": "application/json",
        wire.TICKET: ticket,
    }
    put("shop.checkout.steps", b'{"nonsense": 1}', headers, message_id=message_id)
    drain()
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.stage) == ("invalid_body", "shop.checkout.steps")
    assert again(run).waits_for == WaitsFor.ANSWER

    drain(ahead=HOUR)

    assert failed(run) == {"number": "1"}


def test_a_request_that_is_refused_is_answered_at_once_and_revoked() -> None:
    Stock.answer = Refuse("never")
    run = place()
    drain(raises=False)
    assert failed(run) == {"number": "1"}
    assert effects() == [], "its work was rolled back, and there is nothing to undo"

    Stock.answer = None
    letter = DeadLetter.objects.get(stage="shop.reserve")
    assert letter.reason == "refused"
    assert operate("redeliver", force=True) == 0
    drain()
    assert effects() == []


def test_a_request_that_fails_is_mended_by_an_operator() -> None:
    Stock.answer = ValueError("broken")
    run = place()
    drain(raises=False)
    assert again(run).waits_for == WaitsFor.ANSWER
    Stock.answer = None
    operate("redeliver")
    drain()
    assert again(run).waits_for == WaitsFor.RESUME


def test_a_request_that_an_operator_discards_is_answered() -> None:
    Stock.answer = ValueError("broken")
    run = place()
    drain(raises=False)
    operate("discard")
    drain()
    assert failed(run) == {"number": "1"}
    assert effects() == []


def test_no_copy_of_a_revoked_request_is_executed() -> None:
    Stock.answer = Refuse("never")
    run = place()
    take_start()
    ship()
    take(stages.find(["shop.reserve"])[0])
    Stock.answer = None

    letter = DeadLetter.objects.get(resolution="open")
    with pytest.raises(TxmsgError, match="has gone on without it"):
        resolution.redeliver_copy(letter, headers={}, body=bytes(letter.body))
    drain()
    assert failed(run) == {"number": "1"}
    restored = bulk.finish(bulk.start("restore", {}))
    assert (restored.done, restored.skipped) == (0, 1)
    assert "has gone on without it" in restored.skipped_why[str(letter.pk)]
    drain()
    assert DeadLetter.objects.get().resolution == "discarded"
    assert effects() == []


def test_the_first_who_resumes_is_the_only_one() -> None:
    run = place()
    drain()
    say(False)
    with pytest.raises(AlreadyResumed):
        say(True)
    drain()
    assert failed(run) == {"number": "1"}
    with pytest.raises(AlreadyResumed):
        say(True)


@shelved
class Approval(Flow[Reserve, str], name="shop.approval", within=None, using="other"):
    @step
    def start(self, request: Reserve) -> Next[str]:
        return self.wait(then=self.approved)

    @step
    def approved(self, yes: bool) -> Next[str]:
        return str(yes)


def test_resume_first_queries_the_database_with_an_open_transaction() -> None:
    with at_hand(Approval):
        with transaction.atomic(using="other"):
            run = start(Approval, Reserve("1"))
        drain()
        run.refresh_from_db()
        assert run.turn is not None
        token = wire.ticket(run.run_id, run.turn)
        with (
            CaptureQueriesContext(connection) as queries,
            transaction.atomic(using="other"),
        ):
            resume(token, True)
        drain()
    assert queries.captured_queries == []
    assert answered(run) == "True"


def test_resume_after_the_stored_time_out_is_refused() -> None:
    run = place()
    drain()
    Run.objects.update(due_at=F("due_at") - 31 * DAY)
    say(True)
    Run.objects.update(resumed_at=None)
    Deadlines(["default"]).tick()
    with pytest.raises(AlreadyResumed):
        say(True)
    assert again(run).resumed_at is None
    drain()
    assert answered(run), "the first was accepted before the time-out was stored"


def test_a_signal_replaces_what_the_run_waits_for() -> None:
    run = place()
    drain()
    with transaction.atomic():
        Checkout.signal("1", Note("wrap it"))
    drain()
    assert json.loads(again(run).state)["notes"] == ["wrap it"]
    assert run.waits_for == WaitsFor.RESUME
    with transaction.atomic():
        Checkout.signal("1", Stop("changed my mind"))
    drain()
    assert failed(run) == {"why": "changed my mind"}
    assert effects() == ["reserve 1", "release 1"]


@pytest.mark.parametrize("by", ["signal", "cancel"])
def test_a_request_that_was_not_sent_is_cancelled_if_its_run_goes_on(by: str) -> None:
    run = place()
    take_start()
    request = OutboxMessage.objects.filter(destination="shop.reserve")
    request.update(due_at=F("due_at") + DAY)
    FlowUndo.objects.all().delete()
    Run.objects.update(undos=0)  # its step could have asked without undo=
    with transaction.atomic():
        if by == "signal":
            Checkout.signal("1", Stop("enough"))
        else:
            cancel(run, "enough")
    drain()
    assert failed(run) == {"why": "enough"}
    assert request.get().cancelled_at is not None
    drain(ahead=2 * DAY)
    assert effects() == []


@pytest.mark.parametrize("cancelling", [False, True])
def test_a_signal_that_an_earlier_attempt_has_committed_is_stored_once(
    cancelling: bool,
) -> None:
    run = place()
    drain()
    attempts: list[int] = []
    signals = OutboxMessage.objects.filter(destination="shop.checkout.steps")
    before = signals.count()

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        with outbox_session():
            if cancelling:
                cancel(run, "stop")
            else:
                Checkout.signal("1", Note("wrap it"))
        if len(attempts) == 1:
            raise ValueError

    with declared(handler, transaction="none") as one:
        send(one.destination)
        take(one, times=2)
    assert attempts == [1, 2]
    assert signals.count() == before + 1


def test_a_signal_that_overtakes_the_first_message_of_its_run_waits_for_it() -> None:
    with transaction.atomic():
        run = start(Checkout, PlaceOrder("1"), key="1")
        Checkout.signal("1", Stop("changed my mind"))
    ship()
    take(stages.find(["shop.checkout.steps"])[0])
    assert again(run).waits_for == WaitsFor.START
    drain(ahead=MINUTE)
    assert failed(run) == {"why": "changed my mind"}
    assert FlowStep.objects.earliest("pk").step == "start"


def sent_an_hour_ago() -> None:
    """Make the newest message, a signal, an hour older."""
    signal = OutboxMessage.objects.latest("pk")
    kind, name, _, key = signal.headers[wire.TICKET].split(";")
    at = wire.format_instant(signal.created_at - HOUR)
    signal.headers[wire.TICKET] = f"{kind};{name};{at};{key}"
    signal.save(update_fields=["headers"])


def test_old_signal_waits_for_a_run_whose_first_message_is_as_late() -> None:
    """The consumer was away for an hour, and takes the signal first."""
    with transaction.atomic():
        run = start(Checkout, PlaceOrder("1"), key="1")
        Checkout.signal("1", Stop("changed my mind"))
    sent_an_hour_ago()
    ship()
    take(stages.find(["shop.checkout.steps"])[0])
    assert again(run).waits_for == WaitsFor.START
    assert not DeadLetter.objects.exists()
    waits = OutboxMessage.objects.latest("pk")
    # The longer it has waited, the less often it asks.
    assert waits.due_at - waits.created_at > 3 * MINUTE
    drain(ahead=5 * MINUTE)
    assert failed(run) == {"why": "changed my mind"}


def test_a_signal_before_its_run_waits_for_it_and_for_no_other() -> None:
    with transaction.atomic():
        Checkout.signal("1", Note("early"))
    drain()
    run = place()
    drain(ahead=5 * MINUTE)
    assert json.loads(again(run).state)["notes"] == ["early"]

    with transaction.atomic():
        Checkout.signal("nobody", Note("lost"))
    sent_an_hour_ago()
    drain()
    assert DeadLetter.objects.get().reason == "no_run"


def test_a_signal_to_a_run_that_goes_back_waits_until_it_has_gone_back() -> None:
    run = place()
    drain()
    Order.objects.all().delete()  # the first step will create it again
    with transaction.atomic():
        acts.act("go-back", run, acts.Given(to="start"))
        Checkout.signal("1", Note("in time"))
    ship()
    take(stages.find(["shop.checkout.steps"])[0])
    assert again(run).failing

    drain(ahead=2 * MINUTE)

    assert (again(run).step, run.waits_for) == ("approved", WaitsFor.RESUME)
    assert json.loads(run.state)["notes"] == ["in time"]
    assert effects() == ["reserve 1", "release 1", "reserve 1"]


def test_signal_that_was_not_sent_can_be_cancelled() -> None:
    with transaction.atomic():
        Checkout.signal("nobody", Note("early"))
    assert cancel_message(OutboxMessage.objects.get().message_id)


def test_signal_dated_in_the_future_waits_no_longer_than_any_other() -> None:
    stage = stages.find(["shop.checkout.steps"])[0]
    with transaction.atomic():
        Checkout.signal("nobody", Note("lost"))
    signal = OutboxMessage.objects.get()
    kind, name, _, key = signal.headers[wire.TICKET].split(";")
    signal.headers[wire.TICKET] = f"{kind};{name};9998-01-01T00:00:00Z;{key}"
    signal.save(update_fields=["headers"])
    ship()
    take(stage)
    stored_again = OutboxMessage.objects.exclude(pk=signal.pk).get()
    since = wire.parse_instant(stored_again.headers[wire.TICKET].split(";")[2])
    assert since <= stored_again.created_at


def test_cancelling_undoes_and_answers() -> None:
    run = place()
    drain()
    with transaction.atomic():
        cancel(run, "closed")
        cancel(run, "twice")
    drain()
    assert failed(run) == {"why": "closed"}
    assert effects() == ["reserve 1", "release 1"]


def test_cancelling_what_has_not_begun_ends_it() -> None:
    with transaction.atomic():
        run = start(Checkout, PlaceOrder("1"), key="1")
        cancel(run, "at once")
    ship()
    take(stages.find(["shop.checkout.steps"])[0])
    assert again(run).outcome == Outcome.FAILED
    drain()
    assert not Order.objects.exists(), "its start came late"


@pytest.mark.parametrize("reason", ["attempts_exhausted", "rejected"])
def test_discarding_the_first_message_of_a_run_cancels_the_run(reason: str) -> None:
    Order.objects.create(number="1")  # the first step cannot create it
    run = place(answer_to="tests.answers")
    if reason == "rejected":
        reject_all()
    drain(raises=False)
    assert DeadLetter.objects.get().reason == reason
    assert operate("discard") == 1
    drain()

    assert failed(run) == {"why": "discarded"}
    answer = OutboxMessage.objects.get(destination="tests.answers")
    assert json.loads(bytes(answer.body)) == {"why": "discarded"}
    Order.objects.all().delete()
    assert (operate("restore"), operate("redeliver")) == (0, 0)
    drain()
    assert effects() == [], "its first message came late"
    assert place().pk != run.pk, "its key is free"


@pytest.mark.parametrize("reason", ["attempts_exhausted", "rejected"])
def test_cancelling_a_run_closes_the_dead_letter_of_its_first_message(
    reason: str,
) -> None:
    Order.objects.create(number="1")  # the first step cannot create it
    run = place()
    if reason == "rejected":
        reject_all()
    drain(raises=False)
    assert DeadLetter.objects.get().reason == reason
    with transaction.atomic():
        cancel(run, "closed")
    drain()

    assert failed(run) == {"why": "closed"}
    assert DeadLetter.objects.get().resolution == "discarded"
    # What the retention deletes before the dead letter.
    for model in (Order, Run, InboxMessage):
        model.objects.all().delete()
    assert (operate("restore"), operate("redeliver")) == (0, 0)
    drain()
    assert not Run.objects.exists()


def test_cancelling_a_run_revokes_the_edited_copy_of_its_first_message() -> None:
    with at_hand(Napping):
        with transaction.atomic():
            run = start(Napping, Pack("1", "\U0001f600"), key="1")
        drain(raises=False)
        edit("blue")
        with transaction.atomic():
            cancel(run, "closed")
        ship()
        take(stages.find(["shop.napping.steps"])[0])
        assert failed(run) == {"why": "closed"}
        Run.objects.all().delete()  # as the retention does, if the copy waits so long
        drain()
        assert not Run.objects.exists()


@shelved
class Persistent(Flow[Reserve, Reserved | Cancelled], name="shop.persistent"):
    @step
    def start(self, request: Reserve) -> Next[Reserved | Cancelled]:
        raise ValueError(request.number)

    @signal
    def cancelled(self, by: Cancelled) -> None:
        """Do not stop."""


def test_discarding_the_first_message_ends_a_run_that_ignores_cancels() -> None:
    with at_hand(Persistent):
        with transaction.atomic():
            run = start(Persistent, Reserve("1"))
        drain(raises=False)
        assert operate("discard") == 1
        drain()
        assert failed(run) == {"why": "discarded"}


def reject_all(reason: str = "rejected") -> None:
    """Bury all stored messages as a relay does if the broker rejects them."""
    token = uuid.uuid4()
    with transaction.atomic():
        for row in OutboxMessage.objects.claim(
            broker="default", token=token, lease=60, limit=9, services=["tests"]
        ):
            OutboxMessage.objects.mark_dead(row.id, token, error="no")
            burial.bury_outgoing(row, "default", "default", reason, "no")


def test_an_undo_that_is_dead_stops_there_and_goes_on_when_redelivered() -> None:
    run = place()
    drain()
    stages.unregister("shop.release")
    broken = [ValueError("not now")] * 3

    def unsure(request: Reserve) -> None:
        if broken:
            raise broken.pop()
        Stock.release(request)

    stages.stage(stock_release, undoes=stock_reserve)(unsure)
    say(False)
    drain(raises=False)
    assert again(run).waits_for == WaitsFor.UNDO
    assert run.ended_at is None
    operate("redeliver")
    drain()
    assert failed(run) == {"number": "1"}
    assert effects() == ["reserve 1", "release 1"]


def test_redelivered_copies_do_not_change_a_run() -> None:
    run = place()
    drain()
    say(True)
    drain()
    for row in OutboxMessage.objects.all():
        headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
        put(row.destination, bytes(row.body), headers)
        put(
            row.destination, bytes(row.body), {**headers, "txmsg-id": str(uuid.uuid4())}
        )
    drain(raises=False)
    assert answered(run) == {"number": "1", "shelf": "A7"}
    # A request under another id is another one; its answer comes late.
    assert effects() == ["reserve 1", "reserve 1"]


def test_a_plain_message_without_an_asker_starts_a_run() -> None:
    with transaction.atomic():
        send_message(Checkout.destination, PlaceOrder("9"))
    drain()
    assert Run.objects.get().waits_for == WaitsFor.RESUME


@dataclass
class Pack:
    number: str
    how: str = "well"


@shelved
class Packing(Flow[Pack, Reserved | Cancelled], name="shop.packing", within=HOUR):
    number: str = ""
    hurried: bool = False

    @step
    def start(self, pack: Pack) -> Next[Reserved | Cancelled]:
        self.number = pack.number
        if pack.how.startswith("another way"):
            how = pack.how.removeprefix("another way").strip() or "well"
            return self.hand_over(Packing, Pack(pack.number, how))
        if pack.how == "abroad":
            return self.hand_over(Abroad, pack)
        self.hurried = pack.how == "answer first"
        if pack.how == "void":
            self.undo(invoice_void, Reserve("1"))
        return self.ask(
            stock_reserve, Reserve(pack.number), then=self.packed, undo=stock_release
        )

    @step
    def packed(self, reply: Reserved | SoldOut) -> Next[Reserved | Cancelled]:
        if isinstance(reply, SoldOut):
            return self.fail(Cancelled("sold out"))
        if self.hurried:
            return self.fail(Reserved("none"), answer_first=True)
        return self.sleep(2 * MINUTE, then=self.sealed)

    @step
    def sealed(self) -> Next[Reserved | Cancelled]:
        return Reserved(f"box of {self.number}, {self.baggage.get('tenant')}")


@shelved
class Abroad(
    Flow[Pack, Reserved | Cancelled], name="shop.abroad", within=None, using="other"
):
    @step
    def start(self, pack: Pack) -> Next[Reserved | Cancelled]:
        if pack.number == "0":
            raise Refuse("no such pack")
        return Reserved("abroad")


@shelved
class Shipping(Flow[Pack, str], name="shop.shipping", within=None):
    said: str = ""
    rounds: int = 0

    @signal
    def noted(self, note: Note) -> None:
        self.undo(invoice_void, Reserve(note.text))

    @step
    def start(self, pack: Pack) -> Next[str]:
        self.baggage["tenant"] = "blue"
        self.undo(invoice_void, Reserve("0"))
        return self.ask(Packing, pack, then=self.packed, otherwise=self.given_up)

    @step
    def packed(self, box: Reserved) -> Next[str]:
        self.said = box.shelf
        if box.shelf == "none":
            return self.fail("no box")
        return self.later(self.count, 2)

    @step
    def count(self, left: int) -> Next[str]:
        self.rounds += 1
        return self.later(self.count, left - 1) if left else self.said

    @step
    def given_up(self, why: TimedOut | Dead) -> Next[str]:
        return self.fail(f"given up: {getattr(why, 'reason', 'late')}")


@shelved
class Napping(Flow[Pack, str], name="shop.napping", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        if pack.how:
            self.baggage["tenant"] = pack.how
            return self.later(self.awake)
        return self.sleep(MINUTE, then=self.awake)

    @step
    def awake(self) -> Next[str]:
        return f"awake {self.baggage.get('tenant')}"


def test_a_request_with_headers_that_no_message_can_carry_is_answered() -> None:
    headers = {
        "content-type": "application/json",
        wire.CORRELATION_ID: "order-\U0001f600\x7f",
        f"{wire.PROP}tenant": "\U0001f600",
    }
    with at_hand(Napping):
        put("shop.napping", b'{"number": "7", "how": ""}',
            {"txmsg-id": str(uuid.uuid4()), **headers})  # fmt: skip
        drain(ahead=HOUR)

    run = Run.objects.get()
    assert (run.outcome, run.answer) == (Outcome.ANSWERED, '"awake \ufffd"')
    assert run.correlation_id == "order-\ufffd\ufffd"


def test_a_time_out_that_cannot_be_stored_keeps_no_other_from_its_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with at_hand(Napping):
        with transaction.atomic():
            bad, good = (start(Napping, Pack(one, "")) for one in "12")
        drain()
        # As an earlier release has stored it.
        Run.objects.filter(pk=bad.pk).update(correlation_id="\U0001f600")
        drain(ahead=HOUR)

    assert again(good).outcome == Outcome.ANSWERED
    assert again(bad).waits_for == WaitsFor.TIME
    assert f"the time-out of run {bad.run_id} is not stored" in caplog.text


def test_baggage_that_no_message_can_carry_is_refused() -> None:
    with at_hand(Napping):
        with transaction.atomic():
            start(Napping, Pack("1", "\U0001f600"))
        drain(raises=False)
    assert "No message can carry the baggage" in DeadLetter.objects.get().exception


@shelved
class Waking(Flow[Pack, str], name="shop.waking", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.ask(Napping, pack, then=self.awake)

    @step
    def awake(self, said: str) -> Next[str]:
        return said


def edit(how: str) -> None:
    """Send a copy of the dead letter, an order to nap, with another `how`."""
    body = json.dumps({"number": "1", "how": how}).encode()
    letter = DeadLetter.objects.get(resolution="open")
    resolution.redeliver_copy(letter, headers={}, body=body)


def test_edited_copy_of_a_flows_first_message_begins_the_original_run() -> None:
    with at_hand(Napping):
        with transaction.atomic():
            run = start(
                Napping, Pack("1", "\U0001f600"), key="1", answer_to="orders.done"
            )
        drain(raises=False)
        edit("\U0001f601")
        drain(raises=False)
        edit("blue")
        drain()
        assert Run.objects.get() == run
        assert answered(run) == "awake blue"
        assert OutboxMessage.objects.filter(destination="orders.done").count() == 1
        with transaction.atomic():
            start(Napping, Pack("1", "blue"), key="1")


@shelved
class Snoring(Flow[Pack, str], name="shop.snoring", within=MINUTE):
    @step
    def start(self, pack: Pack) -> Next[str]:
        if pack.how == "join":
            asked = [self.branch(stock_reserve, Reserve("1"))]
            return self.gather(asked, then=self.awake)
        return self.sleep(MINUTE, then=self.awake)

    @step
    def awake(self) -> Next[str]:
        if Stock.answer:
            raise Stock.answer
        return "awake"


@pytest.mark.parametrize("how", ["sleep", "join"])
def test_edited_copy_of_a_time_out_continues_the_run(how: str) -> None:
    Stock.answer = ValueError("broken")
    with at_hand(Snoring):
        with transaction.atomic():
            run = start(Snoring, Pack("1", how))
        drain(ahead=HOUR, raises=False)
        letter = DeadLetter.objects.get(stage="shop.snoring.steps")
        Stock.answer = None
        resolution.redeliver_copy(letter, headers={}, body=bytes(letter.body))
        drain()
    assert answered(run) == "awake"


def test_discarding_an_edited_copy_of_a_flows_first_message_cancels_the_run() -> None:
    with at_hand(Napping):
        with transaction.atomic():
            run = start(Napping, Pack("1", "\U0001f600"), key="1")
        drain(raises=False)
        edit("\U0001f601")
        drain(raises=False)
        assert operate("discard") == 1
        drain()
        assert failed(run) == {"why": "discarded"}
        assert operate("restore") == 0


def test_flow_begun_by_an_edited_copy_is_cancelled_with_its_caller() -> None:
    with at_hand(Napping, Waking):
        with transaction.atomic():
            run = start(Waking, Pack("1", "\U0001f600"))
        drain(raises=False)
        edit("")
        drain()
        nap = Run.objects.get(flow="shop.napping")
        assert nap.run_id == again(run).request_id
        with transaction.atomic():
            cancel(run, "stop")
        drain()
        assert failed(run) == {"why": "stop"}
        assert failed(nap) == {"why": "by shop.waking"}


def void(request: Reserve) -> None:
    Effect.objects.create(name=f"void {request.number}", message_id="")


@pytest.fixture
def shipping() -> Iterator[None]:
    with at_hand(Packing, Shipping):
        stages.stage(invoice_void)(void)
        try:
            yield
        finally:
            stages.unregister("shop.void")


def ship_it(how: str = "well") -> Run:
    with transaction.atomic():
        return start(Shipping, Pack("7", how), key="7")


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("how", ["well", "another way"])
def test_a_flow_asks_a_flow_which_may_hand_over(how: str) -> None:
    run = ship_it(how)
    drain(ahead=HOUR)
    assert again(run).outcome == Outcome.ANSWERED
    assert json.loads(run.answer) == "box of 7, blue"
    assert json.loads(run.state)["rounds"] == 3
    outcomes = Run.objects.exclude(pk=run.pk).values_list("outcome", flat=True)
    assert sorted(outcomes) == ["answered", "handed_over"][: len(outcomes)]
    assert set(Run.objects.values_list("first_run", flat=True)) == {run.run_id}
    assert effects() == ["reserve 7"]


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("how", ["well", "another way"])
def test_cancelling_cancels_what_was_asked_before_anything_older(how: str) -> None:
    run = ship_it(how)
    drain()
    assert Run.objects.filter(waits_for=WaitsFor.TIME).count() == 1
    with transaction.atomic():
        cancel(run, "stop")
    drain()
    assert failed(run) == {"why": "stop"}
    assert not Run.objects.filter(ended_at=None).exists()
    assert effects() == ["reserve 7", "release 7", "void 0"]


@pytest.mark.usefixtures("shipping")
def test_a_run_that_fails_is_given_up_to_who_asked_it() -> None:
    Stock.answer = SoldOut("7")
    run = ship_it()
    drain()
    assert again(run).outcome == Outcome.FAILED
    assert json.loads(run.answer) == "given up: cancelled"
    assert effects() == ["reserve 7", "release 7", "void 0"]


@pytest.mark.usefixtures("shipping")
def test_run_cancelled_before_its_start_arrives_never_starts() -> None:
    run = ship_it()
    ship()
    take(stages.find(["shop.shipping"])[0])
    asked = OutboxMessage.objects.filter(destination="shop.packing")
    asked.update(due_at=F("due_at") + DAY)
    row = asked.get()
    with transaction.atomic():
        cancel(run, "stop")
    drain()
    assert failed(run) == {"why": "stop"}
    # A relay may have sent the message before, without an answer from the broker.
    headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
    put(row.destination, bytes(row.body), headers)
    drain()
    assert Run.objects.count() == 1
    assert effects() == ["void 0"]


@pytest.mark.usefixtures("shipping")
def test_a_refused_undo_of_own_work_goes_on_when_redelivered() -> None:
    Stock.answer = SoldOut("7")
    refusals = [Refuse("not now")]

    def unsure(request: Reserve) -> None:
        if refusals:
            raise refusals.pop()
        void(request)

    stages.unregister("shop.void")
    stages.stage(invoice_void)(unsure)
    run = ship_it()
    drain(raises=False)
    assert again(run).waits_for == WaitsFor.UNDO
    assert DeadLetter.objects.get().reason == "refused"
    assert operate("redeliver") == 1
    drain()
    assert again(run).outcome == Outcome.FAILED
    assert effects() == ["reserve 7", "release 7", "void 0"]


@pytest.mark.usefixtures("shipping")
def test_an_undo_that_a_signal_registers_is_done_in_its_turn() -> None:
    run = ship_it()
    drain()
    with transaction.atomic():
        Shipping.signal("7", Note("1"))
        Shipping.signal("7", Note("2"))
    drain()
    with transaction.atomic():
        cancel(run, "stop")
    drain()
    assert failed(run) == {"why": "stop"}
    assert effects() == ["reserve 7", "void 2", "void 1", "release 7", "void 0"]


@contextmanager
def once_broken(undo: Any, handler: Any, **more: Any) -> Iterator[None]:
    """Make the stage of an undo fail until the undo's dead letter is redelivered."""
    broken = [ValueError("not now")] * 3

    def unsure(request: Reserve) -> None:
        if broken:
            raise broken.pop()
        handler(request)

    stages.unregister(undo.name)
    with declared(unsure, undo, name=undo.name, **more):
        yield
    stages.stage(undo, **more)(handler)


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("how", ["answer first", "another way answer first"])
def test_a_flow_that_answers_first_is_undone_before_anything_older(how: str) -> None:
    with once_broken(stock_release, release, undoes=stock_reserve):
        run = ship_it(how)
        drain(raises=False)
        assert again(run).waits_for == WaitsFor.UNDO
        assert effects() == ["reserve 7"]
        assert operate("redeliver") == 1
        drain()
    assert failed(run) == "no box"
    assert effects() == ["reserve 7", "release 7", "void 0"]


@pytest.mark.usefixtures("shipping")
def test_a_flow_that_fails_by_a_dead_request_confirms_its_cancel() -> None:
    Stock.answer = Refuse("never")
    with once_broken(invoice_void, void):
        run = ship_it("void")
        drain(raises=False)
        assert Run.objects.get(flow="shop.packing").waits_for == WaitsFor.UNDO
        with transaction.atomic():
            cancel(run, "stop")
        drain()
        operate("redeliver", force=True)
        drain()
    assert failed(run) == {"why": "stop"}
    assert not Run.objects.filter(ended_at=None).exists()
    assert effects() == ["void 1", "void 0"]


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("begun", [False, True])
def test_cancelling_a_run_that_handed_over_cancels_its_successor(begun: bool) -> None:
    run = ship_it("another way")
    for name in ("shop.shipping", *["shop.packing"] * (1 + begun)):
        ship()
        take(stages.find([name])[0])
    with transaction.atomic():
        cancel(Run.objects.get(outcome=Outcome.HANDED_OVER))
    for _ in range(2):
        ship()
        take(stages.find(["shop.packing.steps"])[0])
    drain()
    assert failed(run) == "given up: cancelled"
    assert not Run.objects.filter(ended_at=None).exists()
    assert effects() == ["void 0"]


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize(
    ("when", "answer"),
    [
        ("before it begins", {"why": "stop"}),
        ("while it waits", {"why": "stop"}),
        ("after its end", {"shelf": "box of 7, None"}),
    ],
)
def test_cancelling_a_run_that_handed_over_answers_once(
    when: str, answer: dict[str, str]
) -> None:
    with transaction.atomic():
        run = start(Packing, Pack("7", "another way"), answer_to="orders.done")
    ship()
    take(stages.find(["shop.packing"])[0])
    if when != "before it begins":
        drain(ahead=HOUR if when == "after its end" else 0 * HOUR)
    with transaction.atomic():
        cancel(run, "stop")
    for _ in range(2):
        ship()
        take(stages.find(["shop.packing.steps"])[0])
    drain(ahead=HOUR)
    sent = OutboxMessage.objects.get(destination="orders.done")
    assert json.loads(bytes(sent.body)) == answer


@pytest.mark.usefixtures("shipping")
def test_cancelling_a_run_without_caller_cancels_its_successor() -> None:
    with transaction.atomic():
        run = start(Packing, Pack("7", "another way"))
    ship()
    take(stages.find(["shop.packing"])[0])
    with transaction.atomic():
        cancel(run)
    for _ in range(2):
        ship()
        take(stages.find(["shop.packing.steps"])[0])
    drain(ahead=HOUR)
    last = Run.objects.exclude(pk=run.pk).get()
    assert (last.outcome, last.step) == (Outcome.FAILED, "start")
    assert effects() == []


@contextmanager
def asked_by_another_system(how: str = "another way") -> Iterator[Run]:
    """Yield a run that another system has asked, with a ticket, and that has handed
    over. The first message of the other run is not relayed yet."""
    with txmsg(REPLY_TO=["erp.in"]):
        body, _, of = encoded(Packing.destination, Pack("7", how))
        headers = {
            "content-type": wire.JSON,
            wire.TYPE: of,
            wire.REPLY_TO: "erp.in",
            wire.TICKET: "T1",
        }
        put("shop.packing", body, {"txmsg-id": str(uuid.uuid4()), **headers})
        take(stages.find(["shop.packing"])[0])
        run = Run.objects.get()
        assert run.outcome == Outcome.HANDED_OVER
        yield run


def cancel_now(run: Run) -> None:
    """Cancel a run that has handed over, and then the run to which it has handed
    over."""
    with transaction.atomic():
        cancel(run, "stop")
    for _ in range(2):
        ship()
        take(stages.find(["shop.packing.steps"])[0])


def answers_to_another_system() -> list[Any]:
    sent = OutboxMessage.objects.filter(destination="erp.in").order_by("pk")
    return [json.loads(bytes(one.body)) for one in sent]


@pytest.mark.usefixtures("shipping")
def test_two_cancels_of_a_run_that_handed_over_send_one_answer() -> None:
    with asked_by_another_system() as run:
        cancel_now(run)
        cancel_now(run)
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"why": "stop"}]


@pytest.mark.usefixtures("shipping")
def test_second_cancel_of_a_run_that_handed_over_answers_if_the_first_dies() -> None:
    with asked_by_another_system() as run:
        with transaction.atomic():
            cancel(run, "stop")
        ship()
        take(stages.find(["shop.packing.steps"])[0])
        forwarded = OutboxMessage.objects.filter(headers__has_key=wire.REPLY_TO)
        forwarded = forwarded.filter(destination="shop.packing.steps")
        assert forwarded.update(body=b"1") == 1
        ship()
        take(stages.find(["shop.packing.steps"])[0])
        assert DeadLetter.objects.get().reason == "invalid_body"
        cancel_now(run)
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"why": "stop"}]


@pytest.mark.usefixtures("shipping")
def test_cancel_after_the_other_flow_was_refused_sends_no_second_answer() -> None:
    with asked_by_another_system() as run:
        asked = OutboxMessage.objects.filter(message_id=run.request_id)
        asked.update(body=b'{"x": 1}')
        ship()
        take(stages.find(["shop.packing"])[0])
        cancel_now(run)
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"reason": "invalid_body"}]


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("reason", ["rejected", "discarded"])
def test_cancel_after_the_relay_buried_the_other_flow_sends_no_second_answer(
    reason: str,
) -> None:
    with asked_by_another_system() as run:
        reject_all("rejected" if reason == "rejected" else "broker")
        if reason == "discarded":
            assert operate("discard") == 1
        assert answers_to_another_system() == [{"reason": reason}]
        cancel_now(run)
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"reason": reason}]


@pytest.mark.usefixtures("shipping")
def test_discard_of_the_other_flows_letter_after_a_cancel_sends_no_second_answer() -> (
    None
):
    with asked_by_another_system() as run:
        reject_all("broker")
        cancel_now(run)
        assert operate("discard") == 1
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"why": "stop"}]


@pytest.mark.usefixtures("shipping")
def test_relay_that_rejects_the_other_flow_after_a_cancel_sends_no_second_answer() -> (
    None
):
    with asked_by_another_system() as run:
        asked = OutboxMessage.objects.filter(message_id=run.request_id)
        asked.update(due_at=F("due_at") + DAY)
        cancel_now(run)
        ship()
        asked.update(due_at=F("due_at") - DAY)
        reject_all()
        assert DeadLetter.objects.get().reason == "rejected"
        drain(ahead=HOUR)
        assert answers_to_another_system() == [{"why": "stop"}]


@pytest.mark.usefixtures("shipping")
def test_cancel_revokes_the_copy_of_a_rejected_message_that_arrives_later() -> None:
    with asked_by_another_system() as run:
        row = OutboxMessage.objects.get(message_id=run.request_id)
        reject_all()
        cancel_now(run)
        # The broker's answer to an earlier dispatch was lost.
        headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
        put(row.destination, bytes(row.body), headers)
        drain(ahead=HOUR)
        assert Run.objects.get() == run
        assert answers_to_another_system() == [{"reason": "rejected"}]


@pytest.mark.usefixtures("shipping")
def test_cancel_of_a_rejected_flow_of_another_database_sends_no_second_answer() -> None:
    with at_hand(Abroad), asked_by_another_system("abroad") as run:
        reject_all()
        with transaction.atomic():
            cancel(run, "stop")
        for name in ("shop.packing.steps", "shop.abroad.steps"):
            ship()
            take(stages.find([name])[0])
        row = InboxMessage.objects.using("other").get(stage="shop.abroad")
        assert row.revoked_at is not None
        assert answers_to_another_system() == [{"reason": "rejected"}]
        assert not OutboxMessage.objects.using("other").exists()


def locked_out() -> int:
    """Return how many database sessions wait for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.postgresql
@pytest.mark.usefixtures("shipping")
def test_two_cancels_at_once_of_a_run_that_handed_over_send_one_answer() -> None:
    with asked_by_another_system() as run:
        asked = OutboxMessage.objects.filter(message_id=run.request_id)
        asked.update(due_at=F("due_at") + DAY)
        for _ in range(2):
            with transaction.atomic():
                cancel(run, "stop")
        ship()
        steps = stages.find(["shop.packing.steps"])[0]
        take(steps, 2)
        ship()
        with ExitStack() as workers:
            with transaction.atomic():
                # Both cancels wait for this row, which is then rolled back.
                InboxMessage.objects.revoke("shop.packing", run.request_id)
                workers.enter_context(running(steps, concurrency=2))
                wait_until(lambda: locked_out() == 2)
                transaction.set_rollback(True)
            wait_until(lambda: not QueueMessage.objects.exists())
        assert answers_to_another_system() == [{"why": "stop"}]


@pytest.mark.usefixtures("shipping")
def test_discarded_cancels_in_doubt_of_a_run_that_handed_over_send_one_answer() -> None:
    with asked_by_another_system() as run:
        asked = OutboxMessage.objects.filter(message_id=run.request_id)
        asked.update(due_at=F("due_at") + DAY)
        Run.objects.update(ended_at=F("ended_at") - 15 * DAY)
        cancel_now(run)
        cancel_now(run)
        assert DeadLetter.objects.filter(reason="undo_in_doubt").count() == 2
        assert operate("discard") == 2
        drain()
        assert answers_to_another_system() == [{"why": "undo_in_doubt"}]


@pytest.mark.usefixtures("shipping")
def test_discarded_cancel_in_doubt_of_a_run_that_handed_over_cancels_the_request() -> (
    None
):
    run = ship_it("another way")
    for name in ("shop.shipping", "shop.packing"):
        ship()
        take(stages.find([name])[0])
    over = Run.objects.filter(outcome=Outcome.HANDED_OVER)
    over.update(ended_at=F("ended_at") - 15 * DAY)
    cancel_now(over.get())
    assert DeadLetter.objects.get().reason == "undo_in_doubt"
    assert operate("discard") == 1
    drain()
    assert failed(run) == "given up: cancelled"
    assert effects() == ["void 0"]


@pytest.mark.usefixtures("shipping")
def test_operator_can_only_cancel_a_run_that_has_handed_over() -> None:
    with transaction.atomic():
        run = start(Packing, Pack("7", "another way"))
    drain()
    last = Run.objects.exclude(pk=run.pk).get()
    for act in set(acts.ACTS) - {"cancel"}:
        with pytest.raises(FlowError, match=f"handed over to run {last.run_id} of "):
            acts.act(act, run, acts.Given(to="start"))
    with transaction.atomic():
        _, _, text = acts.act("cancel", run, acts.Given(why="stop"))
    assert text == (
        f"Cancelled run {last.run_id} of shop.packing, successor of run {run.run_id} "
        f"of flow shop.packing: stop"
    )
    drain()
    assert failed(last) == {"why": "stop"}
    with pytest.raises(FlowError, match=f"Run {last.run_id} has ended"):
        acts.act("cancel", run, acts.Given(why="stop"))


@pytest.mark.usefixtures("shipping")
def test_operator_cannot_cancel_a_hand_over_whose_other_run_is_undoing_its_work() -> (
    None
):
    with once_broken(stock_release, release, undoes=stock_reserve):
        with transaction.atomic():
            run = start(Packing, Pack("7", "another way answer first"))
        drain(raises=False)
        last = Run.objects.exclude(pk=run.pk).get()
        assert last.failing
        with pytest.raises(FlowError, match=f"Run {last.run_id} is undoing its work"):
            acts.act("cancel", run, acts.Given(why="stop"))


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("how", ["well", "another way", "another way another way"])
def test_flow_to_which_a_run_hands_over_answers_to_answer_to(how: str) -> None:
    with transaction.atomic():
        run = start(Packing, Pack("7", how), answer_to="orders.done")
    drain(ahead=HOUR)
    last = Run.objects.latest("id")
    assert answered(last) == {"shelf": "box of 7, None"}
    assert last.first_run == run.run_id
    sent = OutboxMessage.objects.get(destination="orders.done")
    assert json.loads(bytes(sent.body)) == {"shelf": "box of 7, None"}
    assert sent.correlation_id == run.correlation_id


@pytest.mark.usefixtures("shipping")
@pytest.mark.parametrize("number", ["0", "7"])
def test_flow_of_another_database_answers_to_answer_to_or_is_given_up(
    number: str,
) -> None:
    with txmsg(REPLY_TO=["orders.done"]), at_hand(Abroad):
        with transaction.atomic():
            start(Packing, Pack(number, "abroad"), answer_to="orders.done")
        for name in ("shop.packing", "shop.abroad"):
            ship()
            take(stages.find([name])[0])
    sent = OutboxMessage.objects.using("other").get(destination="orders.done")
    answer = {"reason": "refused"} if number == "0" else {"shelf": "abroad"}
    assert json.loads(bytes(sent.body)) == answer


@shelved
class Circle(Flow[Pack, str], name="shop.circle", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.later(self.again)

    @step
    def again(self) -> Next[str]:
        return self.later(self.again)


def test_steps_that_go_in_a_circle_end_as_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(going, "MAX_HOPS", 9)
    with at_hand(Circle):
        with transaction.atomic():
            run = start(Circle, Pack("1"))
        drain()
    assert DeadLetter.objects.get().reason == "hops"
    assert FlowStep.objects.filter(run=run).count() == 9


@shelved
class Pages(Flow[Reserve, str], name="shop.pages", within=None):
    @step
    def start(self, page: Reserve) -> Next[str]:
        return self.ask(stock_reserve, page, then=self.following)

    @step
    def following(self, reply: Reserved | SoldOut) -> Next[str]:
        return self.ask(stock_reserve, Reserve("next"), then=self.following)


def test_request_counts_as_one_step_and_none_is_sent_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(going, "MAX_HOPS", 9)
    with at_hand(Pages):
        with transaction.atomic():
            start(Pages, Reserve("first"))
        drain()
    assert DeadLetter.objects.get().reason == "hops"
    assert len(effects()) == 9


@shelved
class Careless(Flow[Pack, str], name="shop.careless", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        self.wait(then=self.after)
        if pack.how == "nothing":
            return None  # type: ignore[return-value]
        return self.wait(then=self.after)

    @step
    def after(self) -> Next[str]:
        return "done"


@pytest.mark.parametrize("how", ["nothing", "two"])
def test_step_that_does_not_return_its_continuation_is_an_error(how: str) -> None:
    with at_hand(Careless):
        with transaction.atomic():
            run = start(Careless, Pack("1", how))
        drained = drain(raises=False)
    assert "a step makes one continuation" in str(drained.errors[0])
    assert again(run).waits_for == WaitsFor.START


def test_a_step_that_this_code_does_not_have_waits_for_code_that_has() -> None:
    run = place()
    drain()
    Run.objects.update(step="approved_by_two")
    say_as(run, True)
    drain()
    row = InboxMessage.objects.get(needs_version__isnull=False)
    assert row.needs_type == "shop.checkout/approved_by_two"
    assert not DeadLetter.objects.exists()
    assert again(run).waits_for == WaitsFor.RESUME

    Run.objects.update(step="approved")
    InboxMessage.objects.update(needs_version=None)
    drain()
    assert answered(run)


def say_as(run: Run, value: object) -> None:
    with transaction.atomic():
        send_message("shop.checkout.steps", value)
    row = OutboxMessage.objects.order_by("-id").first()
    ticket = f"{run.run_id.hex}.{again(run).turn.hex}"
    OutboxMessage.objects.filter(pk=row.pk).update(headers={wire.TICKET: ticket})


@message_type("tests.Told", version=1)
@dataclass
class ToldBefore:
    text: str


@message_type("tests.Told", version=2, readable_from=2)
@dataclass
class Told:
    text: str


tell = Destination("shop.tell", Pack, reply=Told)
tell_before = Destination("shop.tell", Pack, reply=ToldBefore)


@shelved
class Older(Flow[Pack, str], name="shop.aging", within=HOUR):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.ask(tell_before, pack, then=self.told)

    @step
    def told(self, reply: ToldBefore) -> Next[str]:
        return reply.text

    @step
    def all_told(self, replies: Answers[ToldBefore]) -> Next[str]:
        return str(len(replies))


@shelved
class Newer(Flow[Pack, str], name="shop.aging", within=HOUR, version=2):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.ask(tell, pack, then=self.told)

    @step
    def told(self, reply: Told) -> Next[str]:
        return reply.text


@upgrade("shop.aging", from_version=1)
def renewed(state: dict[str, Any]) -> dict[str, Any]:
    return state


@pytest.mark.parametrize("waits", ["start", "reply"])
def test_what_waits_for_newer_code_continues_with_it(waits: str) -> None:
    def told(pack: Pack) -> Told:
        return Told(pack.how)

    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(told, tell, name="shop.tell"),
        ExitStack() as code,
    ):
        code.enter_context(at_hand(Newer if waits == "start" else Older))
        with transaction.atomic():
            run = start(Newer if waits == "start" else Older, Pack("1"))
        code.close()
        with at_hand(Older):
            drain()
        row = InboxMessage.objects.get(needs_version=2)
        assert row.attempts == 0
        assert row.needs_type == {"start": "shop.aging", "reply": "tests.Told"}[waits]
        assert again(run).ended_at is None
        with at_hand(Newer):
            drain()
    assert answered(run) == "well"


either = Destination("shop.tell", Pack, reply=ToldBefore | SoldOut)


@shelved
class Wider(Flow[Pack, str], name="shop.aging", within=HOUR):
    @step
    def start(self, pack: Pack) -> Next[str]:
        if pack.how == "join":
            return self.gather([self.branch(either, pack)], then=self.all_told)
        return self.ask(either, pack, then=self.told)

    @step
    def told(self, reply: ToldBefore | SoldOut) -> Next[str]:
        return reply.number if isinstance(reply, SoldOut) else reply.text

    @step
    def all_told(self, replies: Answers[ToldBefore | SoldOut]) -> Next[str]:
        return str(len(replies))


@pytest.mark.parametrize("how", ["ask", "join"])
def test_answer_of_a_type_that_only_newer_code_takes_waits_for_it(how: str) -> None:
    def told(pack: Pack) -> ToldBefore | SoldOut:
        return SoldOut("1")

    with declared(told, either, name="shop.tell"):
        with at_hand(Wider):
            with transaction.atomic():
                run = start(Wider, Pack("1", how))
            ship()
            take(stages.find(["shop.aging"])[0])
        with at_hand(Older):
            drain()
        assert InboxMessage.objects.get(needs_version=1).needs_type == "tests.SoldOut"
        with at_hand(Wider):
            drain()
    assert answered(run) == "1"


@shelved
class Signalled(Flow[Pack, str], name="shop.aging", within=HOUR):
    """Takes a type in a signal, and not in the step that the newer code waits in."""

    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.ask(tell_before, pack, then=self.told)

    @step
    def told(self, reply: ToldBefore) -> Next[str]:
        return reply.text

    @signal
    def noticed(self, news: SoldOut) -> None:
        """Do nothing."""


def test_answer_that_only_another_step_takes_is_not_claimed_again_at_once() -> None:
    def told(pack: Pack) -> ToldBefore | SoldOut:
        return SoldOut("1")

    with declared(told, either, name="shop.tell") as telling:
        with at_hand(Wider):
            with transaction.atomic():
                run = start(Wider, Pack("1", "ask"))
            ship()
            take(stages.find(["shop.aging"])[0])
            ship()
            take(telling)
            ship()
        with at_hand(Signalled):
            (steps,) = stages.find(["shop.aging.steps"])
            take(steps)
            row = InboxMessage.objects.annotate(now=Now()).get(needs_version=1)
            assert row.needs_type == "tests.SoldOut"
            assert row.due_at > row.now
            take(steps)
        assert InboxMessage.objects.get(pk=row.pk).due_at == row.due_at
        with at_hand(Wider):
            drain(ahead=dt.timedelta(minutes=1))
    assert answered(run) == "1"


@shelved
class Brief(Flow[Pack, str], name="shop.growing", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return "at once"


@shelved
class Patient(Flow[Pack, str], name="shop.growing", within=None):
    @step
    def start(self, pack: Pack) -> Next[str]:
        return self.wait(then=self.approved)

    @step
    def approved(self, yes: bool) -> Next[str]:
        return str(yes)


def test_stage_that_resumes_a_run_of_newer_code_is_redelivered() -> None:
    def approve(pack: Pack) -> None:
        resume(pack.how, True)

    approvals = Destination("tests.approve", Pack)
    policy = RedeliveryPolicy(initial_delay=30.0)
    with declared(approve, approvals, name="tests.approve", redelivery=policy):
        with at_hand(Patient):
            with transaction.atomic():
                run = start(Patient, Pack("1"))
            drain()
            run.refresh_from_db()
            assert run.turn is not None
            with transaction.atomic():
                token = wire.ticket(run.run_id, run.turn)
                send_message(approvals, Pack("1", token))
        with at_hand(Brief), pytest.raises(FlowError, match="approved"):
            drain()
        with at_hand(Patient):
            drain(ahead=dt.timedelta(minutes=1))
    assert answered(run) == "True"


def test_drain_ahead_of_a_deadline_answers_before_the_deadline_passes() -> None:
    def told(pack: Pack) -> ToldBefore:
        return ToldBefore(pack.how)

    with declared(told, tell_before, name="shop.tell"), at_hand(Older):
        with transaction.atomic():
            run = start(Older, Pack("1"))
        drain(ahead=2 * HOUR)
    assert answered(run) == "well"


def test_ended_runs_are_pruned_with_their_steps_and_open_ones_are_not() -> None:
    run = place("1")
    place("2")
    drain()
    say(True)
    drain()
    Run.objects.filter(pk=run.pk).update(ended_at=F("ended_at") - 31 * DAY)
    (kind,) = [one for one in retention.kinds() if one.model is Run]
    assert retention.count(kind, "default") == 1
    assert sum(retention.prune(kind, "default")) == 1
    assert Run.objects.get().key == "2"
    assert set(FlowStep.objects.values_list("run__key", flat=True)) == {"2"}


@pytest.mark.usefixtures("shipping")
def test_run_that_handed_over_is_pruned_after_the_other_run_has_ended() -> None:
    with transaction.atomic():
        run = start(Packing, Pack("7", "another way"))
    drain()
    assert again(run).outcome == Outcome.HANDED_OVER
    Run.objects.filter(pk=run.pk).update(ended_at=F("ended_at") - 31 * DAY)
    (kind,) = [one for one in retention.kinds() if one.model is Run]
    assert sum(retention.prune(kind, "default")) == 0
    drain(ahead=HOUR)
    assert sum(retention.prune(kind, "default")) == 1
    assert Run.objects.get().outcome == Outcome.ANSWERED


@pytest.mark.usefixtures("shipping")
def test_chain_of_runs_that_handed_over_is_pruned_from_its_end() -> None:
    with transaction.atomic():
        start(Packing, Pack("7", "another way another way"))
    drain()
    over = Run.objects.filter(outcome=Outcome.HANDED_OVER)
    assert over.update(ended_at=F("ended_at") - 31 * DAY) == 2
    (kind,) = [one for one in retention.kinds() if one.model is Run]
    assert sum(retention.prune(kind, "default")) == 0
    drain(ahead=HOUR)
    assert sum(retention.prune(kind, "default")) == 1
    assert sum(retention.prune(kind, "default")) == 1
    assert Run.objects.get().outcome == Outcome.ANSWERED


def test_an_undo_older_than_the_inbox_by_a_clock_that_is_ahead_is_in_doubt() -> None:
    place()
    drain()
    InboxMessage.objects.filter(stage="shop.reserve").delete()
    ahead = dt.timedelta(minutes=50)
    FlowUndo.objects.update(
        created_at=F("created_at") - 14 * DAY + ahead, answered=False
    )
    say(False)
    drain()
    assert DeadLetter.objects.get().reason == "undo_in_doubt"
    assert not InboxMessage.objects.filter(stage="shop.reserve").exists()


def test_undo_finds_a_request_that_is_older_than_what_the_inbox_keeps() -> None:
    """`pipeline archive --older-than 3d` deletes the same rows earlier than the
    settings say, and knows nothing about these."""
    run = place()
    drain()
    columns = ("first_received_at", "last_received_at", "processed_at")
    InboxMessage.objects.update(**{one: F(one) - 5 * DAY for one in columns})
    FlowUndo.objects.update(created_at=F("created_at") - 5 * DAY, answered=False)
    (kind,) = [one for one in retention.kinds() if one.model is InboxMessage]
    assert sum(retention.prune(replace(kind, days=3), "default")) == 2

    say(False)
    drain()

    assert failed(run) == {"number": "1"}
    assert effects() == ["reserve 1", "release 1"]
    assert sum(retention.prune(replace(kind, days=3), "default")) == 1


@pytest.mark.parametrize("days", [5, 20])
def test_undo_finds_an_old_edited_copy_of_a_request(days: int) -> None:
    """The copy of a copy was processed, and its answer is not recorded yet."""
    Stock.answer = ValueError("broken")
    run = place()
    drain(raises=False)
    for answer in (ValueError("broken"), None):
        Stock.answer = answer
        letter = DeadLetter.objects.get(resolution="open")
        resolution.redeliver_copy(letter, headers={}, body=b'{"number": "2"}')
        drain(raises=False)
    age = dt.timedelta(days=days)
    columns = ("first_received_at", "last_received_at", "processed_at", "dead_at")
    InboxMessage.objects.update(**{one: F(one) - age for one in columns})
    DeadLetter.objects.update(resolved_at=F("resolved_at") - age)
    FlowUndo.objects.update(created_at=F("created_at") - age, answered=False)

    def prune() -> list[int]:
        kinds = [one for one in retention.kinds() if one.model in models]
        return [sum(retention.prune(replace(one, days=3), "default")) for one in kinds]

    models = (InboxMessage, DeadLetter)
    assert prune() == [4, 0]  # rows of steps, and of the two requests that died

    say(False)
    drain()

    assert failed(run) == {"number": "1"}
    assert effects() == ["reserve 2", "release 1"]
    assert [prune(), prune()] == [[1, 1], [0, 1]]


def test_an_undo_older_than_the_inbox_is_for_a_person() -> None:
    run = place()
    drain()
    InboxMessage.objects.filter(stage="shop.reserve").delete()
    FlowUndo.objects.update(created_at=F("created_at") - 15 * DAY, answered=False)
    say(False)
    drain()
    assert DeadLetter.objects.get().reason == "undo_in_doubt"
    assert operate("redeliver") == 1
    drain()
    assert DeadLetter.objects.get(resolution="open").reason == "undo_in_doubt"
    assert again(run).waits_for == WaitsFor.UNDO
    (undo,) = stages.find(["shop.release"])
    stages.unregister(undo.name)
    assert operate("discard") == 0, "here, nothing would revoke the request"
    assert again(run).waits_for == WaitsFor.UNDO
    stages.register(undo)

    assert operate("discard") == 1, "whoever has checked confirms it so"
    drain()
    assert failed(run) == {"number": "1"}
    assert effects() == ["reserve 1"]
    request = OutboxMessage.objects.get(destination="shop.reserve")
    row = InboxMessage.objects.get(stage="shop.reserve", message_id=request.message_id)
    assert row.revoked_at is not None, "nor is the request executed later"


@pytest.mark.parametrize("mode", ["none", "best_effort_1pc", "broker_only"])
def test_no_run_is_stored_where_its_message_is_not(mode: str) -> None:
    run = place()
    drain()
    errors: list[str] = []

    def meddle(message: Message) -> None:
        for act in (
            lambda: start(Checkout, PlaceOrder("2"), key="2"),
            lambda: resume(token(), True),
        ):
            with pytest.raises(FlowError) as raised, transaction.atomic():
                act()
            errors.append(str(raised.value))

    with declared(meddle, "tests.meddle", transaction=mode):
        with transaction.atomic():
            send_message("tests.meddle", None)
        drain()
    assert len([one for one in errors if "tests.meddle" in one]) == 2
    assert Run.objects.get() == run
    say(True)
    drain()
    assert answered(run)


def test_answer_to_a_foreign_destination_is_refused() -> None:
    headers = {
        "content-type": "application/json",
        wire.TYPE: "tests.Reserve;v=1;min=1",
        wire.REPLY_TO: "payments.charge",
        wire.TICKET: "x",
    }
    put("shop.reserve", b'{"number": "1"}', {"txmsg-id": str(uuid.uuid4()), **headers})
    drain()
    assert DeadLetter.objects.get().reason == "reply_to"
    assert effects() == []
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize(
    ("reply_to", "correlation_id"),
    [("a" * 300 + ".steps", "c"), ("shop.checkout.steps", "c\U0001f600" + "d" * 300)],
    ids=["long address", "uncarried correlation id"],
)
def test_an_unreadable_request_is_buried_whoever_asked(
    reply_to: str, correlation_id: str
) -> None:
    headers = {
        "content-type": "application/json",
        wire.TYPE: "tests.Reserve;v=1;min=1",
        wire.REPLY_TO: reply_to,
        wire.CORRELATION_ID: correlation_id,
        wire.TICKET: "x",
    }
    put("shop.reserve", b"[]", {"txmsg-id": str(uuid.uuid4()), **headers})
    drain()
    assert DeadLetter.objects.get(stage="shop.reserve").reason == "invalid_body"


def test_an_undo_whose_request_is_done_elsewhere_is_an_error_of_the_checks() -> None:
    def ids() -> list[str]:
        return [one.id for one in check() if "undoes" in one.msg]

    assert ids() == []
    stages.unregister("shop.reserve")
    assert ids() == ["txmsg.E062"]
    stages.stage(stock_reserve, using="other")(reserve)
    assert ids() == ["txmsg.E062"]


def test_an_undo_of_other_requests_is_refused() -> None:
    flow = Checkout()
    with pytest.raises(ConfigurationError, match=r"undoes 'shop\.reserve'"):
        flow.ask(invoice, Reserve("1"), then=flow.expired, undo=stock_release)


def test_one_of_a_concurrent_answer_deadline_and_copies_continues_the_run() -> None:
    """Several threads process the answer, its copies and the time-out at the same time,
    each in its own transaction. One of them continues the run."""
    runs = [place(str(number)) for number in range(8)]
    drain()
    for run in runs:
        say(True, run.key)
    Run.objects.update(due_at=F("due_at") - 31 * DAY)
    Deadlines(["default"]).tick()
    ship()
    for row in OutboxMessage.objects.filter(destination="shop.checkout.steps"):
        headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
        headers["txmsg-id"] = str(uuid.uuid4())
        put(row.destination, bytes(row.body), headers)

    with running(stages.find(["shop.checkout.steps"])[0], concurrency=4):
        wait_until(lambda: not QueueMessage.objects.exists(), deadline=120)
    drain()

    for run in runs:
        again(run)
        steps = FlowStep.objects.filter(run=run, step__in=["approved", "expired"])
        assert steps.count() == 1
        released = effects().count(f"release {run.key}")
        assert (run.outcome, released) in (("answered", 0), ("failed", 1))


def test_an_undo_waits_for_a_request_in_progress_and_reverses_it() -> None:
    entered, let_go = threading.Event(), threading.Event()

    def slow(request: Reserve) -> Reserved | SoldOut:
        Stock.reserve(request)
        entered.set()
        assert let_go.wait(60)
        return Reserved("A7")

    stages.unregister("shop.reserve")
    stages.stage(stock_reserve)(slow)
    run = place()
    take_start()
    ship()
    with running(stages.find(["shop.reserve"])[0]):
        assert entered.wait(60)
        undoing = threading.Thread(target=give_up, args=(run,))
        undoing.start()
        # On PostgreSQL it waits for the row; on SQLite for the lock of the database.
        undoing.join(0.5)
        let_go.set()
        undoing.join(120)
        assert not undoing.is_alive()
        asked = QueueMessage.objects.filter(queue="shop.reserve")
        wait_until(lambda: not asked.exists(), deadline=60)
    drain(ahead=HOUR)
    assert failed(run) == {"why": "now"}
    assert effects() == ["reserve 1", "release 1"]


def give_up(run: Run) -> None:
    """Cancel a run, and deliver its undo to the other service."""
    try:
        with transaction.atomic():
            cancel(run, "now")
        ship()
        take(stages.find(["shop.checkout.steps"])[0])
        ship()
        take(stages.find(["shop.release"])[0])
    finally:
        connections.close_all()
