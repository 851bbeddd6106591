"""A join sends several requests for a run. The run continues once, even if answers
arrive at the same time, twice, late or never."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import io
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_txmsg import (
    Destination,
    Message,
    Refuse,
    cancel_message,
    outbox_session,
    reschedule_message,
    send_message,
    stages,
    wire,
)
from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.dead_letters import bulk, resolution
from django_txmsg.dead_letters.burial import bury_unread
from django_txmsg.errors import (
    ConfigurationError,
    DispatchRejected,
    InvalidMessage,
    TransactionRequired,
)
from django_txmsg.flows import (
    Answers,
    Cancelled,
    Dead,
    Flow,
    Gather,
    Next,
    Request,
    TimedOut,
    acts,
    batch,
    cancel,
    going,
    joining,
    signal,
    start,
    step,
)
from django_txmsg.flows.batches import Batches
from django_txmsg.flows.undos import MOST_HELD, of_request
from django_txmsg.models import (
    Batch,
    Branch,
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.batch import Progress
from django_txmsg.models.queue import QueueMessage
from django_txmsg.monitoring import retention
from django_txmsg.rules.dead_letters import GONE_ON
from django_txmsg.sending.outbox import foreign_names
from django_txmsg.signals import flow_late
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.factories import ago
from tests.faults import wait_until
from tests.integration.test_intake import WithDeadLetters, taking_in
from tests.integration.test_unique import waiting
from tests.running import committing, declared, put, running, send, ship, txmsg
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

HOUR = dt.timedelta(hours=1)


@dataclass
class Tour:
    stops: int
    enough: int | None = None
    at_once: int | None = None


@dataclass
class Price:
    stop: int


@dataclass
class Priced:
    stop: int
    amount: int


@dataclass
class Elsewhere:
    why: str


@dataclass
class Toured:
    amounts: list[int]


price = Destination("tour.price", Price, reply=Priced)
forget = Destination("tour.forget", Price)
untour = Destination("tour.untour", Tour)
refused: set[int] = set()
broken: set[int] = set()


def answer_price(body: Price) -> Priced:
    if body.stop in refused:
        raise Refuse("sold out")
    if body.stop in broken:
        raise ValueError("broken")
    Effect.objects.create(name=f"price {body.stop}", message_id="")
    return Priced(body.stop, 10 * body.stop)


def forget_price(body: Price) -> None:
    Effect.objects.create(name=f"forget {body.stop}", message_id="")


def amount(answer: Priced | TimedOut | Dead | Cancelled) -> int:
    """Return the price in an answer, or a negative number for an outcome without a
    price."""
    if isinstance(answer, Priced):
        return answer.amount
    return {TimedOut: -1, Dead: -2, Cancelled: -3}[type(answer)]


@shelved
class Touring(Flow[Tour, Toured | Cancelled], name="tour.flow", within=HOUR):
    stops: int = 0

    @step
    def start(self, tour: Tour) -> Next[Toured | Cancelled]:
        self.stops = tour.stops
        return self.gather(
            [
                self.branch(price, Price(number), undo=forget)
                for number in range(tour.stops)
            ],
            then=self.ready,
            enough=tour.enough,
            at_once=tour.at_once,
        )

    @step
    def ready(self, answers: Answers[Priced]) -> Next[Toured | Cancelled]:
        assert len(answers) == self.stops
        return Toured([amount(one) for one in answers])

    @signal
    def elsewhere(self, by: Elsewhere) -> Next[Toured | Cancelled]:
        return self.fail(Cancelled(by.why)) if by.why else Toured([])


@pytest.fixture(autouse=True)
def tours() -> Iterator[None]:
    refused.clear()
    broken.clear()
    with (
        at_hand(Touring),
        declared(answer_price, price, name="tour.price"),
        declared(forget_price, forget, name="tour.forget", undoes=price),
    ):
        yield


@pytest.fixture
def late() -> Iterator[list[uuid.UUID]]:
    """Collect the ids of messages that came too late for their run."""
    ids: list[uuid.UUID] = []

    def note(id: uuid.UUID, **_: Any) -> None:
        ids.append(id)

    flow_late.connect(note)
    yield ids
    flow_late.disconnect(note)


def tour(stops: int, enough: int | None = None, at_once: int | None = None) -> Run:
    """Start a run and its join. The join's requests are stored, but not relayed."""
    with transaction.atomic():
        run = start(Touring, Tour(stops, enough, at_once), key=str(stops))
    ship()
    take(stages.find(["tour.flow"])[0])
    return run


def answer(times: int) -> None:
    """Process `times` requests in the other service, and relay its answers."""
    ship()
    take(stages.find(["tour.price"])[0], times)
    ship()


def amounts(run: Run) -> list[int]:
    run.refresh_from_db()
    assert run.outcome == "answered", (run.waits_for, run.outcome, run.answer)
    assert FlowStep.objects.filter(run=run, step="ready").count() == 1
    found: list[int] = json.loads(run.answer)["amounts"]
    return found


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def test_a_run_continues_after_all_answers_in_the_order_asked() -> None:
    run = tour(3)
    answer(2)
    take(stages.find(["tour.flow.steps"])[0], 2)
    joined = Batch.objects.get()
    assert joined.progress == Progress(3, answered=2, failed=0, left=0)
    assert joined.progress.open == 1

    drain()

    assert amounts(run) == [0, 10, 20]
    assert run.state == '{"stops":3}'
    assert Batch.objects.get().progress.answered == 3


