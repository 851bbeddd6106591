"""The database becomes unavailable and comes back. Meanwhile the consumer keeps its
deliveries and takes no others. The tests check this by the broker's counts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.runtime import database_health
from django_txmsg.stages import Stage
from django_txmsg.testing.broker_state import StoredMessage
from django_txmsg.testing.profiles import RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests import services
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import (
    IMPATIENT,
    committing,
    declared,
    lose_connection,
    running,
    send,
    txmsg,
)

pytestmark = [committing, pytest.mark.postgresql]


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    """A scripted broker that counts deliveries. It is the settings' default broker."""
    with ScriptedBroker(RABBITMQ) as scripted, settings(scripted):
        yield scripted


def settings(scripted: ScriptedBroker) -> Any:
    # A failed attempt would come again long after the test's patience has ended.
    return txmsg(
        BROKERS={"default": {"URL": scripted.url}},
        REDELIVERY={"INITIAL_DELAY": 600.0, "MAX_DELAY": 600.0},
    )


def put(
    scripted: ScriptedBroker, stage: Stage | str, count: int
) -> list[StoredMessage]:
    """Put messages into a stage's queue."""
    destination = stage if isinstance(stage, str) else stage.destination
    return [
        scripted.put(
            f"/queue/{destination}",
            "null",
            {"txmsg-id": str(uuid.uuid4()), "content-type": "application/json"},
        )
        for _ in range(count)
    ]


