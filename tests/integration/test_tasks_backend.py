"""The package's backend for django.tasks meets the requirements of Django's own backend
tests. In addition, no task runs without a commit, none is lost, and none is executed
twice."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.models import F
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import Message, Refuse, outbox_session, send_message
from django_txmsg.contracts import build
from django_txmsg.envelope import serializers
from django_txmsg.errors import BrokerUnavailable, InvalidMessage
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    TaskRun,
)
from django_txmsg.monitoring import retention
from django_txmsg.stages import all_stages, find
from django_txmsg.tasks_backend import TransactionalBackend
from django_txmsg.tasks_backend.framework import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_finished,
    task_started,
)
from django_txmsg.testing import drain, outbox_messages
from tests.app import jobs
from tests.app.models import Effect
from tests.running import committing, declared, send, ship, step, txmsg

#: Where nothing depends on a commit, the test's own transaction is quicker.
pytestmark = pytest.mark.django_db(databases=["default", "other"])

BACKEND = "django_txmsg.tasks_backend.TransactionalBackend"
READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL
QUEUE = "tests.tasks.default.default"


def tasks(**params: Any) -> override_settings:
    """Return settings with our backend as the default."""
    return override_settings(TASKS={"default": {"BACKEND": BACKEND, **params}})


@pytest.fixture(params=["outbox", "none"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each mode of OPTIONS["TRANSACTION"] in turn."""
    with tasks(OPTIONS={"TRANSACTION": request.param}):
        yield request.param


@pytest.fixture(autouse=True)
def settings_of_tests() -> Iterator[None]:
    """Use settings in which no commit dispatches messages and no retry waits."""
    with txmsg(), tasks():
        yield


def finished(result: Any, **options: Any) -> Any:
    """Process all messages, and return a task's result."""
    drain(raises=False, **options)
    result.refresh()
    return result


# What Django asks of every backend.


def test_the_backend_says_what_it_can() -> None:
    backend = task_backends["default"]
    assert isinstance(backend, TransactionalBackend)
    assert (backend.alias, backend.options) == ("default", {})
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result


@pytest.mark.parametrize("task", [jobs.nothing, jobs.nothing_async])
def test_a_task_is_enqueued_and_worked(task: Any, mode: str) -> None:
    result = task.enqueue(1, two=3)

    assert result.status == READY
    assert not result.is_finished
    assert result.enqueued_at is not None
    assert (result.started_at, result.finished_at) == (None, None)
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
    assert (result.task, result.args, result.kwargs) == (task, [1], {"two": 3})
    assert result.attempts == 0

    finished(result)

    assert result.status == SUCCESSFUL
    assert result.is_finished
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at is not None
    assert result.return_value is None
    assert (result.task, result.args, result.kwargs) == (task, [1], {"two": 3})
    assert (result.attempts, result.worker_ids) == (1, ["drain"])


@pytest.mark.parametrize("task", [jobs.nothing, jobs.nothing_async])
def test_a_task_is_enqueued_from_async_code(task: Any) -> None:
    result = async_to_sync(task.aenqueue)(1, two=3)

    assert (result.status, result.args, result.kwargs) == (READY, [1], {"two": 3})
    drain()
    async_to_sync(result.arefresh)()
    assert result.status == SUCCESSFUL
    assert async_to_sync(task.aget_result)(result.id) == result


def test_get_result_returns_the_enqueued_result() -> None:
    later = timezone.now() + dt.timedelta(hours=1)
    task = jobs.nothing.using(run_after=later)
    for given in (jobs.nothing.enqueue(1), task.enqueue(two=2)):
        assert given.task.get_backend().get_result(given.id) == given
        assert async_to_sync(jobs.nothing.aget_result)(given.id) == given


@pytest.mark.parametrize("unknown", ["123", str(uuid.UUID(int=7)), "", 123])
def test_unknown_result_raises_does_not_exist(unknown: Any) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        jobs.nothing.get_result(unknown)
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(jobs.nothing.aget_result)(unknown)


def test_a_result_is_of_one_task_and_of_one_backend() -> None:
    with override_settings(TASKS={n: {"BACKEND": BACKEND} for n in ("default", "b")}):
        result = jobs.nothing.enqueue()
        with pytest.raises(Exception, match="Task does not match"):
            jobs.fail.get_result(result.id)
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["b"].get_result(result.id)
        with transaction.atomic():
            others = [
                send_message(QUEUE, {}),
                send_message(QUEUE, {}, headers={"task": "tests.app.jobs.note"}),
                send_message(QUEUE, b"", headers={"task": "tests.app.jobs.note"}),
                send_message(QUEUE, SOUND, headers={"task": "tests.app.jobs.gone"}),
            ]
        for other in others:
            with pytest.raises(TaskResultDoesNotExist):
                task_backends["default"].get_result(str(other.id))


