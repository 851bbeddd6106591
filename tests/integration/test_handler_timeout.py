"""`@stage(..., timeout=)`: after this time, a handler's query is cancelled, and the
attempt fails."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.db.models import Q

from django_txmsg import send_message, stage
from django_txmsg.consuming import deadline
from django_txmsg.envelope.message import Message
from django_txmsg.errors import ConfigurationError, StageTimedOut
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.runtime import thread_group
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, declared, put, running, step, txmsg

pytestmark = committing

SETTLED = ~Q(processed_at=None, dead_at=None)
#: Ends by itself only after the test's own time-out.
ENDLESS = {
    "postgresql": "SELECT pg_sleep(600)",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n"
    " WHERE i < 20000000000) SELECT count(*) FROM n",
}
MODES = ["outbox", "best_effort_1pc", "broker_only"]
TIMED_OUT = "django_txmsg.errors.StageTimedOut: The handler of stage "


def endless(using: str = "default") -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(ENDLESS[connections[using].vendor])


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))


def done() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def attempts() -> list[str]:
    return list(Attempt.objects.order_by("pk").values_list("exception", flat=True))


#: Seconds that are enough for all that is not slow on purpose, on a loaded machine.
ENOUGH = 1.0


def late() -> None:
    """Wait until the handler's time-out has passed."""
    until = time.monotonic() + ENOUGH + 0.05
    wait_until(lambda: time.monotonic() > until)


@pytest.mark.parametrize("mode", MODES)
def test_a_query_is_cancelled_and_the_attempt_counts(mode: Any) -> None:
    def handler(message: Message) -> None:
        effect(message)
        if message.delivery_attempt < 3:
            endless()

    with txmsg(), declared(handler, timeout=ENOUGH, transaction=mode) as slow:
        put(slow.destination, b'"it"')
        step(slow, times=3)

    assert [one.startswith(TIMED_OUT) for one in attempts()] == [True, True]
    assert len(done()) == (3 if mode == "broker_only" else 1)
    assert not DeadLetter.objects.exists()


@pytest.mark.postgresql
def test_a_query_is_cancelled_by_a_driver_that_cannot_do_it_safely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """psycopg2, and psycopg before 3.2, have no safe way to cancel a query. The query
    of a late handler is cancelled nevertheless."""
    monkeypatch.delattr(psycopg.Connection, "cancel_safe")
    with (
        txmsg(),
        declared(lambda message: endless(), timeout=0.2, transaction="broker_only") as
        slow,
    ):  # fmt: skip
        put(slow.destination)
        step(slow)

    assert attempts()[0].startswith(TIMED_OUT)


def test_the_last_attempt_that_times_out_is_buried() -> None:
    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(lambda message: endless(), timeout=0.2) as slow,
    ):
        put(slow.destination)
        step(slow)

    letter = DeadLetter.objects.get()
    assert letter.reason == "attempts_exhausted"
    assert "timeout of 0.2 s" in letter.exception


def test_no_query_begins_after_the_time_out() -> None:
    after: list[str] = []

    def handler(message: Message) -> None:
        effect(message)
        late()
        try:
            effect(message)
        except StageTimedOut:
            after.append("refused")
            raise

    with txmsg(), declared(handler, timeout=ENOUGH) as slow:
        put(slow.destination)
        step(slow)

    assert after == ["refused"]
    assert attempts()[0].startswith(TIMED_OUT)
    assert done() == []


@pytest.mark.postgresql
def test_a_composed_statement_after_the_time_out_is_refused() -> None:
    def handler(message: Message) -> None:
        late()
        with connection.cursor() as cursor:
            cursor.execute(psycopg.sql.SQL("SELECT 1"))

    with txmsg(), declared(handler, timeout=ENOUGH) as slow:
        put(slow.destination)
        step(slow)

    assert attempts()[0].startswith(TIMED_OUT)


def hides_a_cancelled_query(message: Message) -> None:
    with contextlib.suppress(DatabaseError), transaction.atomic():
        endless()


def hides_what_is_refused(message: Message) -> None:
    late()
    for _ in range(3):
        with contextlib.suppress(StageTimedOut), transaction.atomic():
            effect(message)


def leaves_a_block_late(message: Message) -> None:
    with contextlib.suppress(LookupError), transaction.atomic():
        effect(message)
        late()
        raise LookupError


def uses_no_database(message: Message) -> None:
    late()


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.matrix), 10])
def test_handler_that_returns_late_has_failed(batch: int) -> None:
    for handler in (
        hides_a_cancelled_query,
        hides_what_is_refused,
        leaves_a_block_late,
        uses_no_database,
    ):

        def slow_for_one(message: Message, slow: Any = handler) -> None:
            effect(message)
            if message.body == "slow":
                slow(message)

        Effect.objects.all().delete()
        Attempt.objects.all().delete()
        with txmsg(), declared(slow_for_one, timeout=ENOUGH, batch=batch) as slow:
            for body in (b'"a"', b'"slow"', b'"b"'):
                put(slow.destination, body)
            step(slow, times=3 if batch == 1 else 1, parked=False)
        assert [one.startswith(TIMED_OUT) for one in attempts()] == [True], handler
        assert done() == ["a", "b"]