def test_a_request_that_is_given_up_ends_its_branch_and_is_not_enough() -> None:
    refused.add(0)
    run = tour(3, enough=2)
    answer(2)
    take(stages.find(["tour.flow.steps"])[0], 2)
    assert Batch.objects.get().progress == Progress(3, answered=1, failed=1, left=0)
    drain()
    assert amounts(run) == [-2, 10, 20]


def test_a_join_that_can_no_longer_get_enough_ends_with_its_last_answer() -> None:
    refused.update([0, 1])
    run = tour(3, enough=2)
    drain()
    assert amounts(run) == [-2, -2, 20]


def test_what_enough_leaves_over_is_revoked_and_its_answer_is_late(
    late: list[uuid.UUID],
) -> None:
    run = tour(4, enough=1)
    answer(1)
    drain("tour.flow.steps")
    assert amounts(run) == [0, -1, -1, -1]
    assert not FlowUndo.objects.filter(destination="tour.forget", number__gt=1).exists()

    take(stages.find(["tour.price"])[0])  # before its undo
    drain("tour.flow.steps", "tour.forget")
    drain()

    # The other two were revoked.
    assert effects() == ["forget 1", "price 0", "price 1"]
    assert len(late) == 1


def test_a_deadline_ends_a_join_and_undoes_what_it_leaves_over(
    late: list[uuid.UUID],
) -> None:
    run = tour(3)
    answer(1)
    take(stages.find(["tour.flow.steps"])[0])
    drain("tour.flow.steps", "tour.forget", ahead=HOUR)
    assert amounts(run) == [0, -1, -1]
    drain()
    assert effects() == ["price 0"]
    assert Batch.objects.get().progress == Progress(3, answered=1, failed=0, left=2)
    assert late == []


def on_their_way() -> int:
    ship()
    return QueueMessage.objects.filter(queue="tour.price").count()


def test_only_so_many_requests_are_on_their_way_at_once() -> None:
    refused.add(1)
    run = tour(7, at_once=2)
    for _ in range(6):
        assert on_their_way() == 2
        answer(1)
        take(stages.find(["tour.flow.steps"])[0])
    assert on_their_way() == 1, "the last one"
    drain()
    assert amounts(run) == [0, -2, 20, 30, 40, 50, 60]


def test_a_dead_letter_gives_its_place_to_the_next_request() -> None:
    broken.update([0, 1])
    run = tour(5, at_once=2)
    drain(raises=False)
    assert effects() == ["price 2", "price 3", "price 4"]
    assert Batch.objects.get().progress.open == 2
    assert DeadLetter.objects.filter(resolution="open").count() == 2

    broken.clear()
    bulk.finish(bulk.start("redeliver", {}))
    drain()
    assert amounts(run) == [0, 10, 20, 30, 40]


def request_of(number: int) -> uuid.UUID:
    return Branch.objects.get(number=number).request_id


def test_cancelled_requests_that_are_held_back_give_their_places_to_the_next() -> None:
    run = tour(7, at_once=2)
    assert all(cancel_message(request_of(number)) for number in (2, 3, 5))
    dead = OutboxMessage.objects.filter(destination="tour.flow.steps")
    for one in dead:  # they arrive last
        assert reschedule_message(one.message_id, delay=HOUR / 2)
    assert (len(dead), on_their_way()) == (3, 2)
    drain()
    assert effects() == ["price 0", "price 1", "price 4", "price 6"]
    drain(ahead=HOUR / 2)
    assert amounts(run) == [0, 10, -2, -2, 40, -2, 60]


def test_pruned_requests_that_were_held_back_give_their_places_to_the_next() -> None:
    run = tour(7, at_once=2)
    assert all(cancel_message(request_of(number)) for number in (2, 3, 5))
    drain("tour.flow.steps")
    assert on_their_way() == 2, "no request was sent in the place of one held back"
    FlowUndo.objects.all().delete()  # a request with an undo is kept
    OutboxMessage.objects.filter(cancelled_at__isnull=False).update(dead_at=ago(days=8))
    OutboxMessage.objects.update(created_at=ago(days=8))
    call_command("prune_messages")
    assert not OutboxMessage.objects.filter(cancelled_at__isnull=False).exists()
    drain()
    assert amounts(run) == [0, 10, -2, -2, 40, -2, 60]


