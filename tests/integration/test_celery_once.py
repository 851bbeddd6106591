"""A OnceTask's deliveries, one by one, in the worker's own way of running a task."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject
from django.db import DatabaseError, connection, transaction

from django_txmsg import send_message
from django_txmsg.celery import OnceTask, once
from django_txmsg.errors import SwallowedDatabaseError
from django_txmsg.models import InboxMessage, OutboxMessage
from tests.app.models import Effect
from tests.celery_shop import app, step
from tests.celery_worker import BROKERS, forget_connections
from tests.running import committing, txmsg

pytestmark = committing


@pytest.fixture(autouse=True)
def celery() -> Iterator[None]:
    """The app sends into this process's memory."""
    before = app.conf.broker_url
    app.conf.broker_url = "memory://"
    forget_connections()
    with txmsg(BROKERS=BROKERS):
        yield
    app.conf.broker_url = before
    forget_connections()


def once_task(work: Any, **options: Any) -> Any:
    """Return a OnceTask that does the work, under a name of its own."""
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


def effect(name: str) -> None:
    Effect.objects.create(name=name, message_id="1")


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


def test_a_result_that_cannot_be_kept_is_none_for_a_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = once_task(lambda: object())

    assert deliver(task) is not None
    assert "cannot be kept" in caplog.text
    assert deliver(task) is None


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


def test_the_transaction_may_be_another_database_s() -> None:
    task = once_task(lambda: 1, using="other")

    assert deliver(task) == 1
    assert InboxMessage.objects.count() == 0
    assert InboxMessage.objects.using("other").count() == 1


def test_called_as_a_function_it_is_one() -> None:
    task = once_task(lambda number: number + 1)

    assert task(1) == 2
    assert InboxMessage.objects.count() == 0


def test_eager_it_is_the_same() -> None:
    task = once_task(lambda: step.delay("called").id)

    assert task.apply().get() == str(OutboxMessage.objects.get().message_id)


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
    monkeypatch.setattr(once, "PAUSE", 0.0)
    task = once_task(work)

    rejected = deliver(task)
    assert isinstance(rejected, Reject)
    assert rejected.requeue
    assert deliver(task) is None
    assert effects() == ["worked"]


@pytest.mark.postgresql
def test_a_lost_conflict_is_nobody_s_failure() -> None:
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
