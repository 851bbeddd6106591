"""Work that takes longer than every lease, clocks that jump, and suspended processes.

The leases are short here. A running process renews its leases. A suspended process does
not, and its late results are ignored.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone

from django_txmsg import send_messages, signals, stages, wire
from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.database import DatabaseBroker
from django_txmsg.consuming import stage_thread
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.monitoring import waiting
from django_txmsg.stages import CallNext
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import (
    IMPATIENT,
    Script,
    committing,
    declared,
    lose_connection,
    put,
    running,
    step,
    txmsg,
)

pytestmark = committing

#: Renewed a few times in it; a loaded machine is late by a second.
LEASE = 2.0
#: Every lease and pause of the package, made short; the broker is in another database.
SHORT: dict[str, Any] = {
    **IMPATIENT,
    "BROKERS": {"default": {"URL": f"database://other?poll=0.01&lease={LEASE}"}},
    "RELAY": {**IMPATIENT["RELAY"], "LEASE": LEASE},
    "CONSUME": {**IMPATIENT["CONSUME"], "HEARTBEAT": 0.2, "STUCK_AFTER": 0.2},
}
MODES = ["outbox", "best_effort_1pc", "broker_only"]
#: With SQLite's one writer, a handler in a transaction holds up all others.
IN_PARALLEL = [pytest.param("outbox", marks=pytest.mark.postgresql), *MODES[1:]]


def processed() -> bool:
    return InboxMessage.objects.filter(processed_at__isnull=False).exists()


@pytest.mark.parametrize(
    "redelivery",
    ["non_blocking", pytest.param("blocking", marks=pytest.mark.matrix)],
)
@pytest.mark.parametrize("mode", IN_PARALLEL)
def test_a_handler_longer_than_every_lease_runs_once(
    mode: Any, redelivery: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt takes longer than every lease, while two other threads look
    for messages. No thread starts a third attempt, neither of a parked message nor of a
    message that its thread keeps."""
    monkeypatch.setattr(stage_thread, "LEASE", LEASE)
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        if message.delivery_attempt == 1:
            raise ValueError
        _let_pass(2 * LEASE)

    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0, mode=redelivery)
    with (
        txmsg(**SHORT),
        declared(handler, transaction=mode, redelivery=policy) as stage,
        running(stage, concurrency=3),
    ):
        put(stage.destination)
        wait_until(processed, deadline=60)
    assert runs == [1, 2]
    row = InboxMessage.objects.get()
    assert (row.attempts, row.deliveries) == (2, 1)
    assert not DeadLetter.objects.exists()


def slow_around(call_next: CallNext) -> Callable[[Message], Any]:
    def middleware(message: Message) -> Any:
        if message.delivery_attempt > 1:
            _let_pass(2 * LEASE)
        return call_next(message)

    return middleware


slow_around.outside_transaction = True  # type: ignore[attr-defined]


def test_middleware_around_the_transaction_longer_than_the_lease_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The middleware runs before the transaction locks the parked message's row."""
    monkeypatch.setattr(stage_thread, "LEASE", LEASE)
    script = Script(ValueError())
    slow = [f"{__name__}.{slow_around.__name__}"]
    with (
        txmsg(**SHORT, STAGE_MIDDLEWARE=slow),
        declared(script) as stage,
        running(stage, concurrency=2),
    ):
        put(stage.destination)
        wait_until(lambda: processed() or DeadLetter.objects.exists(), deadline=60)
    assert script.attempts == [1, 2]
    assert InboxMessage.objects.get().attempts == 2
    assert not DeadLetter.objects.exists()


@pytest.mark.postgresql
def test_lease_is_renewed_before_an_attempt_is_repeated_after_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt took longer than the lease, and its transaction had locked the row.
    Another worker could claim the message between the attempt and its repetition."""
    monkeypatch.setattr(stage_thread, "LEASE", LEASE)
    leased: list[bool] = []

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError
        other: Any = connection.copy()
        with contextlib.closing(other), other.cursor() as cursor:
            cursor.execute("SELECT lease_until > now() FROM django_txmsg_inboxmessage")
            leased.append(cursor.fetchone()[0])
        if len(leased) == 1:
            _let_pass(1.5 * LEASE)
            with connection.cursor() as cursor:
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"
                )

    with txmsg(**SHORT), declared(handler) as stage:
        put(stage.destination)
        step(stage, times=2)
    assert leased == [True, True]
    assert processed()


@pytest.mark.postgresql
def test_slow_attempt_whose_connection_ends_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server ends the idle connection while the handler calls another service, and
    the lease must be renewed after the handler has failed."""
    monkeypatch.setattr(stage_thread, "LEASE", LEASE)
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        if len(runs) == 2:
            lose_connection("killed")
            _let_pass(LEASE)
        raise ValueError

    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    with (
        txmsg(**SHORT),
        declared(handler, transaction="none", redelivery=policy) as stage,
    ):
        put(stage.destination)
        step(stage, times=2)
    assert runs == [1, 2]
    assert sorted(Attempt.objects.values_list("number", flat=True)) == [1, 2]
    assert DeadLetter.objects.get().reason == "attempts_exhausted"