@shelved
class Reading(Flow[Tour, int], name="tour.reading", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[int]:
        asked = [self.branch(price, Price(number)) for number in range(tour.stops)]
        return self.gather(asked, then=self.ready, at_once=tour.at_once)

    @step
    def ready(self, answers: Answers[Priced | Dead]) -> Next[int]:
        return len(answers)


def test_step_that_reads_dead_gives_the_place_of_a_pruned_request_to_the_next() -> None:
    with at_hand(Reading):
        with transaction.atomic():
            run = start(Reading, Tour(4, at_once=1))
        drain("tour.reading")
        assert cancel_message(request_of(1))
        drain("tour.reading.steps")
        OutboxMessage.objects.filter(cancelled_at__isnull=False).update(
            dead_at=ago(days=8), created_at=ago(days=8)
        )
        call_command("prune_messages")
        assert not OutboxMessage.objects.filter(cancelled_at__isnull=False).exists()
        drain()
    run.refresh_from_db()
    assert (run.outcome, json.loads(run.answer)) == ("answered", 4)


def test_cancelled_request_that_is_due_gives_its_place_to_the_next() -> None:
    run = tour(5, at_once=2)
    assert cancel_message(request_of(0))
    drain()
    assert effects() == ["price 1", "price 2", "price 3", "price 4"]
    assert amounts(run) == [-2, 10, 20, 30, 40]


def test_burying_a_request_for_newer_code_lets_the_next_request_leave() -> None:
    broken.add(0)
    run = tour(3, at_once=1)
    answer(1)
    broken.clear()
    requests = InboxMessage.objects.filter(stage="tour.price")
    requests.update(needs_type="tour.Price", needs_version=2)
    drain()
    assert effects() == []

    assert bury_unread("default", "tour.price") == 1
    drain()
    assert effects() == ["price 1", "price 2"]
    assert Batch.objects.get().progress.open == 1

    requests.update(needs_type="", needs_version=None)
    bulk.finish(bulk.start("redeliver", {}))
    drain()
    assert amounts(run) == [0, 10, 20]


def dead_letter_in_the_broker() -> DeadLetter:
    """Let the broker dead-letter the request in the queue, and store its dead
    letter."""
    ship()
    request = QueueMessage.objects.get(queue="tour.price")
    request.queue = "DLQ"
    request.headers["original-destination"] = "tour.price"
    request.save()
    backend = f"{WithDeadLetters.__module__}.{WithDeadLetters.__qualname__}"
    with taking_in("database://?poll=0.01", "DLQ", BACKEND=backend):
        pass
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.stage, letter.resolution) == ("broker", "", "open")
    return letter


def test_request_dead_lettered_by_the_broker_is_answered_after_redelivery() -> None:
    run = tour(3, at_once=1)
    dead_letter_in_the_broker()
    drain()
    assert effects() == ["price 1", "price 2"], "it has made room for the next request"

    bulk.finish(bulk.start("redeliver", {}))
    drain()
    assert amounts(run) == [0, 10, 20]


def test_undo_revokes_the_copy_of_a_request_dead_lettered_by_the_broker() -> None:
    tour(1)
    letter = dead_letter_in_the_broker()
    resolution.redeliver_copy(letter, headers={}, body=bytes(letter.body))
    drain("tour.flow.steps", "tour.forget", ahead=2 * HOUR)
    drain()
    assert effects() == []


def test_request_dead_lettered_by_the_broker_is_given_up_when_discarded() -> None:
    run = tour(1)
    letter = dead_letter_in_the_broker()
    bulk.finish(bulk.start("discard", {}))
    drain()
    assert amounts(run) == [-2]

    restoring = bulk.start("restore", {})
    bulk.finish(restoring)
    restoring.refresh_from_db()
    letter.refresh_from_db()
    assert (restoring.done, restoring.skipped) == (0, 1)
    assert letter.resolution == "discarded"


def forget_requests() -> None:
    """Prune the inbox rows of the ended requests."""
    ended = InboxMessage.objects.filter(stage="tour.price").exclude(dead_at=None)
    columns = ("first_received_at", "last_received_at", "dead_at")
    assert ended.update(**dict.fromkeys(columns, ago(days=15))) == 1
    call_command("prune_messages", stdout=io.StringIO())
    assert not ended.exists()


def test_discarded_request_is_not_restored_after_its_row_is_pruned() -> None:
    broken.add(0)
    run = tour(1)
    drain(raises=False)
    bulk.finish(bulk.start("discard", {}))
    drain()
    assert amounts(run) == [-2]
    broken.clear()

    forget_requests()

    assert bulk.finish(bulk.start("restore", {})).done == 0
    assert DeadLetter.objects.get().resolution == "discarded"


def test_letter_closed_by_its_flow_is_not_restored_after_its_row_is_pruned() -> None:
    broken.add(0)
    run = tour(1)
    drain(raises=False)
    with transaction.atomic():
        cancel(run, "closed")
    drain()
    letter = DeadLetter.objects.get()
    assert (letter.resolution, letter.resolved_by) == ("discarded", GONE_ON)
    broken.clear()

    forget_requests()

    assert bulk.finish(bulk.start("restore", {})).done == 0


def test_a_request_that_the_broker_refuses_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = DatabaseSession.send

    def send(session: Any, messages: Any, **options: Any) -> Any:
        kept = [one for one in messages if one.body != b'{"stop":0}']
        outcomes = iter(real(session, kept, **options))
        return [
            next(outcomes) if one in kept else DispatchRejected("no permission")
            for one in messages
        ]

    monkeypatch.setattr(DatabaseSession, "send", send)
    with txmsg(RELAY={"MAX_ATTEMPTS": 1}):
        run = tour(2)
        drain(raises=False)
    monkeypatch.undo()
    assert amounts(run) == [-2, 10]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.resolution) == ("rejected", "open")

    bulk.finish(bulk.start("redeliver", {}))
    drain()
    letter.refresh_from_db()
    assert (letter.resolution, letter.resolved_by) == ("discarded", GONE_ON)
    assert effects() == ["price 1"]