@committing
@pytest.mark.parametrize(
    ("task", "error", "text"),
    [
        (jobs.fail, ValueError, "This Task failed due to ValueError"),
        (jobs.leave, SystemExit, "This Task failed due to SystemExit"),
    ],
)
def test_a_task_that_raises_has_failed(
    task: Any, error: type, text: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = task.enqueue()
    caplog.clear()

    finished(result)

    assert result.status == FAILED
    assert result.is_finished
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at is not None
    assert (result.attempts, result.worker_ids) == (1, ["drain"])
    assert [one.exception_class for one in result.errors] == [error]
    assert result.errors[0].traceback.endswith(f"{error.__name__}: {text}\n")
    (logged,) = _framework_log(caplog, logging.ERROR)
    assert "state=FAILED" in logged.getMessage()
    assert result.id in logged.getMessage()
    assert logged.exc_info is not None
    assert str(logged.exc_info[1]) == text


def _framework_log(caplog: pytest.LogCaptureFixture, level: int) -> list[Any]:
    names = ("django.tasks", "django_tasks")
    return [r for r in caplog.records if r.name in names and r.levelno >= level]


def test_chained_exceptions_are_kept(mode: str) -> None:
    result = finished(jobs.fail_within.enqueue())
    assert result.status == FAILED
    assert result.errors[0].exception_class is ValueError
    assert 'ValueError(ValueError("This task failed"))' in result.errors[0].traceback


def test_a_return_value_that_json_has_not_fails_the_task(mode: str) -> None:
    result = finished(jobs.return_object.enqueue())
    assert result.status == FAILED
    assert result.errors[0].exception_class is TypeError
    assert "Unsupported type" in result.errors[0].traceback


def test_arguments_that_json_has_not_are_refused() -> None:
    with pytest.raises(TypeError, match="Unsupported type"):
        jobs.nothing.enqueue(dt.datetime.now())
    with pytest.raises(TypeError, match="Unsupported type"):
        async_to_sync(jobs.nothing.aenqueue)(object())
    with txmsg(MAX_MESSAGE_BYTES=100), pytest.raises(InvalidMessage):
        jobs.nothing.enqueue("x" * 200)
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_number_that_json_has_not_fails_the_task_in_plain_words(
    text: str, mode: str
) -> None:
    result = finished(jobs.return_number.enqueue(text))

    assert result.status == FAILED
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "tests.app.jobs.return_number returned NaN or an infinity" in error.traceback


@pytest.mark.parametrize("text", [r"'a\x00'", r"'\ud800'", r"{'\\\x00': 1}"])
def test_text_that_no_column_stores_fails_the_task_in_plain_words(
    text: str, mode: str
) -> None:
    result = finished(jobs.return_decoded.enqueue(text))

    assert result.status == FAILED
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "tests.app.jobs.return_decoded returned text with a NUL" in error.traceback


def test_text_with_an_escaped_nul_is_a_return_value(mode: str) -> None:
    result = finished(jobs.return_decoded.enqueue(r"'\\u0000 \\ud800 \U0001f600'"))

    assert result.return_value == {"names": ["a", "\\u0000 \\ud800 \U0001f600"]}


def test_a_return_value_is_kept(mode: str) -> None:
    assert finished(jobs.meaning_of_life.enqueue()).return_value == 42
    result = jobs.meaning_of_life.get_result(jobs.meaning_of_life.enqueue().id)
    assert finished(result).return_value == 42


def test_a_task_gets_its_context(mode: str) -> None:
    result = finished(jobs.own_id.enqueue())
    assert result.return_value == result.id

    found = finished(jobs.look_around.enqueue(1)).return_value
    assert found == {
        "number": 1,
        "attempt": 1,
        "status": "RUNNING",
        "stored": "RUNNING",
        "args": [1],
    }


@committing
def test_each_step_is_logged_as_the_framework_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("django.tasks", "django_tasks"):
        caplog.set_level(logging.DEBUG, logger=name)
    result = jobs.nothing.enqueue()
    drain()

    steps = [one.getMessage() for one in _framework_log(caplog, logging.DEBUG)]
    assert len(steps) == 3
    for line, said in zip(steps, ("enqueued", "RUNNING", "SUCCESSFUL"), strict=True):
        assert said in line
        assert result.id in line
    assert "NoneType" not in caplog.text


def test_the_queue_is_looked_at_again_when_a_task_is_enqueued() -> None:
    with tasks(QUEUES=[]):
        task = jobs.nothing.using(queue_name="unknown_queue")
    with tasks(QUEUES=["queue-1"]):
        with pytest.raises(InvalidTask, match="Queue 'unknown_queue' is not valid"):
            task.enqueue()
        with pytest.raises(InvalidTask, match="Queue 'unknown_queue' is not valid"):
            async_to_sync(task.aenqueue)()


@pytest.mark.parametrize("wrong", [101, -101, 3.1])
def test_an_impossible_priority_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidTask, match="priority must be a whole number between"):
        jobs.nothing.using(priority=wrong)