def _let_pass(seconds: float) -> None:
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds)


@pytest.mark.postgresql
def test_late_failure_after_processing_elsewhere_buries_nothing() -> None:
    """Two threads process copies of a message at the same time. One of them succeeds.
    Then the other's last attempt fails, and nothing is buried."""
    inside = threading.Event()

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            assert inside.wait(30)
            Effect.objects.create(name="done")
            return
        inside.set()
        wait_until(processed)
        raise ValueError

    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    options = {"transaction": "best_effort_1pc", "redelivery": policy}
    with txmsg(**SHORT), declared(handler, **options) as stage:
        headers = {"content-type": "application/json", "txmsg-failed-attempt": "1"}
        headers["txmsg-id"] = "8a1c2b52-6f52-4a0e-8a6e-1f2d3c4b5a69"
        for _ in range(2):
            put(stage.destination, b"1", headers)
        with running(stage, concurrency=2) as threads:
            wait_until(processed)
            wait_until(lambda: all(one.dry for one in threads))
    assert Effect.objects.count() == 1
    assert InboxMessage.objects.get().state == "processed"
    assert not DeadLetter.objects.exists()
    assert not Attempt.objects.exists()


def slow() -> None:
    """Declare a stage. A worker process calls this function. At the second attempt, the
    stage's handler waits until a file exists."""
    stage_thread.LEASE = LEASE
    go = Path(os.environ["GO"])

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError("parked now")
        print("inside", flush=True)  # noqa: T201
        wait_until(go.exists, deadline=60)
        if os.environ.get("FAILS"):
            raise ValueError("after its lease")
        Effect.objects.create(name="done", message_id=str(message.id))

    stages.stage(
        os.environ["SLOW"],
        transaction=os.environ["MODE"],  # type: ignore[arg-type]
        redelivery=RedeliveryPolicy(max_redeliveries=2, initial_delay=0.0),
    )(handler)


