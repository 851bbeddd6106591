"""Single deliveries of a OnceTask, each executed as in a Celery worker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import chord, group
from celery.app.trace import build_tracer
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    WorkerLostError,
)
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from kombu import Connection

from django_txmsg import Message, send_message
from django_txmsg.celery import OnceTask
from django_txmsg.celery.calling import identity
from django_txmsg.consuming import protocol
from django_txmsg.consuming.protocol import StageTransaction
from django_txmsg.errors import (
    InvalidMessage,
    StageError,
    SwallowedDatabaseError,
    TaskGivenUp,
)
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.monitoring import databases, status
from tests.app.models import Effect
from tests.celery_shop import app, charge, failing, step
from tests.celery_worker import BROKERS, forget_connections
from tests.hostile_errors import SilentError
from tests.running import committing, lose_connection, record_lost_at, txmsg

pytestmark = committing


@pytest.fixture(autouse=True)
def celery() -> Iterator[None]:
    """Make the app send to an in-memory broker, and forget the test's tasks."""
    before, known = app.conf.broker_url, set(app.tasks)
    app.conf.broker_url = "memory://"
    forget_connections()
    with txmsg(BROKERS=BROKERS):
        yield
    for name in {*app.tasks} - known:
        app.tasks.unregister(name)
    app.conf.broker_url = before
    forget_connections()


def once_task(work: Any, **options: Any) -> Any:
    """Return a OnceTask that calls `work`. Its name is unique."""
    name = f"tests.once.{uuid.uuid4().hex}"
    work.__name__ = "work"  # Celery writes code with it, which no lambda's is
    return app.task(work, name=name, base=OnceTask, shared=False, **options)


def deliver(task: Any, *args: Any, task_id: str = "one", **request: Any) -> Any:
    """Run a task as a worker does, and return its result or its exception."""
    trace = build_tracer(task.name, task, app=app)
    given = {"id": task_id, "retries": 0, "delivery_info": {}, **request}
    result = trace(task_id, args, {}, given).retval
    error = getattr(result, "exception", result)
    return getattr(error, "exc", error)


def receive(message: Any) -> Any:
    """Run the task of a message as a worker does, and return its result or its
    exception."""
    args, _, embedded = message.decode()
    request = {**message.headers, **embedded}
    task = app.tasks[request.pop("task")]
    return deliver(task, *args, task_id=request.pop("id"), **request)


def effect(name: str) -> None:
    Effect.objects.create(name=name, message_id="1")


@contextmanager
def away() -> Iterator[None]:
    """Make the app's broker and its result backend unreachable."""
    before = app.conf.result_backend
    app.conf.update(
        broker_url="amqp://127.0.0.1:1//",
        result_backend="redis://127.0.0.1:1/0",
        task_publish_retry=False,
        result_backend_transport_options={"retry_policy": {"max_retries": 0}},
    )
    forget_connections()
    try:
        yield
    finally:
        app.conf.update(
            broker_url="memory://", result_backend=before, task_publish_retry=True
        )
        forget_connections()


def sent() -> list[Any]:
    """Receive and return the messages in the app's queue."""
    with app.connection_for_read() as connection:
        queue = app.amqp.default_queue(connection.default_channel)
        queue.declare()
        return list(iter(queue.get, None))


def effects() -> list[str]:
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


@pytest.mark.parametrize("result", [None, 7, "text", {"a": [1, {"b": None}]}, [], ""])
def test_a_copy_returns_the_first_one_s_result(result: Any) -> None:
    def work() -> Any:
        effect("worked")
        return result

    task = once_task(work)

    assert deliver(task) == result
    assert deliver(task) == result
    assert effects() == ["worked"]
    assert InboxMessage.objects.get().deliveries == 2


def test_a_result_that_cannot_be_stored_is_none_for_a_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = once_task(lambda: object())

    assert deliver(task) is not None
    assert "cannot be stored" in caplog.text
    assert deliver(task) is None