def test_priority_is_for_the_embedded_broker() -> None:
    assert task_backends["default"].supports_priority
    stomp = {"default": {"URL": "stomp://user:password@localhost"}}
    with txmsg(BROKERS=stomp), pytest.raises(InvalidTask, match="setting priority"):
        jobs.nothing.using(priority=1)
    with tasks(OPTIONS={"BROKER": "gone"}):
        assert not task_backends["default"].supports_priority


def test_a_higher_priority_comes_first(mode: str) -> None:
    given = [0, -100, 7, 0, 100, -1, 7, 1]
    sent = [jobs.note.using(priority=one).enqueue(str(one)) for one in given]
    drain()
    worked = [int(name) for name in Effect.objects.values_list("name", flat=True)]
    assert worked == sorted(given, reverse=True)
    for one, priority in zip(sent, given, strict=True):
        one.refresh()
        assert one.task.priority == priority


@committing
def test_no_other_queue_has_priorities() -> None:
    with transaction.atomic():
        for priority in ("1", "99999", "x", "٣", ""):
            send_message("plain", 1, headers={"task-priority": priority})
            send_message(f"{QUEUE}.x", 1, headers={"task-priority": priority})
    call_command("relay", once=True)
    plain = QueueMessage.objects.filter(queue="plain")
    assert set(plain.values_list("priority", flat=True)) == {0}
    others = QueueMessage.objects.exclude(queue="plain").order_by("pk")
    assert list(others.values_list("priority", flat=True)) == [1, 0, 0, 0, 0]


def test_a_naive_run_after_is_refused() -> None:
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        jobs.nothing.using(run_after=dt.datetime.now())


# What this one promises beyond that.


@committing
def test_a_rolled_back_transaction_enqueues_nothing() -> None:
    with transaction.atomic():
        Effect.objects.create(name="business")
        result = jobs.note.enqueue("never")
        assert jobs.note.get_result(result.id).status == READY
        transaction.set_rollback(True)

    assert drain() == type(drain())()
    assert not Effect.objects.exists()
    with pytest.raises(TaskResultDoesNotExist):
        jobs.note.get_result(result.id)


def test_the_task_of_a_savepoint_goes_with_it() -> None:
    with transaction.atomic():
        with transaction.atomic():
            jobs.note.enqueue("never")
            transaction.set_rollback(True)
        jobs.note.enqueue("kept")
    drain()
    assert [one.name for one in Effect.objects.all()] == ["kept"]


@committing
def test_a_task_enqueued_outside_a_transaction_gets_its_own() -> None:
    assert not connection.in_atomic_block
    result = jobs.note.enqueue("alone")
    assert OutboxMessage.objects.filter(message_id=result.id).exists()


@committing
def test_the_work_its_messages_and_its_result_commit_together() -> None:
    with tasks(OPTIONS={"MAX_REDELIVERIES": 3}):
        result = jobs.fail_until.enqueue(3, "worked")
        finished(result)

        assert result.status == SUCCESSFUL
        assert result.return_value == 3
        assert result.worker_ids == ["drain"] * 3
        assert [one.exception_class for one in result.errors] == [ValueError] * 2
        assert Effect.objects.count() == 1, "what the failed attempts did is undone"


def test_without_a_transaction_each_attempt_leaves_its_work() -> None:
    with tasks(OPTIONS={"TRANSACTION": "none", "MAX_REDELIVERIES": 3}):
        result = finished(jobs.fail_until.enqueue(3, "worked"))

        assert (result.status, result.return_value) == (SUCCESSFUL, 3)
        assert len(result.worker_ids) == 3
        assert Effect.objects.count() == 3