def effect(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


def probed(times: int) -> Callable[[], bool]:
    """Return a condition. It becomes true after the outage was noticed and the database
    was then probed `times` times."""
    return lambda: database_health.breaker("default")._failures > times


@pytest.mark.parametrize("batch", [1, 5])
def test_delivery_is_kept_until_the_database_is_back(
    batch: int, broker: ScriptedBroker, postgres: services.PostgreSQL
) -> None:
    with declared(effect, batch=batch) as stage, running(stage, concurrency=4):
        broker.wait_for("SUBSCRIBE", 4)
        connections.close_all()
        postgres.stop()
        messages = put(broker, stage, 20)
        wait_until(probed(3))
        postgres.start()
        wait_until(lambda: Effect.objects.count() == 20)
        wait_until(lambda: len(broker.received("ACK")) == 20)
    assert {one.deliveries for one in messages} == {1}
    assert len(broker.received("SUBSCRIBE")) == broker.accepted == 4
    assert not DeadLetter.objects.exists()
    assert set(InboxMessage.objects.values_list("attempts", flat=True)) == {1}


def test_no_subscription_opens_while_the_database_is_away(
    broker: ScriptedBroker, postgres: services.PostgreSQL
) -> None:
    connections.close_all()
    postgres.stop()
    with pytest.raises(OperationalError) as caught:
        connection.ensure_connection()
    assert database_health.note("default", caught.value)
    with declared(effect) as stage, running(stage, concurrency=8):
        messages = put(broker, stage, 5)
        wait_until(probed(3))
        assert broker.accepted == 0
        postgres.start()
        wait_until(lambda: Effect.objects.count() == 5)
    assert {one.deliveries for one in messages} == {1}


def test_a_handler_that_loses_its_connection_runs_again_at_once(
    broker: ScriptedBroker, postgres: services.PostgreSQL
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        effect(message)
        if message.delivery_attempt == 1:
            inside.set()
            assert go_on.wait(60)
        effect(message)

    with declared(handler) as stage, running(stage):
        (message,) = put(broker, stage, 1)
        assert inside.wait(30)
        connections.close_all()
        postgres.restart()
        go_on.set()
        wait_until(lambda: Effect.objects.count() == 2, deadline=60)
        broker.wait_for("ACK")
    assert message.deliveries == 1
    # Counted, should it be the message that ends the server; no failure of it else.
    assert InboxMessage.objects.get().attempts == 2
    assert not Attempt.objects.exists()


@pytest.mark.parametrize(
    ("how", "failures"), [("killed", 0), ("idle in transaction", 2)]
)
def test_a_message_that_ends_its_connection_each_time_becomes_a_dead_letter(
    how: str, failures: int, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends while the handler runs, but the handler sends no further
    statement: the package's own statement is the first to notice."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        lose_connection(how)

    # The row is marked again after each handler, however quick.
    monkeypatch.setattr("django_txmsg.consuming.protocol.MARK_AGAIN_AFTER", 0.0)
    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    with declared(handler, redelivery=policy) as stage, running(stage):
        (message,) = put(broker, stage, 1)
        wait_until(DeadLetter.objects.exists)
        broker.wait_for("ACK")
    assert attempts == [1, 2]
    assert message.deliveries == 1
    assert DeadLetter.objects.get().reason == "attempts_exhausted"
    # The error may say only that the connection is gone, which is no failure.
    assert Attempt.objects.count() <= failures


def test_a_handler_outside_of_transactions_is_not_repeated_for_its_connection(
    broker: ScriptedBroker,
) -> None:
    """The connection, which CONN_MAX_AGE keeps, ends while the handler calls another
    service."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        lose_connection("killed")

    with declared(handler, transaction="none") as stage, running(stage):
        put(broker, stage, 1)
        wait_until(InboxMessage.objects.exclude(processed_at=None).exists)
        broker.wait_for("ACK")
    assert attempts == [1]


@pytest.fixture
def forgetful(postgres: services.PostgreSQL) -> Iterator[services.PostgreSQL]:
    """A PostgreSQL server that writes asynchronous commits to its disk only after a
    long delay."""

    def be(setting: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER SYSTEM {setting}")
            cursor.execute("SELECT pg_reload_conf()")

    be("SET wal_writer_delay = '10s'")
    yield postgres
    be("RESET wal_writer_delay")


@pytest.mark.parametrize("ends", ["parked", "blocking", "dead"])
def test_a_message_that_failed_while_a_crash_forgot_its_record_is_not_dropped(
    ends: str, broker: ScriptedBroker, forgetful: services.PostgreSQL
) -> None:
    """The record of the arrival was committed without waiting for the disk. The server
    crashes while the handler runs, and loses this record. Then the handler fails. The
    message is not dropped."""
    policy = RedeliveryPolicy(
        max_redeliveries=0 if ends == "dead" else 3,
        initial_delay=0.0,
        mode="blocking" if ends == "blocking" else "non_blocking",
    )
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        if len(attempts) == 1:
            forgetful.kill()
            forgetful.start()
        if len(attempts) == 1 or ends == "dead":
            raise ValueError("the handler's own")
        effect(message)

    connections.close_all()
    with declared(handler, redelivery=policy) as stage, running(stage):
        (message,) = put(broker, stage, 1)
        broker.wait_for("ACK")
        ended = DeadLetter.objects if ends == "dead" else Effect.objects
        wait_until(ended.exists)
    assert ended.count() == 1
    assert message.deliveries == 1
    # As nothing is known of the first attempt, another one is the first.
    assert attempts[:2] == [1, 1]


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc"])
def test_a_server_that_was_made_read_only_is_waited_for(
    transaction: Any, broker: ScriptedBroker
) -> None:
    """The server becomes read-only. Its connections stay open, so only its errors show
    this. The stage waits, and then processes its messages."""
    with (
        declared(effect, transaction=transaction) as stage,
        running(stage, concurrency=2),
    ):
        put(broker, stage, 2)
        wait_until(lambda: Effect.objects.count() == 2)
        with ReadOnly():
            messages = put(broker, stage, 4)
            wait_until(probed(2))
        wait_until(lambda: Effect.objects.count() == 6)
        # A transacted session commits its acknowledgement.
        wait_until(lambda: not broker.stored(f"/queue/{stage.destination}"))
    assert {one.deliveries for one in messages} == {1}
    assert not DeadLetter.objects.exists()


class ReadOnly:
    """Make the server read-only. Its connections stay open."""

    def __enter__(self) -> None:
        self._set("SET default_transaction_read_only = on", "on")

    def __exit__(self, *_: object) -> None:
        self._set("RESET default_transaction_read_only", "off")

    def _set(self, what: str, now: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER SYSTEM {what}")
            cursor.execute("SELECT pg_reload_conf()")

            def said() -> bool:
                cursor.execute("SHOW default_transaction_read_only")
                return bool(cursor.fetchone() == (now,))

            wait_until(said)


def test_a_stop_ends_the_wait_at_once_and_the_delivery_goes_back(
    broker: ScriptedBroker,
    manage: Callable[..., ManageProcess],
    postgres: services.PostgreSQL,
) -> None:
    worker = manage(
        "consume",
        txmsg={**IMPATIENT, "BROKERS": {"default": {"URL": broker.url}}},
        hook="tests.integration.test_database_away.declare",
    )
    (first,) = put(broker, "tests.away", 1)
    wait_until(lambda: Effect.objects.count() == 1)
    connections.close_all()
    postgres.stop()
    try:
        (second,) = put(broker, "tests.away", 1)
        worker.wait_for_line("database 'default' cannot be used")
        wait_until(lambda: second.deliveries)
        worker.terminate()
        assert worker.wait() == 0
        assert "Stopped without an answer" not in worker.output
    finally:
        postgres.start()
    assert (first.deliveries, second.deliveries) == (1, 1)
    assert broker.stored("/queue/tests.away") == [second]


def declare() -> None:
    """Declare a stage in the worker."""
    stages.stage("tests.away")(effect)


def test_lock_timeout_keeps_the_delivery_and_blocks_no_stage(
    broker: ScriptedBroker,
) -> None:
    """Another session has locked the message's row. The stage does not treat this as an
    outage. It keeps the delivery, and processes other messages meanwhile."""
    other: Any = connections["default"].copy()
    with connection.cursor() as cursor:
        cursor.execute("ALTER ROLE CURRENT_USER SET lock_timeout = '50ms'")
    try:
        with declared(effect) as stage, running(stage, concurrency=2):
            broker.wait_for("SUBSCRIBE", 2)
            with other.cursor() as elsewhere:
                elsewhere.execute("BEGIN")
                message_id = str(uuid.uuid4())
                elsewhere.execute(
                    "INSERT INTO django_txmsg_inboxmessage (stage, message_id,"
                    " destination, correlation_id, service, deliveries, attempts,"
                    " last_error) VALUES (%s, %s, '', '', '', 1, 1, '')",
                    [stage.name, message_id],
                )
                held = broker.put(
                    f"/queue/{stage.destination}",
                    "null",
                    {"txmsg-id": message_id, "content-type": "application/json"},
                )
                wait_until(lambda: held.deliveries)
                others = put(broker, stage, 5)
                wait_until(lambda: Effect.objects.count() >= 1)
                elsewhere.execute("ROLLBACK")
            wait_until(lambda: Effect.objects.count() == 6)
            broker.wait_for("ACK", 6)
        assert {one.deliveries for one in [held, *others]} == {1}
        assert database_health.error("default") is None
    finally:
        other.close()
        with connection.cursor() as cursor:
            cursor.execute("ALTER ROLE CURRENT_USER RESET lock_timeout")


def test_a_statements_time_out_is_a_failure_of_its_message() -> None:
    def handler(message: Message) -> None:
        if message.body == "slow" and message.delivery_attempt == 1:
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = '20ms'")
                cursor.execute("SELECT pg_sleep(10)")
        effect(message)

    with txmsg(), declared(handler) as stage:
        for body in ["slow", "quick", "quick"]:
            send(stage.destination, body)
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 3)
    assert database_health.error("default") is None
    assert sorted(InboxMessage.objects.values_list("attempts", flat=True)) == [1, 1, 2]
    assert Attempt.objects.get().exception.startswith("django.db.utils.Operational")


def test_a_slow_stage_acknowledges_each_message_at_once(broker: ScriptedBroker) -> None:
    """A slow stage acknowledges each message before it processes the next one. RabbitMQ
    would close the channel after waiting too long for an acknowledgement."""
    go_on = threading.Event()

    def handler(message: Message) -> None:
        if Effect.objects.exists():
            assert go_on.wait(60)
        else:
            threading.Event().wait(1.2)
        effect(message)

    with declared(handler) as stage, running(stage):
        put(broker, stage, 2)
        broker.wait_for("ACK")
        assert Effect.objects.count() == 1
        go_on.set()
        broker.wait_for("ACK", 2)