def test_exception_whose_text_raises_keeps_its_type() -> None:
    def work() -> None:
        effect("gone")
        raise SilentError

    deliver(once_task(work))

    row = InboxMessage.objects.get()
    assert row.dead_at is not None
    assert row.last_error.endswith("SilentError: <str() raised KeyError>")
    assert effects() == []


def test_calls_and_messages_are_of_the_task_s_transaction() -> None:
    def work(fails: bool) -> None:
        step.delay("called")
        send_message("orders.placed", {"order": 1})
        effect("worked")
        if fails:
            raise ValueError("no good")

    task = once_task(work)
    assert isinstance(deliver(task, True), ValueError)
    assert OutboxMessage.objects.count() == 0
    assert InboxMessage.objects.get().last_error == "ValueError: no good"

    # Somebody sends it once more.
    assert deliver(task, False) is None
    assert effects() == ["worked"]
    assert OutboxMessage.objects.count() == 2
    assert {row.correlation_id for row in OutboxMessage.objects.all()} == {"one"}
    assert InboxMessage.objects.get().state == "processed"


def test_a_task_that_ignores_its_call_keeps_its_work() -> None:
    def work() -> None:
        effect("worked")
        raise Ignore("enough")

    task = once_task(work)

    assert isinstance(deliver(task), Ignore)
    assert isinstance(deliver(task), Ignore)
    assert effects() == ["worked"]


def test_a_task_may_replace_itself() -> None:
    def work(self: Any, left: int) -> Any:
        effect(f"left {left}")
        return self.replace(self.s(left - 1)) if left else "end"

    task = once_task(work, bind=True)
    for left in (2, 1, 0):
        deliver(task, left, replaced_task_nesting=2 - left)

    assert effects() == ["left 2", "left 1", "left 0"]


def test_an_error_that_is_swallowed_is_a_failure() -> None:
    def work() -> None:
        effect("before")
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT nothing FROM nowhere")
        except DatabaseError:
            transaction.set_rollback(True)

    assert isinstance(deliver(once_task(work)), SwallowedDatabaseError)
    assert effects() == []


def test_a_coroutine_that_nothing_awaits_is_a_failure() -> None:
    async def work() -> None:
        effect("never")

    assert isinstance(deliver(once_task(work)), StageError)
    assert InboxMessage.objects.get().processed_at is None


def test_the_transaction_may_be_another_database_s() -> None:
    task = once_task(lambda: 1, using="other")

    assert deliver(task) == 1
    assert InboxMessage.objects.count() == 0
    assert InboxMessage.objects.using("other").count() == 1


def test_an_once_task_called_as_a_function_runs_directly() -> None:
    task = once_task(lambda number: number + 1)

    assert task(1) == 2
    assert InboxMessage.objects.count() == 0


def test_an_once_task_runs_eagerly() -> None:
    task = once_task(lambda: step.delay("called").id)

    assert task.apply().get() == str(OutboxMessage.objects.get().message_id)