@pytest.fixture
def foreign_price() -> Iterator[None]:
    """Let the consumer of `price` be one without this package."""
    foreign_names.add(str(price))
    yield
    foreign_names.remove(str(price))


@shelved
class Unlimited(Flow[Tour, int], name="tour.unlimited", within=None):
    @step
    def start(self, tour: Tour) -> Next[int]:
        asked = [self.branch(price, Price(number)) for number in range(tour.stops)]
        return self.gather(asked, then=self.ready, enough=tour.enough)

    @step
    def ready(self, answers: Answers[Priced]) -> Next[int]:
        return 0


def test_a_join_without_a_deadline_closes_the_dead_letters_of_its_requests() -> None:
    broken.add(0)
    with txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}), at_hand(Unlimited):
        with transaction.atomic():
            run = start(Unlimited, Tour(2))
        drain(raises=False)
        assert DeadLetter.objects.get().resolution == "open"
        with transaction.atomic():
            cancel(run)
        drain()
    assert DeadLetter.objects.get().resolved_by == GONE_ON


@pytest.mark.usefixtures("foreign_price")
def test_a_join_closes_the_dead_letter_of_a_foreign_answer() -> None:
    """An unreadable answer without our headers becomes a dead letter. The answer's
    correlation id contains the join's ticket and the number of the request. When the
    join ends, it finds the dead letter by this correlation id, and discards the dead
    letter."""
    run = tour(2)
    answer(1)
    run.refresh_from_db()
    assert run.turn is not None
    ticket = wire.ticket(run.run_id, run.turn)
    headers = {
        wire.CONTENT_TYPE: wire.JSON,
        wire.MESSAGE_ID: str(uuid.uuid4()),
        wire.CORRELATION_ID: f"{ticket}/1",
    }
    put("tour.flow.steps", b'"nonsense"', headers)
    drain("tour.flow.steps", raises=False)
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.correlation_id) == ("invalid_body", f"{ticket}/1")
    drain("tour.flow.steps", "tour.forget", ahead=2 * HOUR)
    letter.refresh_from_db()
    assert (letter.resolution, letter.resolved_by) == ("discarded", GONE_ON)


def test_requests_that_have_not_left_expire_with_their_join() -> None:
    run = tour(5, at_once=2)
    answer(1)
    take(stages.find(["tour.flow.steps"])[0])
    assert on_their_way() == 2
    drain("tour.flow.steps", "tour.forget", ahead=2 * HOUR)
    drain()
    assert amounts(run)[0] == 0
    assert not OutboxMessage.objects.filter(dispatched_at=None, dead_at=None).exists()
    assert "price 4" not in effects()
    assert not DeadLetter.objects.exists()


def test_copies_of_answers_change_nothing(late: list[uuid.UUID]) -> None:
    run = tour(3)
    answer(2)
    for row in OutboxMessage.objects.filter(destination="tour.flow.steps"):
        again(row, str(uuid.uuid4()))
        again(row, str(row.message_id))
    drain("tour.flow.steps")
    assert Batch.objects.get().progress.answered == 2
    assert len(late) == 2  # the copies with their own ids
    drain()
    assert amounts(run) == [0, 10, 20]


def again(row: OutboxMessage, message_id: str) -> None:
    """Deliver a copy of a stored message, as a broker may do."""
    headers = wire.headers_of(row, "tests", wire.format_instant(row.created_at))
    headers["txmsg-id"] = message_id
    put(row.destination, bytes(row.body), headers)


@pytest.mark.parametrize("enough", [None, 5])
def test_answers_and_copies_at_the_same_time_end_each_join_once(
    enough: int | None,
) -> None:
    runs = [tour(stops, enough) for stops in (8, 9)]
    drain("tour.price")
    ship()
    for row in OutboxMessage.objects.filter(destination="tour.flow.steps"):
        again(row, str(uuid.uuid4()))
    with running(stages.find(["tour.flow.steps"])[0], concurrency=4):
        wait_until(lambda: not QueueMessage.objects.exists(), deadline=120)
    drain()
    for run, stops in zip(runs, (8, 9), strict=True):
        found = amounts(run)
        assert [one for one in found if one >= 0] == [
            10 * number for number in range(stops) if found[number] >= 0
        ]
        assert sum(one >= 0 for one in found) >= (enough or stops)


@pytest.mark.parametrize("enough", [None, 2])
@pytest.mark.parametrize("commits", [True, False])
def test_two_last_answers_at_the_same_moment_end_the_join(
    commits: bool, enough: int | None
) -> None:
    """Transactions A and B each process one of the last answers, and neither sees the
    other's answer. B commits. Then A commits, or rolls back as after a kill. The join
    ends with both answers."""
    run = tour(2 if enough is None else 3, enough)
    answer(2)
    stage = stages.find(["tour.flow.steps"])[0]
    entered, let_go = threading.Event(), threading.Event()

    def held(message: Message) -> None:
        stage.handler(message)
        entered.set()
        assert let_go.wait(120)
        if not commits:
            raise RuntimeError("killed")

    first = in_thread(dataclasses.replace(stage, handler=held))
    assert entered.wait(60)
    if connection.vendor != "postgresql":
        let_go.set()  # nobody else can write meanwhile
        first.join(120)
    take(stage, parked=False)  # the second answer, which does not wait for the first
    ship()
    last = in_thread(stage)  # what it has stored, which does
    last.join(0.3)
    let_go.set()
    first.join(120)
    last.join(120)
    drain("tour.flow.steps", "tour.forget")
    assert [one for one in amounts(run) if one >= 0] == [0, 10]