@committing
def test_without_a_transaction_none_is_open(mode: str) -> None:
    finished(jobs.note.enqueue("x"))
    sent = outbox_messages("tests.noted")
    assert len(sent) == (1 if mode == "outbox" else 0)
    assert Effect.objects.count() == 1


def test_async_code_is_in_the_transaction_too(mode: str) -> None:
    result = finished(jobs.note_async.enqueue("async"))
    assert result.return_value == "async"
    assert Effect.objects.get().name == "async"
    assert len(outbox_messages(QUEUE)) == 2
    assert TaskRun.objects.filter(result=42).count() == 1


@committing
def test_a_duplicate_is_not_run_again(mode: str) -> None:
    jobs.note.enqueue("once")
    drain()
    OutboxMessage.objects.update(dispatched_at=None)

    drained = drain(QUEUE)

    assert drained.dispatched >= 1
    assert Effect.objects.count() == 1
    assert TaskRun.objects.count() == 1


@committing
@pytest.mark.parametrize("statement", ["SELECT", "INSERT"])
def test_a_refused_statement_counts_no_attempt(statement: str) -> None:
    """The database refuses to read the task's run before the task, or to store its
    return value afterwards."""

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith(statement) and "taskrun" in sql:
            raise OperationalError("refused")
        return execute(sql, *rest)

    with tasks(OPTIONS={"TRANSACTION": "none"}):
        result = jobs.meaning_of_life.enqueue()
        ship()
        (stage,) = find([QUEUE])
        with connection.execute_wrapper(refuse):
            for _ in range(12):
                with pytest.raises(BrokerUnavailable):
                    step(stage)
        step(stage)
        result.refresh()
        assert (result.status, result.return_value) == (SUCCESSFUL, 42)
    assert InboxMessage.objects.get().attempts == 1


def test_a_task_is_retried_as_its_policy_says(mode: str) -> None:
    options = {"TRANSACTION": mode, "MAX_REDELIVERIES": 2}
    with tasks(OPTIONS=options):
        result = finished(jobs.fail.enqueue())
        assert (result.status, result.attempts, len(result.errors)) == (FAILED, 3, 3)


@pytest.mark.parametrize("waits", ["non_blocking", "broker"])
def test_a_result_is_ready_between_two_attempts(waits: str) -> None:
    patient = {"INITIAL_DELAY": 3600.0, "MAX_DELAY": 3600.0, "MODE": waits}
    with txmsg(REDELIVERY=patient), tasks(OPTIONS={"MAX_REDELIVERIES": 1}):
        result = finished(jobs.fail.enqueue())
        assert (result.status, result.attempts, len(result.errors)) == (READY, 1, 1)
        assert result.finished_at is None
        finished(result, ahead=dt.timedelta(hours=2))
        assert (result.status, result.attempts) == (FAILED, 2)


def test_the_words_of_a_handler_are_a_task_s_too() -> None:
    with tasks(OPTIONS={"MAX_REDELIVERIES": 2}):
        assert finished(jobs.refuse.enqueue()).attempts == 1
        assert finished(jobs.ask_again.enqueue()).attempts == 3
    assert DeadLetter.objects.filter(reason="refused").count() == 1
    result = jobs.refuse.enqueue()
    finished(result)
    assert result.errors[0].exception_class is Refuse


def test_a_task_that_is_not_due_waits(mode: str) -> None:
    hour = dt.timedelta(hours=1)
    task = jobs.note.using(run_after=timezone.now() + hour)
    result = finished(task.enqueue("later"))
    assert result.status == READY
    assert result.task == task

    finished(result, ahead=2 * hour)

    assert result.status == SUCCESSFUL
    past = jobs.note.using(run_after=timezone.now() - hour).enqueue("at once")
    assert finished(past).status == SUCCESSFUL


def test_each_queue_is_a_stage() -> None:
    with tasks(QUEUES=["default", "mail"], OPTIONS={"CONCURRENCY": 3}):
        mail = jobs.note.using(queue_name="mail").enqueue("mail")
        other = jobs.note.enqueue("other")
        names = [one.name for one in all_stages() if one.name.startswith("tests.tasks")]
        assert names == ["tests.tasks.default.default", "tests.tasks.default.mail"]
        assert {one.concurrency for one in all_stages() if one.name in names} == {3}

        drain("tests.tasks.default.mail")

        mail.refresh()
        other.refresh()
        assert (mail.status, other.status) == (SUCCESSFUL, READY)
        assert mail.task.queue_name == "mail"
    assert "tests.tasks.default.mail" not in [one.name for one in all_stages()]