@pytest.mark.parametrize("follows", ["link", "chain", "chord"])
def test_unreachable_links_requeue_the_task(
    follows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> int:
        effect("worked")
        return 1

    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    task, following = once_task(work), step.s("next")
    if follows == "chord":
        following = chord([step.s("one"), step.s("two")], step.s("body"))
    following.freeze()
    given: dict[str, Any] = (
        {"callbacks": [following]} if follows == "link" else {"chain": [following]}
    )

    with away():
        rejected = deliver(task, **given)
    assert isinstance(rejected, Reject)
    assert rejected.requeue

    if follows == "chord":
        app.conf.result_backend = "cache+memory://"
        forget_connections()
    sent()
    assert deliver(task, **given) == 1
    assert effects() == ["worked"]
    assert len(sent()) == (2 if follows == "chord" else 1)


@pytest.mark.parametrize("ignores", [False, True])
def test_an_unreachable_backend_loses_no_chord(
    ignores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is away when the last task of the chord has ended. The chord needs
    the results even if other calls of the task ignore them."""
    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    monkeypatch.setattr(app.conf, "result_backend", "cache+memory://")
    forget_connections()
    sent()
    task = once_task(effect, ignore_result=ignores)
    tasks = [task.si(name).set(ignore_result=False) for name in ("one", "two")]
    chord(tasks, step.si("body")).apply_async()

    first, last = sent()
    receive(first)
    with away():
        rejected = receive(last)
    assert isinstance(rejected, Reject)
    assert rejected.requeue
    assert not sent()

    receive(last)
    assert effects() == ["one", "two"]
    assert [message.headers["task"] for message in sent()] == [step.name]


@pytest.mark.parametrize("chained", [False, True])
def test_an_unreachable_backend_hides_no_failure_from_a_chord(
    chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is away when the last task of the chord has failed. The chord fails
    once the backend is there."""
    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    monkeypatch.setattr(app.conf, "result_backend", "cache+memory://")
    forget_connections()
    sent()

    def fail() -> None:
        raise KeyError

    bad, good = once_task(fail).si(), once_task(effect).si("one")
    if chained:
        bad |= step.si("never")
    result = chord([good, bad], step.si("body")).apply_async()
    first, last = sent()
    receive(first)
    with away():
        rejected = receive(last)
    assert isinstance(rejected, Reject)
    assert rejected.requeue
    assert app.AsyncResult(result.id).state == "PENDING"

    assert isinstance(receive(last), KeyError)
    assert app.AsyncResult(result.id).state == "FAILURE"
    assert not sent()


def work_off() -> None:
    """Execute the tasks in the queue, as a worker does, until the queue is empty."""
    while messages := sent():
        for message in messages:
            args, kwargs, embedded = message.decode()
            task = app.tasks[message.headers["task"]]
            request = {**message.headers, **embedded, "delivery_info": {}}
            trace = build_tracer(task.name, task, app=app)
            trace(message.headers["id"], args, kwargs, request)


SHAPES: dict[str, Any] = {
    "a task": lambda: charge.s(1),
    "a chain": lambda: charge.s(1) | charge.s(2) | charge.s(3),
    "a group": lambda: group(charge.s(1), charge.s(2)),
    "a group in a chain": lambda: charge.s(1) | group(charge.s(2), charge.s(3)),
    "a chain in a group": lambda: group(charge.s(1) | charge.s(2), charge.s(3)),
    "a chord": lambda: chord([charge.s(1), charge.s(2)], charge.s(3)),
    "a group and what follows": lambda: (
        charge.s(1) | group(charge.s(2), charge.s(3)) | charge.s(4)
    ),
    "a link's link": lambda: charge.s(1).set(link=[charge.s(2).set(link=charge.s(3))]),
    "a link of a plain task's": lambda: step.s(1).set(link=[charge.s(2)]),
    "a chain's link": lambda: (charge.s(1) | charge.s(2)).set(link=[charge.s(3)]),
    "a link_error of a link's": lambda: failing.si().set(link_error=[charge.si(1)]),
}


@pytest.mark.parametrize("linked", SHAPES)
@pytest.mark.parametrize("option", ["callbacks", "chain"])
def test_calls_repeated_by_a_copy_take_effect_once(linked: str, option: str) -> None:
    """A second copy of a task repeats the task's calls. Every kind of call takes effect
    once, even if Celery chooses random ids."""
    app.conf.result_backend = "cache+memory://"
    forget_connections()
    task, call = once_task(lambda: 0), json.loads(json.dumps(SHAPES[linked]()))
    sent()
    try:
        for _ in range(2):
            deliver(task, **{option: [call]})
        work_off()
    finally:
        app.conf.result_backend = None

    called = effects()
    once = [name for name in called if name.startswith("charge")]
    assert once
    assert len(set(once)) == len(once), called


def test_task_linked_twice_is_called_twice() -> None:
    task, link = once_task(lambda: 0), json.loads(json.dumps(charge.s(1)))
    sent()
    deliver(task, callbacks=[link, link])
    work_off()
    assert effects().count("charge [0, 1]") == 2


def test_an_id_that_the_caller_gave_a_link_stays() -> None:
    task = once_task(lambda: 0)
    sent()
    deliver(task, callbacks=[charge.s(1).set(task_id="mine")])
    assert [message.headers["id"] for message in sent()] == ["mine"]


def test_a_replacement_calls_its_links_under_ids_of_its_own() -> None:
    """A task and its replacement have the same id, but call their links under different
    ids."""
    task = once_task(lambda: 0)
    link = json.loads(json.dumps(charge.s(1)))
    sent()
    for nesting in (0, 1):
        deliver(task, callbacks=[link], replaced_task_nesting=nesting)
    assert len({message.headers["id"] for message in sent()}) == 2


def test_errbacks_keep_their_ids_across_deliveries() -> None:
    def work() -> None:
        raise ValueError("no good")

    task = once_task(work)
    errors = json.loads(json.dumps([charge.s(1), charge.s(2)]))
    sent()
    for _ in range(2):
        assert isinstance(deliver(task, errbacks=errors), ValueError)
    work_off()
    called = [name for name in effects() if name.startswith("charge")]
    assert called == ['charge ["one", 1]', 'charge ["one", 2]']


def test_retry_is_raised_despite_throw_false() -> None:
    def work(self: Any) -> str:
        effect(f"try {self.request.retries}")
        if not self.request.retries:
            self.retry(throw=False, countdown=0)
        return "done"

    task = once_task(work, bind=True)
    assert isinstance(deliver(task), Retry)
    assert effects() == []
    assert deliver(task, retries=1) == "done"
    assert effects() == ["try 1"]


def test_a_retry_is_not_sent_to_another_broker_than_it_was_given() -> None:
    def work(self: Any) -> None:
        with Connection("redis://127.0.0.1:1/5") as there:
            self.retry(connection=there)

    assert isinstance(deliver(once_task(work, bind=True)), InvalidMessage)


def test_retries_that_are_used_up_tell_no_arguments() -> None:
    def work(self: Any, card: str) -> None:
        self.retry(countdown=0)

    task = once_task(work, bind=True, max_retries=0)
    assert "4111" in str(deliver(task, "4111"))
    error = InboxMessage.objects.get().last_error
    assert error == "MaxRetriesExceededError: tried 1 times"
    assert "4111" not in error


def test_a_task_that_rejects_its_message_is_no_lost_worker() -> None:
    def work(requeue: bool) -> None:
        effect("worked")
        raise Reject("not yet", requeue=requeue)

    task = once_task(work)
    for _ in range(20):
        assert isinstance(deliver(task, True), Reject)
    row = InboxMessage.objects.get()
    assert (row.state, row.attempts, row.deliveries) == ("received", 0, 20)
    assert isinstance(deliver(task, False), Reject)
    row.refresh_from_db()
    assert row.state == "dead"
    assert effects() == []


def test_an_error_that_no_database_holds_is_noted_all_the_same() -> None:
    def work() -> None:
        raise ValueError("NUL \x00 and \ud800")

    error = deliver(once_task(work))
    assert isinstance(error, ValueError)
    assert "NUL \x00" in str(error)
    row = InboxMessage.objects.get()
    assert (row.state, row.last_error) == ("dead", "ValueError: NUL \\x00 and \\ud800")


def test_task_that_kills_each_worker_is_given_up_and_acknowledged() -> None:
    task = once_task(lambda: effect("worked"))
    InboxMessage.objects.db_manager("default").record(
        task.name, [Message(id=identity("one"), destination=task.name, body=None)]
    )
    InboxMessage.objects.update(attempts=99)

    error = deliver(task)

    assert isinstance(error, TaskGivenUp)
    # Celery sends a task back whose error is this one.
    assert not isinstance(error, WorkerLostError)
    assert InboxMessage.objects.get().state == "dead"


def test_an_error_after_the_commit_is_no_failure() -> None:
    def work() -> str:
        effect("worked")
        transaction.on_commit(too_late)
        return "done"

    def too_late() -> None:
        raise SoftTimeLimitExceeded

    class Impatient(StageTransaction):
        def __exit__(self, *raised: Any) -> None:
            super().__exit__(*raised)
            raise SoftTimeLimitExceeded

    task = once_task(work)
    assert deliver(task) == "done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "StageTransaction", Impatient)
        assert deliver(task, task_id="two") == "done"
    assert effects() == ["worked", "worked"]
    assert {row.state for row in InboxMessage.objects.all()} == {"processed"}


@pytest.mark.sqlite
def test_a_task_whose_record_a_crash_has_lost_is_worked() -> None:
    """The server crashes after the statement that inserts the task's record, and before
    the statement that locks it. The crash loses the record, and a transaction pooler
    hides the crash. The task is executed."""
    task = once_task(lambda: effect("done"))
    with record_lost_at("BEGIN"):
        deliver(task)
    assert effects() == ["done"]


@pytest.mark.sqlite
def test_a_copy_of_a_task_that_has_just_failed_runs_it_again() -> None:
    """The first delivery fails after the copy is recorded, and before the copy locks
    the record. The copy has no result to return."""
    task = once_task(lambda: effect("done") or "result")
    failed = "UPDATE django_txmsg_inboxmessage SET dead_at = first_received_at"
    with record_lost_at("BEGIN", failed):
        assert deliver(task) == "result"
    assert effects() == ["done"]
    assert InboxMessage.objects.get().state == "processed"


def test_an_outage_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        # As of a database that is not the inbox's.
        raise OperationalError("no connection") from ConnectionRefusedError()

    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    task = once_task(work)
    for _ in range(20):
        assert isinstance(deliver(task), Reject)
    assert InboxMessage.objects.get().attempts == 0


@pytest.mark.postgresql
def test_a_delivery_costs_two_round_trips_beside_its_work() -> None:
    task = once_task(lambda: None)
    with CaptureQueriesContext(connection) as asked:
        deliver(task)
    # Recorded and begun in one, as in a stage; and COMMIT.
    assert len([one for one in asked if one["sql"] != "COMMIT"]) == 1


@pytest.mark.postgresql
def test_while_the_database_is_away_the_message_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        effect("worked")
        if not left.pop():
            return
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    left = [False, True]
    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    task = once_task(work)

    rejected = deliver(task)
    assert isinstance(rejected, Reject)
    assert rejected.requeue
    assert deliver(task) is None
    assert effects() == ["worked"]


@pytest.mark.postgresql
def test_task_that_ends_its_connection_each_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("django_txmsg.celery.following.PAUSE", 0.0)
    # The row is marked again after each task, however quick.
    monkeypatch.setattr(protocol, "MARK_AGAIN_AFTER", 0.0)
    task = once_task(lambda: lose_connection("killed"))
    with txmsg(BROKERS=BROKERS, REDELIVERY={"MAX_REDELIVERIES": 1}):
        ends = [type(deliver(task)) for _ in range(3)]
    assert ends == [Reject, Reject, TaskGivenUp]


@pytest.mark.postgresql
def test_lost_conflict_counts_no_attempt() -> None:
    def work() -> None:
        effect("worked")
        with connection.cursor() as cursor:
            if left.pop():
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
                )

    left = [False, True, True]

    assert deliver(once_task(work)) is None
    assert effects() == ["worked"]


def test_the_database_of_a_once_task_is_served_and_counted() -> None:
    """Only an OnceTask names the database. The relay dispatches the messages that are
    stored there, and the status counts them."""

    def work() -> None:
        send_message("tests.of_once", None)

    assert "other" not in databases.in_use()
    deliver(once_task(work, using="other"))
    (waiting,) = [
        place.waiting.count
        for place in status.read().destinations.values()
        if place.name == "tests.of_once"
    ]
    assert waiting == 1
    call_command("relay", once=True, verbosity=0)
    assert OutboxMessage.objects.using("other").get().state == "dispatched"