@pytest.mark.postgresql
def test_answer_of_a_large_batch_with_enough_locks_no_open_branches() -> None:
    """Another transaction makes the same check, and has locked half of the branches.
    They count as open until enough may have been answered."""
    batch = Batch.objects.create(
        run=tour(1), turn=uuid.uuid4(), total=4000, enough=2000
    )
    Branch.objects.bulk_create(
        Branch(batch=batch, number=n, destination="q", request_id=uuid.uuid4())
        for n in range(batch.total)
    )
    assert not batch.may_have_ended()
    with transaction.atomic(), ThreadPoolExecutor(1) as other:
        list(batch.rows().filter(number__gte=1999).select_for_update())
        assert not other.submit(in_own_connection, batch.may_have_ended).result(60)
    for answered, ended in ((1000, False), (1999, False), (2000, True)):
        batch.rows().filter(number__lt=answered).update(answered_at=Now())
        assert batch.may_have_ended() == ended


def in_own_connection(work: Callable[[], bool]) -> bool:
    try:
        return work()
    finally:
        connections.close_all()


def in_thread(stage: stages.Stage) -> threading.Thread:
    """Process one delivery in a new thread."""

    def work() -> None:
        try:
            take(stage, parked=False)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.postgresql
def test_signal_that_ends_a_join_and_an_answer_lock_in_the_same_order() -> None:
    """The signal cancels the request that the answer releases, and deletes the undo
    that the answer updates."""
    run = tour(3, at_once=1)
    with transaction.atomic():
        Touring.signal("3", Elsewhere(""))
    answer(1)
    stage = stages.find(["tour.flow.steps"])[0]
    errors: list[Exception] = []

    def noted(message: Message) -> None:
        try:
            stage.handler(message)
        except Exception as error:
            errors.append(error)
            raise

    noting = dataclasses.replace(stage, handler=noted)
    released = Branch.objects.get(number=1).request_id
    with transaction.atomic():
        OutboxMessage.objects.select_for_update().get(message_id=released)
        signalled = in_thread(noting)
        wait_until(lambda: waiting() == 1)
        answered = in_thread(noting)
        wait_until(lambda: waiting() == 2)
    signalled.join(120)
    answered.join(120)
    assert errors == []
    run.refresh_from_db()
    assert run.answer == '{"amounts":[]}'


@pytest.mark.parametrize("how", ["cancelled", "by its signal"])
def test_a_join_that_is_given_up_undoes_what_was_done_and_revokes_the_rest(
    how: str, late: list[uuid.UUID]
) -> None:
    run = tour(3)
    answer(1)
    take(stages.find(["tour.flow.steps"])[0])
    with transaction.atomic():
        if how == "cancelled":
            cancel(run, "closed")
        else:
            Touring.signal("3", Elsewhere("closed"))
    ship()
    take(stages.find(["tour.flow.steps"])[0])
    answer(1)  # after the join, and before its undo
    drain("tour.flow.steps", "tour.forget")
    drain()

    run.refresh_from_db()
    assert (run.outcome, json.loads(run.answer)) == ("failed", {"why": "closed"})
    assert effects() == ["forget 0", "forget 1", "price 0", "price 1"]
    assert len(late) == 1
    assert not FlowUndo.objects.filter(confirmed_at=None).exists()


@pytest.mark.parametrize("act", ["cancel", "go-back"])
def test_requests_of_a_cancelled_join_that_have_not_left_are_not_sent(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "AT_ONCE", 2)
    run = tour(4, at_once=1)
    FlowUndo.objects.all().delete()
    Run.objects.update(undos=0)  # its step could have asked without undo=
    FlowStep.objects.update(undos=0)
    answer(1)
    take(stages.find(["tour.flow.steps"])[0])
    with transaction.atomic():
        acts.act(act, run, acts.Given(why="closed", to="start"))
    drain("tour.flow.steps")
    join, *later = Batch.objects.order_by("pk")
    assert join.progress == Progress(4, answered=1, failed=0, left=3)
    assert len(later) == (act == "go-back")
    left = join.rows().filter(left=True).values("request_id")
    held = OutboxMessage.objects.filter(message_id__in=left, dispatched_at=None)
    assert len(held) >= 2
    assert all(one.cancelled_at for one in held)
    drain()
    drain(ahead=2 * HOUR)
    run.refresh_from_db()
    assert run.outcome == ("failed" if act == "cancel" else "answered")


def test_an_unreadable_answer_leaves_its_branch_open() -> None:
    run = tour(2)
    answer(1)
    asked = OutboxMessage.objects.get(destination="tour.flow.steps")
    headers = wire.headers_of(asked, "tests", wire.format_instant(asked.created_at))
    headers |= {"txmsg-id": str(uuid.uuid4()), "txmsg-type": "Priced;v=1;min=1"}
    QueueMessage.objects.all().delete()
    put(asked.destination, b'{"stop": "none"}', headers)
    drain("tour.flow.steps")
    assert DeadLetter.objects.get().reason == "invalid_body"
    assert Batch.objects.get().progress.open == 2
    drain(ahead=HOUR)
    assert amounts(run)[0] == -1