def test_another_connection_s_query_is_cancelled_too() -> None:
    def handler(message: Message) -> None:
        effect(message)
        endless("other")

    with txmsg(), declared(handler, timeout=0.2) as slow:
        put(slow.destination)
        step(slow)

    assert attempts()[0].startswith(TIMED_OUT)
    assert done() == []


def test_handlers_own_error_is_kept_after_its_time_out() -> None:
    def handler(message: Message) -> None:
        late()
        raise LookupError("no stock")

    with txmsg(), declared(handler, timeout=0.1) as slow:
        put(slow.destination)
        step(slow)

    assert attempts() == ["LookupError: no stock"]


def test_handler_in_time_is_not_affected() -> None:
    with txmsg(), declared(effect, timeout=600.0) as quick:
        for _ in range(3):
            put(quick.destination, b'"it"')
        step(quick, times=3)

    assert done() == ["it"] * 3
    assert not Attempt.objects.exists()


def test_time_out_does_not_affect_other_threads() -> None:
    """A time-out does not cancel a query of another thread or of the next message."""

    def handler(message: Message) -> None:
        if message.body == "slow":
            endless()
        effect(message)

    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(handler, timeout=ENOUGH) as mixed,
        running(mixed, concurrency=2),
    ):
        for number in range(24):
            put(mixed.destination, b'"slow"' if number % 8 == 0 else b'"quick"')
        wait_until(lambda: InboxMessage.objects.filter(SETTLED).count() == 24)

    assert len(done()) == 21
    assert DeadLetter.objects.count() == 3


@pytest.mark.postgresql
def test_waiting_for_a_lock_ends_at_the_time_out() -> None:
    Effect.objects.create(name="locked", message_id="")

    def handler(message: Message) -> None:
        Effect.objects.select_for_update().get(name="locked")

    with locked(), txmsg(), declared(handler, timeout=0.3) as slow:
        put(slow.destination)
        step(slow)

    assert attempts()[0].startswith(TIMED_OUT)


@contextlib.contextmanager
def locked() -> Any:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            Effect.objects.select_for_update().get(name="locked")
            held.set()
            release.wait(60)
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        release.set()
        thread.join(60)


@pytest.mark.postgresql
def test_the_server_knows_the_limit_for_this_transaction() -> None:
    limits: list[str] = []

    def limit() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            return str(cursor.fetchone()[0])

    def handler(message: Message) -> None:
        if message.body == "own":
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = '7s'")
        limits.append(limit())

    with txmsg(), declared(handler, timeout=90.0) as slow:
        for body in (b'"ours"', b'"own"', b'"ours"'):
            put(slow.destination, body)
        step(slow, times=3)
    limits.append(limit())
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '5s'")
    with txmsg(), declared(handler, timeout=90.0) as slow:
        put(slow.destination)
        step(slow)
    with connection.cursor() as cursor:
        cursor.execute("RESET statement_timeout")

    assert limits == ["95s", "7s", "95s", "0", "5s"]


def test_the_tests_of_a_project_are_limited_too() -> None:
    with txmsg(), declared(lambda message: endless(), timeout=0.2) as slow:
        with transaction.atomic():
            send_message(slow.destination, None)
        with pytest.raises(StageTimedOut):
            drain(slow.name)


def test_timeout_must_be_a_number_of_seconds() -> None:
    for seconds in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigurationError, match="timeout="):
            stage("tests.never", timeout=seconds)


def test_a_time_out_holds_where_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No query is cancelled then, but an attempt that ends late still fails."""
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "txmsg-deadlines":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def handler(message: Message) -> None:
        effect(message)
        if message.body == "late":
            late()

    deadline._watch.clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with txmsg(), declared(handler, timeout=ENOUGH) as limited:
        put(limited.destination, b'"quick"')
        put(limited.destination, b'"late"')
        step(limited, times=2)

    assert refused.is_set()
    assert done() == ["quick"]
    assert [one[: len(TIMED_OUT)] for one in attempts()] == [TIMED_OUT]


def test_watch_thread_ends_without_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_group, "IDLE", 0.05)
    deadline._watch.clear()
    watching = deadline._watch()
    limit = deadline.Deadline("tests", 600.0, uuid.uuid4())
    watching.add(limit)
    assert watchers()
    watching.remove(limit)
    past = deadline.Deadline("tests", 0.0, uuid.uuid4())
    watching.add(past)  # wakes it
    watching.remove(past)
    wait_until(lambda: watching._thread is None)


def watchers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "txmsg-deadlines"]