@committing
def test_a_batch_of_tasks_shares_a_transaction_and_one_fails_alone() -> None:
    with tasks(OPTIONS={"BATCH": 10}):
        good = [jobs.note.enqueue(str(number)) for number in range(4)]
        bad = jobs.fail.enqueue()
        good.append(jobs.note.enqueue("after"))
        ship()
        with CaptureQueriesContext(connection) as ran:
            step(find([QUEUE])[0])
        for one in [*good, bad]:
            one.refresh()

    said = "\n".join(one["sql"] for one in ran)
    assert "SAVEPOINT txmsg_6" in said, said
    assert [one.status for one in good] == [SUCCESSFUL] * 5
    assert [one.return_value for one in good] == ["0", "1", "2", "3", "after"]
    assert (bad.status, bad.errors[0].exception_class) == (FAILED, ValueError)
    names = Effect.objects.order_by("name").values_list("name", flat=True)
    assert list(names) == ["0", "1", "2", "3", "after"]
    assert OutboxMessage.objects.filter(destination="tests.noted").count() == 5


def test_without_queues_any_name_is_allowed(mode: str) -> None:
    with tasks(QUEUES=[], OPTIONS={"TRANSACTION": mode}):
        task = jobs.note.using(queue_name="Straße 7")
        result = finished(task.enqueue("any"))
        assert (result.status, result.task) == (SUCCESSFUL, task)


def test_each_backend_uses_its_own_database_and_broker() -> None:
    other = {"BACKEND": BACKEND, "OPTIONS": {"BROKER": "apart", "USING": "other"}}
    settings = {"default": {"BACKEND": BACKEND}, "b": other}
    with override_settings(TASKS=settings):
        result = jobs.note.using(backend="b").enqueue("elsewhere")
        assert OutboxMessage.objects.using("other").count() == 1
        assert not OutboxMessage.objects.exists()
        finished(result)
        assert (result.status, result.backend) == (SUCCESSFUL, "b")
        assert TaskRun.objects.using("other").count() == 1
        with pytest.raises(TaskResultDoesNotExist):
            jobs.note.get_result(result.id)


def test_a_stage_enqueues_in_its_transaction() -> None:
    def work(message: Message) -> None:
        result = jobs.note.enqueue(message.body)
        assert jobs.note.get_result(result.id).status == READY

    for mode in ("outbox", "best_effort_1pc", "broker_only"):
        with declared(work, transaction=mode) as stage:
            with transaction.atomic():
                send_message(stage.destination, mode)
            drain()
            assert Effect.objects.filter(name=mode).count() == 1, mode


@committing
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("transaction", ["none", "broker_only", "best_effort_1pc"])
def test_a_stage_that_runs_again_enqueues_the_same_task(
    transaction: Any, delayed: bool
) -> None:
    enqueued: list[str] = []

    def work(message: Message) -> None:
        later = timezone.now() + dt.timedelta(hours=1)
        task = jobs.note.using(run_after=later if delayed else None)
        enqueued.append(task.enqueue("again").id)
        if len(enqueued) == 1:
            raise ValueError

    with declared(work, transaction=transaction) as stage:
        send(stage.destination)
        step(stage, 2)
    drain(ahead=dt.timedelta(hours=2))
    assert len(enqueued) == 2
    assert len(set(enqueued)) == 1
    assert Effect.objects.filter(name="again").count() == 1


@committing
def test_the_signals_come_after_the_commits(mode: str) -> None:
    seen: list[tuple[str, Any, bool]] = []

    def hear(task_result: Any, signal: Any, **_: Any) -> None:
        inside = connection.in_atomic_block
        seen.append((task_result.status, task_result.id, inside))

    signals = (task_started, task_finished)
    for signal in signals:
        signal.connect(hear)
    try:
        good, bad = jobs.meaning_of_life.enqueue(), jobs.fail.enqueue()
        drain(raises=False)
    finally:
        for signal in signals:
            signal.disconnect(hear)

    begun = mode == "outbox"
    assert seen == [
        (RUNNING, good.id, begun),
        (SUCCESSFUL, good.id, False),
        (RUNNING, bad.id, begun),
        (FAILED, bad.id, False),
    ]