@shelved
class Nested(Flow[Tour, Toured | Cancelled], name="tour.nested", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[Toured | Cancelled]:
        asked = [self.branch(Touring, Tour(2)) for _ in range(tour.stops)]
        return self.gather(asked, then=self.ready, enough=tour.enough)

    @step
    def ready(self, answers: Answers[Toured | Cancelled]) -> Next[Toured | Cancelled]:
        return Toured([sum(isinstance(one, Toured) for one in answers)])


def test_a_join_that_ends_early_cancels_its_unanswered_flows() -> None:
    with at_hand(Nested):
        with transaction.atomic():
            run = start(Nested, Tour(3))
        drain()
        run.refresh_from_db()
        assert run.answer == '{"amounts":[3]}'

        with transaction.atomic():
            run = start(Nested, Tour(2, enough=1))
        ship()
        take(stages.find(["tour.nested"])[0])
        ship()
        take(stages.find(["tour.flow"])[0])
        drain("tour.nested.steps", "tour.flow.steps", "tour.price")
        run.refresh_from_db()
        assert run.answer == '{"amounts":[1]}'
        drain()
        # The second was cancelled before it began.
        _, second = Branch.objects.filter(batch__run=run).order_by("number")
        assert not Run.objects.filter(run_id=second.request_id).exists()


@shelved
class Guarded(Flow[Tour, str], name="tour.guarded", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[str]:
        asked = self.branch(Touring, Tour(2), undo=untour)
        return self.gather([asked], then=self.ready)

    @step
    def ready(self, answers: Answers[Toured | Cancelled]) -> Next[str]:
        return ", ".join(type(one).__name__ for one in answers)


@pytest.mark.parametrize("begun", [False, True])
def test_a_flow_that_a_join_leaves_over_is_undone_after_its_cancel(begun: bool) -> None:
    def untour_it(body: Tour) -> None:
        Effect.objects.create(name="untour", message_id="")

    undoes = Touring.destination
    with at_hand(Guarded), declared(untour_it, untour, name="untour", undoes=undoes):
        with transaction.atomic():
            run = start(Guarded, Tour(1))
        drain("tour.guarded")
        if begun:
            drain("tour.flow")
            answer(1)
        drain("tour.guarded.steps", ahead=HOUR)
        drain("untour" if begun else "tour.flow.steps")
        run.refresh_from_db()
        assert run.answer == '"TimedOut"'
        drain()
        drain(ahead=2 * MOST_HELD)
    assert not OutboxMessage.objects.filter(dispatched_at=None, dead_at=None).exists()
    done = list(Effect.objects.order_by("pk").values_list("name", flat=True))
    assert done[-1:] == ["untour"] * begun
    assert ("forget 0" in done) == begun


@shelved
class Front(Flow[Tour, Toured | Cancelled], name="tour.front", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[Toured | Cancelled]:
        if tour.stops:
            return self.hand_over(Front, Tour(tour.stops - 1))
        return self.sleep(2 * HOUR, then=self.woken)

    @step
    def woken(self) -> Next[Toured | Cancelled]:
        return Toured([])


@shelved
class Impatient(Flow[Tour, str], name="tour.impatient", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[str]:
        return self.gather([self.branch(Front, tour)], then=self.ready)

    @step
    def ready(self, answers: Answers[Toured | Cancelled]) -> Next[str]:
        return ", ".join(type(one).__name__ for one in answers)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_join_cancels_the_flow_to_which_an_unanswered_flow_handed_over(
    times: int,
) -> None:
    with at_hand(Impatient, Front):
        with transaction.atomic():
            run = start(Impatient, Tour(times))
        drain()
        drain(ahead=HOUR)
        run.refresh_from_db()
        assert run.answer == '"TimedOut"'
        last = Run.objects.latest("id")
        assert (last.outcome, Run.objects.count()) == ("failed", 2 + times)


def test_cancel_of_an_unanswered_flow_counts_as_no_further_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(going, "MAX_HOPS", 2)
    with at_hand(Nested):
        with transaction.atomic():
            run = start(Nested, Tour(2, enough=1))
        ship()
        take(stages.find(["tour.nested"])[0])
        ship()
        take(stages.find(["tour.flow"])[0], 2)
        answer(2)  # those of the first of the two flows
        drain("tour.flow.steps", "tour.nested.steps")
        run.refresh_from_db()
        assert (run.answer, run.hop) == ('{"amounts":[1]}', 2)
        drain()
    assert not DeadLetter.objects.exists()
    assert not Run.objects.filter(ended_at=None).exists()


@shelved
class Rounds(Flow[Tour, int], name="tour.rounds", within=HOUR):
    @step
    def start(self, tour: Tour) -> Next[int]:
        return self.gather([self.branch(price, Price(1))] * 2, then=self.following)

    @step
    def following(self, answers: Answers[Priced]) -> Next[int]:
        return self.gather([self.branch(price, Price(2))] * 2, then=self.following)


def test_gather_counts_as_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going, "MAX_HOPS", 5)
    with at_hand(Rounds):
        with transaction.atomic():
            start(Rounds, Tour(2))
        drain()
    assert DeadLetter.objects.get().reason == "hops"
    assert len(effects()) == 10


def test_answer_that_names_a_message_of_others_does_not_release_it() -> None:
    with transaction.atomic():
        other = send_message("orders.reminder", None, delay=HOUR)
    ticket = f"{wire.ticket(uuid.uuid4(), uuid.uuid4())}/u{other.id.hex}"
    headers = {"content-type": wire.JSON, wire.TICKET: ticket}
    put("tour.flow.steps", b"null", {"txmsg-id": str(uuid.uuid4()), **headers})
    take(stages.find(["tour.flow.steps"])[0])
    ship()
    assert OutboxMessage.objects.get(message_id=other.id).dispatched_at is None
    assert not DeadLetter.objects.exists()


def test_a_gather_of_nothing_continues_at_once() -> None:
    run = tour(0)
    drain()
    assert amounts(run) == []


def test_a_thousand_more_branches_cost_a_few_statements_more() -> None:
    counts = []
    for stops in (3, 2003):
        with CaptureQueriesContext(connection) as queries:
            run = tour(stops)
        counts.append(len(queries))
        assert len(run.state) < 100
    assert counts[1] - counts[0] < 60
    assert Branch.objects.count() == 2006


def test_joins_are_pruned_with_their_run() -> None:
    tour(2)
    drain()
    Run.objects.update(ended_at=dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc))
    (kind,) = (one for one in retention.kinds() if one.name == "runs of flows")
    assert sum(retention.prune(kind, "default")) == 1
    assert not Batch.objects.exists()
    assert not Branch.objects.exists()


def test_a_step_that_joins_is_tested_by_calling_it() -> None:
    assert Touring().start(Tour(1)) == Gather(
        (Request(price, Price(0), undo=forget),), then="ready", within=HOUR
    )
    assert Touring(stops=2).ready(Answers([Priced(0, 5), TimedOut()])) == Toured(
        [5, -1]
    )


def test_an_impossible_join_is_refused_when_it_is_created() -> None:
    flow = Touring()
    asked = [flow.branch(price, Price(1))]
    with pytest.raises(ConfigurationError, match="does not take what it would get"):
        flow.gather(asked, then=flow.start)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="does not take what it would get"):
        flow.ask(price, Price(1), then=flow.ready)  # type: ignore[arg-type]
    for enough in (0, 2, True):
        with pytest.raises(ConfigurationError, match="enough="):
            flow.gather(asked, then=flow.ready, enough=enough)
    for at_once, within in ((0, HOUR), (1, None)):
        with pytest.raises(ConfigurationError, match="at_once="):
            flow.gather(asked, then=flow.ready, at_once=at_once, within=within)
    keyed = [flow.branch(price, Price(1), key="k")]
    with pytest.raises(ConfigurationError, match="has a key"):
        flow.gather(keyed, then=flow.ready, at_once=1)
    flow.gather(keyed, then=flow.ready)


@dataclass
class Mail:
    to: str


@pytest.fixture
def mailing() -> Iterator[list[dict[str, Any]]]:
    """Declare a stage for the messages of a batch, and a stage for its final message.
    Yields a list of the bodies of final messages."""
    ends: list[dict[str, Any]] = []

    def mail(message: Message) -> None:
        if message.body["to"] == "nobody":
            raise Refuse("no such address")
        Effect.objects.create(name=message.body["to"], message_id="")

    def mailed(message: Message) -> None:
        ends.append(message.body)

    with (
        txmsg(FLOWS={"BATCHES": True}),
        at_hand(Batches),
        declared(mail, "mail"),
        declared(mailed, "mailed"),
    ):
        yield ends


def mails(*names: str) -> list[dict[str, Any]]:
    return [{"destination": "mail", "body": {"to": name}} for name in names]


def test_a_batch_ends_with_a_message(mailing: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        stored = batch(mails("Ada", "nobody", "Bob"), then="mailed")
    assert stored.progress == Progress(3, answered=0, failed=0, left=0)
    drain()
    assert stored.progress == Progress(3, answered=2, failed=1, left=0)
    run_id = str(Run.objects.get().run_id)
    counts = {"total": 3, "answered": 2, "failed": 1, "left": 0}
    assert mailing == [{"run_id": run_id, **counts}]
    assert effects() == ["Ada", "Bob"]


class Queue(str, enum.Enum):
    MAILED = "mailed"
    FORGET = "tour.forget"


def test_batch_ends_with_a_message_to_the_value_of_an_enums_member(
    mailing: list[dict[str, Any]],
) -> None:
    with transaction.atomic():
        batch(mails("Ada"), then=Queue.MAILED)
    drain()
    assert [end["answered"] for end in mailing] == [1]


def test_undo_to_an_enums_member_is_sent_to_its_value() -> None:
    flow = Touring()
    request = flow.branch(price, Price(1), undo=Queue.FORGET)  # type: ignore[arg-type]
    (undo,) = of_request(Run(), request, uuid.uuid4())
    assert (undo.destination, type(undo.destination)) == ("tour.forget", str)


def test_a_batch_that_an_earlier_attempt_has_committed_is_stored_once(
    mailing: list[dict[str, Any]],
) -> None:
    batches: list[Batch] = []

    def handler(message: Message) -> None:
        with outbox_session():
            batches.append(batch(mails("Ada", "Bob"), then="mailed"))
        if len(batches) == 1:
            raise ValueError

    with declared(handler, transaction="none") as stage:
        send(stage.destination)
        take(stage, times=2)
    drain()
    assert batches == [Batch.objects.get()] * 2
    assert [one["answered"] for one in mailing] == [2]
    assert effects() == ["Ada", "Bob"]


@pytest.mark.parametrize("names", [(), ("Ada", "Bob")])
def test_a_stage_that_runs_again_after_its_batch_sends_the_same_ids(
    mailing: list[dict[str, Any]], names: tuple[str, ...]
) -> None:
    sent: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        batch(mails(*names), then="mailed")
        sent.append(send_message("tests.next", None).id)

    with declared(handler) as stage:
        message = send(stage.destination)
        take(stage)
        InboxMessage.objects.all().delete()
        put(stage.destination, message_id=message.id)
        take(stage)
    assert len(sent) == 2
    assert len(set(sent)) == 1


class Counted(dict[str, Any]):
    """A body that counts how often it is encoded."""

    times = 0

    def items(self) -> Any:
        self.times += 1
        return super().items()


@pytest.mark.parametrize("inside", [True, False])
def test_a_batch_encodes_each_body_once(
    mailing: list[dict[str, Any]], inside: bool
) -> None:
    body = Counted(name="Ada")
    messages = [{"destination": "tests.next", "body": body}]

    def handler(message: Message | None) -> None:
        batch(messages, then="mailed")

    if inside:
        with declared(handler) as stage:
            send(stage.destination)
            take(stage)
    else:
        with transaction.atomic():
            handler(None)
    assert body.times == 1
    assert messages == [{"destination": "tests.next", "body": body}]
    assert OutboxMessage.objects.get(destination="tests.next").body == b'{"name":"Ada"}'


def test_no_batch_is_taken_for_a_batch_that_an_attempt_has_skipped(
    mailing: list[dict[str, Any]],
) -> None:
    """The first attempt commits a batch. The later attempts skip that batch, and create
    another batch. The two batches differ only in the headers of their messages. The
    other batch is stored once, and is not mistaken for the first."""
    batches: list[Batch] = []

    def handler(message: Message) -> None:
        headers = {"tenant": str(min(len(batches), 1))}
        messages = [{**one, "headers": headers} for one in mails("Ada")]
        with outbox_session():
            batches.append(batch(messages, then="mailed"))
        if len(batches) < 3:
            raise ValueError

    with declared(handler, transaction="none") as stage:
        send(stage.destination)
        take(stage, times=3)
    assert batches[0] != batches[1] == batches[2]
    assert Batch.objects.count() == 2


def test_a_cancelled_message_of_a_batch_counts_as_failed(
    mailing: list[dict[str, Any]],
) -> None:
    with transaction.atomic():
        stored = batch(mails("Ada", "Bob"), then="mailed")
    ada = stored.branches.get(number=0)
    assert cancel_message(ada.request_id, why="as the test says")
    drain()
    assert stored.progress == Progress(2, answered=1, failed=1, left=0)
    assert len(mailing) == 1


def test_messages_of_a_cancelled_batch_that_have_not_left_are_not_sent(
    mailing: list[dict[str, Any]],
) -> None:
    with transaction.atomic():
        stored = batch(mails("Ada", "Bob"), then="mailed")
    ada = stored.branches.get(number=0)
    assert reschedule_message(ada.request_id, delay=HOUR)
    with transaction.atomic():
        cancel(stored.run, "wrong list")
    drain()
    drain(ahead=2 * HOUR)
    assert mailing == [{"why": "wrong list"}]
    assert effects() == ["Bob"]


def test_a_batch_ends_with_enough_or_with_its_deadline(
    mailing: list[dict[str, Any]],
) -> None:
    with transaction.atomic():
        batch(mails("Ada", "Bob"), then="mailed", enough=1)
        batch(mails("Cyd"), then="mailed", within=HOUR)
        OutboxMessage.objects.filter(body__contains=b"Cyd").update(
            due_at=dt.datetime(2100, 1, 1, tzinfo=dt.timezone.utc)
        )
    ship()
    take(stages.find(["mail"])[0])
    drain(Batches._declaration.steps_name, "mailed", ahead=2 * HOUR)
    assert sorted((one["total"], one["answered"], one["left"]) for one in mailing) == [
        (1, 0, 1),
        (2, 1, 1),
    ]
    drain()
    assert len(mailing) == 2


def test_a_batch_whose_answers_no_stage_would_take_is_refused() -> None:
    with transaction.atomic(), pytest.raises(ConfigurationError, match="BATCHES"):
        batch(mails("Ada"), then="mailed")


def test_a_batch_is_stored_only_with_its_transaction(
    mailing: list[dict[str, Any]],
) -> None:
    with pytest.raises(TransactionRequired):
        batch(mails("Ada"), then="mailed")
    with transaction.atomic():
        batch(mails("Ada"), then="mailed")
        transaction.set_rollback(True)
    with transaction.atomic():
        for wrong in (
            {"unique": "a"},
            {"expires": HOUR},
            {"expires": dt.timedelta(0)},
            {"nonsense": 1},
        ):
            with pytest.raises(InvalidMessage):
                batch([{**mails("Ada")[0], **wrong}], then="mailed")
    drain()
    assert mailing == []
    assert not Run.objects.exists()
    assert not Batch.objects.exists()