def stand_still(process: ManageProcess) -> None:
    """Suspend the process while it has no transaction open.

    SQLite has only one writer, so a process that is suspended in a renewal, a heartbeat
    or a query would block all others.
    """

    def writable(alias: str) -> bool:
        if connections[alias].vendor != "sqlite":
            return True
        with contextlib.closing(connections[alias].copy()) as other:
            other.settings_dict = {**other.settings_dict, "OPTIONS": {"timeout": 0.2}}
            try:
                other.cursor().execute("BEGIN EXCLUSIVE")
            except OperationalError:
                return False
            return True

    def stands() -> bool:
        process.pause()
        if all(map(writable, ("default", "other"))):
            return True
        process.resume()
        return False

    wait_until(stands)


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param("", id="succeeds"),
        pytest.param("1", id="fails", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize(
    "mode",
    [pytest.param("best_effort_1pc", marks=pytest.mark.postgresql), "broker_only"],
)
def test_process_stopped_beyond_its_lease_is_fenced(
    mode: str, fails: str, manage: Manage, destination: str, tmp_path: Path
) -> None:
    """Another worker has processed the suspended worker's message. The late result of
    the suspended worker is ignored, even the failure of a last attempt."""
    go = tmp_path / "go"

    def consume(fails: str) -> Any:
        return manage(
            *("consume", destination),
            hook="tests.integration.test_time.slow",
            txmsg=SHORT,
            env={"GO": str(go), "SLOW": destination, "MODE": mode, "FAILS": fails},
        )

    with txmsg(**SHORT):
        put(destination)
        first = consume(fails)
        first.wait_for_line("inside")
        stand_still(first)
        second = consume("")
        second.wait_for_line("inside")
        assert not processed()
        go.touch()
        wait_until(processed, message=lambda: second.output)
        first.resume()
        first.terminate()
        first.succeed()
        second.terminate()
        second.succeed()
    row = InboxMessage.objects.get()
    assert (row.state, row.attempts) == ("processed", 3)
    assert Effect.objects.count() == (1 if fails else 2)
    assert not DeadLetter.objects.exists()


@pytest.mark.postgresql
def test_process_stopped_in_its_transaction_keeps_the_message(
    manage: Manage, destination: str, tmp_path: Path
) -> None:
    """In mode outbox, a suspended process keeps its lock on the row for longer than the
    lease. No other worker processes the message."""
    go = tmp_path / "go"

    def consume() -> Any:
        return manage(
            *("consume", destination),
            hook="tests.integration.test_time.slow",
            txmsg=SHORT,
            env={"GO": str(go), "SLOW": destination, "MODE": "outbox"},
        )

    def lease_is_over() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT lease_until < clock_timestamp() FROM django_txmsg_inboxmessage"
            )
            return bool(cursor.fetchone()[0])

    with txmsg(**SHORT):
        put(destination)
        first = consume()
        first.wait_for_line("inside")
        stand_still(first)
        second = consume()
        wait_until(lease_is_over, message=lambda: second.output)
        put(destination, b"1", {"content-type": "application/json"})
        wait_until(lambda: "inside" in second.output, deadline=60)
        assert InboxMessage.objects.filter(processed_at=None).count() == 2
        go.touch()
        first.resume()
        wait_until(lambda: Effect.objects.count() == 2)
        for one in (first, second):
            one.terminate()
            one.succeed()
    assert not InboxMessage.objects.exclude(attempts=2).exists()
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_jumps_moves_no_lease_and_no_due_time(
    days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the process jumps, and the database's clock does not. Leases and due
    times use the database's clock."""
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        raise ValueError

    def jump(seconds: float) -> None:
        real, now = time.time, timezone.now
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        monkeypatch.setattr(
            timezone, "now", lambda: now() + dt.timedelta(seconds=seconds)
        )

    later = RedeliveryPolicy(initial_delay=600.0, max_delay=600.0, jitter=0.0)
    with txmsg(**SHORT), declared(handler, redelivery=later) as stage:
        put(stage.destination)
        step(stage)
        jump(days * 86_400.0)
        step(stage)
        put(stage.destination)
        step(stage, times=2)
        monkeypatch.undo()
        for row in InboxMessage.objects.all():
            assert 599 < (row.due_at - row.started_at).total_seconds() < 640
    assert runs == [1, 1]


def test_critical_time_is_not_negative_if_the_senders_clock_is_ahead() -> None:
    told: list[float] = []

    def listen(critical_time: float, **facts: Any) -> None:
        told.append(critical_time)

    headers = {
        "txmsg-id": str(uuid.uuid4()),
        "content-type": "application/json",
        "txmsg-created": (timezone.now() + dt.timedelta(minutes=1)).isoformat(),
    }
    signals.message_processed.connect(listen)
    try:
        with txmsg(**SHORT), declared(lambda message: None) as stage:
            put(stage.destination, headers=headers)
            step(stage)
    finally:
        signals.message_processed.disconnect(listen)
    assert told == [0.0]


def test_log_says_by_which_clock_a_request_has_expired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request of a flow in another service gets no dead letter. Its `expires` time
    is by the clock of that service's database."""
    caplog.set_level("INFO", "django_txmsg.inbox")
    headers = {
        "content-type": "application/json",
        wire.MESSAGE_ID: str(uuid.uuid4()),
        wire.SERVICE: "shop",
        wire.TICKET: "a ticket",
        wire.REPLY_TO: "shop.checkout.steps",
        wire.EXPIRES: "2026-01-01T00:00:00Z",
    }
    with txmsg(**SHORT), declared(lambda message: None) as stage:
        put(stage.destination, b"1", headers)
        step(stage)
    row = InboxMessage.objects.get()
    assert (row.processed_at, row.revoked_at is None) == (None, False)
    assert not DeadLetter.objects.exists()
    said = f"request {row.message_id} of service 'shop': it expired at 2026-01-01 00:00"
    assert said in caplog.text


@pytest.mark.postgresql
def test_a_zone_of_the_alias_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias has a TIME_ZONE in which some days have 23 or 25 hours. Delays and
    expiries are exact, whether a statement stores one message or many."""
    given = connections.databases["default"]
    monkeypatch.setitem(
        connections.databases, "default", {**given, "TIME_ZONE": "Europe/Berlin"}
    )
    delays = [dt.timedelta(days=30 * month) for month in range(1, 13)]

    def store() -> None:
        many = [
            {"destination": "tests.later", "body": 1, "delay": one, "expires": one}
            for one in delays
        ]
        try:
            with transaction.atomic():
                send_messages(many)
                for one in many:
                    send_messages([one])
            DatabaseBroker("default", "database://").open().send(
                [Outgoing("tests.later", {}, b"1", one.total_seconds())
                 for one in delays]
            )  # fmt: skip
        finally:
            connections.close_all()

    with txmsg(DISPATCH_ON_COMMIT="off"):
        thread = threading.Thread(target=store)
        thread.start()
        thread.join(60)
    second = dt.timedelta(seconds=1)

    def whole(ends: Any) -> list[dt.timedelta]:
        # Between instants in UTC, as this thread reads them.
        return [round((end - begin) / second) * second for begin, end in ends]

    outbox = OutboxMessage.objects.order_by("pk")
    assert whole(outbox.values_list("created_at", "due_at")) == delays * 2
    assert whole(outbox.values_list("created_at", "expires_at")) == delays * 2
    queue = QueueMessage.objects.order_by("pk")
    assert whole(queue.values_list("enqueued_at", "available_at")) == delays


def test_a_message_that_is_due_at_a_whole_second_is_counted() -> None:
    due_at = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
    OutboxMessage.objects.create(
        message_id=uuid.uuid4(), destination="orders", body=b"1", due_at=due_at
    )
    (found,) = waiting.in_outbox("default")
    assert found.oldest_due is not None
    assert abs(found.oldest_due - due_at) < dt.timedelta(milliseconds=1)