def test_a_dead_letter_is_named_and_redelivered() -> None:
    result = finished(jobs.fail.enqueue(), limit=10)
    letter = DeadLetter.objects.get()
    assert letter.headers["task"] == "tests.app.jobs.fail"
    assert letter.reason == "attempts_exhausted"

    call_command("dead_letters", "redeliver", str(letter.pk))

    result.refresh()
    assert result.status == READY
    finished(result)
    assert result.status == FAILED


SOUND = {"args": ["x"], "kwargs": {}}
HOSTILE: list[dict[str, str]] = [
    {},
    {"task": ""},
    {"task": "os.system"},
    {"task": "antigravity.fly"},
    {"task": "tests.app.jobs.no_task"},
    {"task": "tests.app.jobs.gone"},
    {"task": "tests.app.jobs.note.enqueue"},
    {"task": "../../etc/passwd"},
    {"task": "tests.app.jobs.note", "task-priority": "high"},
    {"task": "tests.app.jobs.note", "task-run-after": "soon"},
    {"task": "tests.app.jobs.note", "task-queue": "of others"},
]


def test_unknown_task_is_buried(mode: str) -> None:
    with transaction.atomic():
        sent = [send_message(QUEUE, SOUND, headers=headers) for headers in HOSTILE]
    drain(raises=False)
    dead = DeadLetter.objects.values_list("message_id", flat=True)
    assert set(dead) == {one.id for one in sent}
    assert not Effect.objects.exists()
    assert "antigravity" not in sys.modules


def test_a_queue_runs_only_tasks_of_its_modules(mode: str) -> None:
    def limited(*modules: str) -> override_settings:
        return tasks(OPTIONS={"TRANSACTION": mode, "MODULES": modules})

    with limited("tests.app.jobs"):
        assert finished(jobs.note.enqueue("ours")).status == SUCCESSFUL
    result = jobs.note.enqueue("stored before")
    with limited("tests.app.job", "tests.other"):
        with pytest.raises(InvalidTask, match="MODULES"):
            jobs.note.enqueue("not ours")
        with transaction.atomic():
            send_message(QUEUE, SOUND, headers={"task": "tests.docs.this.fail"})
        drain(raises=False)
        assert {one.reason for one in DeadLetter.objects.all()} == {
            "attempts_exhausted"
        }
        assert DeadLetter.objects.count() == 2
    result.refresh()
    assert result.status == FAILED
    assert "tests.docs.this" not in sys.modules
    assert [one.name for one in Effect.objects.all()] == ["ours"]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a task of a module that no app imports. The module is in a folder of
    `sys.path`, like a module in the folder of manage.py."""
    name = f"jobs_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        f"from {jobs.task.__module__} import task\n"
        f"@task\n"
        f"def hello(name): return f'hello {{name}}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module(name).hello
    sys.modules.pop(name, None)


def in_another_process(task: Any) -> None:
    """Remove the task's module from sys.modules, as in a process that has not imported
    it."""
    sys.modules.pop(task.module_path.partition(".")[0], None)


def test_a_worker_imports_what_modules_name(beside: Any, mode: str) -> None:
    module = beside.module_path.rpartition(".")[0]
    with tasks(OPTIONS={"TRANSACTION": mode, "MODULES": ["tests.app.jobs", module]}):
        result = beside.enqueue("you")
        in_another_process(beside)
        assert finished(result).return_value == "hello you"


def test_a_task_that_a_worker_may_not_know_is_warned_of_and_fails_in_plain_words(
    beside: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        result = beside.enqueue("you")
    in_another_process(beside)
    drain(raises=False)

    (record,) = (one for one in caplog.records if one.name == "django_txmsg.tasks")
    assert record.levelno == logging.WARNING
    for said in (record.getMessage(), DeadLetter.objects.latest("pk").exception):
        assert beside.module_path in said
        assert '["OPTIONS"]["MODULES"]' in said
    in_another_process(beside)
    # Asked for by name, a result is told all the same.
    assert task_backends["default"].get_result(result.id).status == FAILED


@pytest.mark.parametrize("options", [{}, {"MODULES": ["tests.app"]}])
def test_a_task_of_the_project_causes_no_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with tasks(OPTIONS=options):
        jobs.nothing.enqueue()
    assert "django_txmsg.tasks" not in {one.name for one in caplog.records}


def test_a_body_that_holds_no_arguments_is_dead(mode: str) -> None:
    bodies = [None, [], "x", 7, {}, {"args": 1, "kwargs": {}}, b"{}"]
    with transaction.atomic():
        for body in bodies:
            send_message(QUEUE, body, headers={"task": "tests.app.jobs.note"})
    drain(raises=False)
    reasons = DeadLetter.objects.values_list("reason", flat=True)
    assert list(reasons) == ["invalid_body"] * len(bodies)


@committing
def test_task_of_a_lost_worker_is_redelivered_up_to_a_limit(mode: str) -> None:
    result = jobs.meaning_of_life.enqueue()
    row = OutboxMessage.objects.get()
    headers = {**row.headers, "txmsg-id": result.id}
    queued = {
        "queue": QUEUE,
        "body": bytes(row.body),
        "headers": {**headers, "content-type": row.content_type},
        "deliveries": 1,
    }
    QueueMessage.objects.create(**queued)
    given = {"stage": QUEUE, "message_id": result.id, "destination": QUEUE}
    # Begun before, and never ended.
    InboxMessage.objects.create(**given, attempts=1, started_at=timezone.now())
    result.refresh()
    assert (result.status, result.attempts) == (RUNNING, 1)
    OutboxMessage.objects.update(dispatched_at=timezone.now())

    finished(result)

    assert (result.status, result.return_value) == (SUCCESSFUL, 42)
    TaskRun.objects.all().delete()
    InboxMessage.objects.update(processed_at=None, attempts=F("attempts") + 9)
    QueueMessage.objects.create(**queued)
    finished(result)
    assert result.status == FAILED
    assert DeadLetter.objects.get().reason == "worker_lost"
    assert "worker" in result.errors[-1].traceback


def test_results_are_pruned() -> None:
    jobs.meaning_of_life.enqueue()
    drain()
    (kind,) = [one for one in retention.kinds() if one.name == "task runs"]
    assert sum(retention.prune(kind, "default")) == 0
    long_ago = timezone.now() - dt.timedelta(days=15)
    TaskRun.objects.update(created_at=long_ago)
    assert sum(retention.prune(kind, "default")) == 1
    assert not TaskRun.objects.exists()


def test_arguments_travel_unchanged() -> None:
    given = [1.5, -0.0, 10**30, "ü\u2028", None, True, [], {"a": {"b": [1]}}]
    result = jobs.nothing.enqueue(*given)
    (message,) = outbox_messages(QUEUE)
    assert message.body == {"args": given, "kwargs": {}}
    assert finished(result).args == given
    body, _ = serializers.encode(message.body)
    assert json.loads(body)["args"] == given


def test_forced_redelivery_keeps_the_last_result() -> None:
    result = finished(jobs.fail.enqueue())
    TaskRun.objects.create(message_id=result.id, workers=["before"], result=1)
    runs = TaskRun.objects
    runs.finish(uuid.UUID(result.id), ["after"], 2)
    assert runs.get().result == 2


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({}, []),
        ({"OPTIONS": {"TRANSACTION": "none", "USING": None}}, []),
        (
            {"OPTIONS": {"TRANSACTIONS": "none"}},
            ['["TRANSACTIONS"] is not a setting. Did you mean "TRANSACTION"?'],
        ),
        ({"OPTIONS": {"x": 1}}, ['["x"] is not a setting. Known here: BATCH']),
        ({"OPTIONS": {"TRANSACTION": []}}, ['must be "outbox" or "none", not list []']),
        ({"OPTIONS": {"MAX_REDELIVERIES": -1}}, ["must be 0 or more"]),
        ({"OPTIONS": {"MAX_REDELIVERIES": True}}, ["must be an integer, not bool"]),
        ({"OPTIONS": {"MAX_REDELIVERIES": 1_000_001}}, ["must be at most 1,000,000"]),
        ({"OPTIONS": {"CONCURRENCY": 0}}, ["must be greater than zero"]),
        ({"OPTIONS": {"BATCH": 0}}, ["must be greater than zero"]),
        ({"OPTIONS": {"BATCH": 9, "TRANSACTION": "outbox"}}, []),
        (
            {"OPTIONS": {"BATCH": 9, "TRANSACTION": "none"}},
            ['["BATCH"] needs TRANSACTION "outbox"'],
        ),
        ({"OPTIONS": {"USING": 7}}, ["must be a string or None, not int 7"]),
        ({"OPTIONS": {"MODULES": ["shop.tasks"]}}, []),
        ({"OPTIONS": {"MODULES": "shop.tasks"}}, ["must be a list of strings"]),
        ({"OPTIONS": {"MODULES": [1]}}, ["must be a list of strings"]),
        ({"OPTIONS": ["x"]}, ["must be a dict, not list"]),
        ({"QUEUES": ["a", "b/c"]}, ["has 'b/c' as a name"]),
        ({"OPTIONS": {"BROKER": "gone"}}, ["which is not in TXMSG"]),
        ({"OPTIONS": {"USING": "gone"}}, ["which is not in DATABASES"]),
    ],
    ids=str,
)
def test_wrong_settings_are_found(params: dict[str, Any], found: list[str]) -> None:
    with tasks(**params):
        errors = [f"{one.msg} {one.hint}" for one in run_checks(tags=["txmsg"])]
    assert len(errors) == len(found), errors
    for said, part in zip(errors, found, strict=True):
        assert part in said


def test_other_backends_tasks_are_ignored() -> None:
    before = len(all_stages())
    for other in ("django_tasks.x.Y", "gone.Backend", "tests.app.models.Order", ""):
        with override_settings(TASKS={"default": {"BACKEND": other}}):
            assert len(all_stages()) == before - 1, other


def test_a_subclass_is_ours() -> None:
    with override_settings(TASKS={"own": {"BACKEND": f"{__name__}.OwnBackend"}}):
        assert "tests.tasks.own.default" in [one.name for one in all_stages()]


class OwnBackend(TransactionalBackend):
    """A project's own subclass of the backend."""


@committing
@pytest.mark.postgresql
def test_a_long_task_outlives_its_idle_connection() -> None:
    connection.ensure_connection()
    with tasks(OPTIONS={"TRANSACTION": "none"}):
        result = finished(jobs.lose_connection.enqueue())
    assert (result.status, result.return_value) == (SUCCESSFUL, "done")
    assert not DeadLetter.objects.exists()


@committing
def test_a_task_that_outlasts_its_lease_has_not_failed() -> None:
    with tasks(OPTIONS={"TRANSACTION": "none"}):
        result = finished(jobs.lose_delivery.enqueue())
    assert (result.status, result.return_value) == (SUCCESSFUL, "done")
    assert not DeadLetter.objects.exists()
    assert QueueMessage.objects.count() == 1, "who has it by now ends it"


@committing
@pytest.mark.postgresql
def test_a_connection_closed_while_idle_fails_no_task() -> None:
    with tasks(OPTIONS={"TRANSACTION": "none"}):
        result = jobs.meaning_of_life.enqueue()
        (message,) = outbox_messages(QUEUE)
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        # As a consumer does whose broker is not this database.
        find([QUEUE])[0].handler(message)
        result.refresh()
    assert (result.status, result.return_value) == (SUCCESSFUL, 42)


def test_tasks_are_no_part_of_the_contract() -> None:
    assert QUEUE in [one.name for one in all_stages()]
    assert QUEUE not in json.dumps(build())


def test_a_session_finds_what_it_has_enqueued() -> None:
    with outbox_session():
        first, second = jobs.note.enqueue("1"), jobs.note.enqueue("2")
        assert jobs.note.get_result(first.id).status == READY
        assert jobs.note.get_result(second.id).args == ["2"]
        third = jobs.note.enqueue("3")
    drain()
    for one in (first, second, third):
        one.refresh()
        assert one.status == SUCCESSFUL


def test_an_alias_stays_apart_from_its_queues() -> None:
    with override_settings(TASKS={"a.b": {"BACKEND": BACKEND}}):
        (error,) = [one for one in run_checks(tags=["txmsg"]) if one.id == "txmsg.E040"]
    assert "has 'a.b' as a name" in error.msg


@committing
def test_finished_task_without_transaction_is_not_parked() -> None:
    with tasks(OPTIONS={"TRANSACTION": "none"}):
        result = finished(jobs.note.enqueue("once"))
        row = OutboxMessage.objects.get()
        InboxMessage.objects.create(
            stage=QUEUE,
            message_id=row.message_id,
            destination=QUEUE,
            due_at=timezone.now() - dt.timedelta(seconds=1),
            headers={**row.headers, "content-type": row.content_type},
            body=row.body,
        )
        assert drain().processed == 1
        result.refresh()
    assert (result.status, result.attempts) == (SUCCESSFUL, 1)
    assert Effect.objects.count() == 1
