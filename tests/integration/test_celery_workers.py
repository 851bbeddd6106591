"""Tasks that are sent through the outbox to real brokers, and executed by real workers
that are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.app.trace import build_tracer
from celery.exceptions import Reject
from django.db import transaction
from kombu import Exchange, Queue

from django_txmsg import brokers
from django_txmsg.celery import following
from django_txmsg.errors import BrokerUnavailable, DestinationUnavailable
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime import breaker
from tests.app.models import Effect
from tests.celery_shop import (
    add,
    app,
    charge,
    failing,
    replaced,
    replaced_inside,
    retried,
    retried_inside,
    step,
)
from tests.celery_worker import BROKERS, CeleryWorker, environment, forget_connections
from tests.faults import ROOT, wait_until
from tests.running import committing, ship, txmsg
from tests.services import RabbitMQ, Redis
from tests.services.stomp_server import PASSWORD, USER

pytestmark = [
    committing,
    pytest.mark.server,  # which conftest cannot see
    pytest.mark.filterwarnings("default:Call to deprecated:DeprecationWarning"),
]

Start = Callable[..., CeleryWorker]
REPLICAS = "CONFIG SET min-replicas-to-write"


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The URL of the broker that the test names."""
    kind = getattr(request, "param", "rabbitmq")
    server = request.getfixturevalue(kind)
    return str(server.url() if kind == "redis" else amqp_url(server))


def amqp_url(server: RabbitMQ) -> str:
    """Return RabbitMQ's URL for AMQP."""
    return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{server.amqp_port}//"


on_both = pytest.mark.parametrize("url", ["rabbitmq", "redis"], indirect=True)


@pytest.fixture
def worker(url: str, tmp_path: Path) -> Iterator[Start]:
    """Empty the queue, and return a function that starts a worker. The workers end with
    the test."""
    before = {name: app.conf[name] for name in ("broker_url", "result_backend")}
    app.conf.update(broker_url=url)
    forget_connections()
    with app.connection_for_write() as connection:
        queue = app.amqp.default_queue(connection.default_channel)
        queue.declare()
        queue.purge()
    directory = tmp_path / "workers"
    directory.mkdir()
    with ExitStack() as stack:
        stack.enter_context(txmsg(BROKERS=BROKERS))

        def start(**more: str) -> CeleryWorker:
            more.setdefault("TXMSG_TEST_CELERY_DIE", str(tmp_path / "die"))
            return stack.enter_context(CeleryWorker(directory, url, **more))

        yield start
    app.conf.update(before)
    forget_connections()


def effects(prefix: str = "") -> list[str]:
    """Return the effects that the tasks have recorded, in order."""
    rows = Effect.objects.filter(name__startswith=prefix).order_by("id")
    return list(rows.values_list("name", flat=True))


def worked(worker: CeleryWorker, *expected: str, prefix: str = "") -> None:
    """Relay messages until the tasks have recorded exactly the expected effects."""

    def there() -> bool:
        ship(broker="celery")
        return set(expected) <= set(effects(prefix))

    wait_until(there, deadline=60, message=lambda: f"{effects()}\n{worker.said()}")
    assert sorted(effects(prefix)) == sorted(expected)


@on_both
def test_called_task_is_executed_after_the_commit(worker: Start, redis: Redis) -> None:
    """A worker executes tasks after the commit of their calls: chains, groups, links, a
    countdown, a chord, retries and replacements."""
    app.conf.result_backend = redis.url(1)
    forget_connections()
    with transaction.atomic():
        step.delay("lost")
        transaction.set_rollback(True)
    with transaction.atomic():
        chain(charge.s(1), step.s("after charge")).delay()
        group(step.s("of a group", i) for i in range(2)).delay()
        step.apply_async(("linked",), link=step.s("link"), countdown=1)
        chord([add.s(1, 1), add.s(2, 2)], step.s("body")).delay()
        retried.delay(1)
        retried_inside.delay()
        replaced.delay()
        replaced_inside.delay()
        result = failing.delay()

    one = worker(TXMSG_TEST_CELERY_RESULTS=redis.url(1))
    worked(
        one,
        "charge [1]",
        'step ["called by", 1]',
        'step [[1], "after charge"]',
        'step ["of a group", 0]',
        'step ["of a group", 1]',
        'step ["linked"]',
        'step [["linked"], "link"]',
        'step [[2, 4], "body"]',
        "retried 1",
        "retried inside 1",
        "replaced",
        'step ["first"]',
        'step [["first"], "second"]',
        'step ["replacement"]',
    )
    with pytest.raises(ValueError, match="no good"):
        result.get(timeout=60)
    inbox = InboxMessage.objects.get(stage="tests.celery_shop.failing")
    assert (inbox.state, inbox.last_error) == ("dead", "ValueError: no good")


def test_a_copy_of_a_once_task_goes_on_with_the_chain(worker: Start) -> None:
    with transaction.atomic():
        chain(charge.s(1), charge.s(2), step.s("end")).delay()
    ship(broker="celery")
    OutboxMessage.objects.update(dispatched_at=None)  # sent once more

    one = worker()
    end = 'step [[[1], 2], "end"]'

    def twice() -> bool:
        ship(broker="celery")
        return effects().count(end) == 2

    wait_until(twice, deadline=60, message=one.said)
    assert effects("charge") == ["charge [1]", "charge [[1], 2]"]


@pytest.mark.parametrize(
    ("url", "who"),
    [
        ("rabbitmq", "child"),
        ("rabbitmq", "worker"),
        pytest.param("redis", "child", marks=pytest.mark.soak),
        pytest.param("redis", "worker", marks=pytest.mark.soak),  # half a minute
    ],
    indirect=["url"],
)
def test_a_worker_killed_after_its_commit_loses_and_repeats_nothing(
    worker: Start, tmp_path: Path, who: str
) -> None:
    (tmp_path / "die").write_text(who)
    with transaction.atomic():
        chain(charge.s(1), charge.s(2), step.s("end")).delay()
    one = worker()
    if who == "worker":
        ship(broker="celery")
        one.wait_for_end()
        one = worker()

    worked(
        one,
        "charge [1]",
        'step ["called by", 1]',
        "charge [[1], 2]",
        'step ["called by", [1], 2]',
        'step [[[1], 2], "end"]',
    )
    assert not (tmp_path / "die").exists()
    first = InboxMessage.objects.get(stage="tests.celery_shop.charge", deliveries=2)
    assert (first.state, first.attempts) == ("processed", 1)


def test_a_process_killed_before_its_chord_counts_its_task_loses_no_chord(
    worker: Start, redis: Redis, tmp_path: Path
) -> None:
    """The process is killed after the result of the task is stored. The task is
    delivered again, and the chord counts it."""
    app.conf.result_backend = redis.url(1)
    forget_connections()
    note = tmp_path / "in chord"
    note.touch()
    with transaction.atomic():
        chord([charge.s(1), charge.s(2)], step.si("body")).delay()

    one = worker(
        TXMSG_TEST_CELERY_RESULTS=redis.url(1),
        TXMSG_TEST_CELERY_DIE_IN_CHORD=str(note),
    )

    worked(
        one,
        "charge [1]",
        "charge [2]",
        'step ["body"]',
        'step ["called by", 1]',
        'step ["called by", 2]',
    )
    assert not note.exists()


def test_a_worker_killed_after_it_called_its_links_calls_them_with_the_same_ids(
    worker: Start, tmp_path: Path
) -> None:
    """A worker is killed after it has called its task's links. The second delivery of
    the task calls the links again with the same ids, so each link is executed once,
    nested links included."""
    links = [
        charge.s(2).set(link=charge.s(3)),
        chain(charge.s(4), charge.s(5)),
        group(charge.s(6), charge.s(7)),
    ]
    with transaction.atomic():
        result = charge.apply_async((1,), link=links)
    note = tmp_path / "late"
    note.write_text(result.id)

    one = worker(TXMSG_TEST_CELERY_DIE_LATE=str(note))
    rows = InboxMessage.objects.filter(processed_at__isnull=False)

    def called_twice() -> bool:
        ship(broker="celery")
        return sorted(rows.values_list("deliveries", flat=True)) == [2] * 7

    wait_until(called_twice, deadline=60, message=one.said)
    assert not note.exists()
    assert sorted(effects("charge")) == [
        "charge [1]",
        "charge [[1], 2]",
        "charge [[1], 4]",
        "charge [[1], 6]",
        "charge [[1], 7]",
        "charge [[[1], 2], 3]",
        "charge [[[1], 4], 5]",
    ]


DIES_AFTER_ITS_COMMIT = """
import os, signal, django
django.setup()
from django.db import transaction
from tests.app.models import Order
from tests.celery_shop import step
with transaction.atomic():
    Order.objects.create(number="A-1")
    step.delay("of a process that died")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_task_of_a_process_killed_after_commit_is_executed(
    worker: Start, url: str
) -> None:
    died = subprocess.run(
        [sys.executable, "-c", DIES_AFTER_ITS_COMMIT],
        cwd=ROOT, env=environment("amqp://127.0.0.1:1//"), capture_output=True,
    )  # fmt: skip
    assert died.returncode == -9, died.stderr.decode()

    worked(worker(), 'step ["of a process that died"]')


def test_task_called_during_an_outage_arrives_later(
    worker: Start, rabbitmq: RabbitMQ
) -> None:
    lane = Lane("default", "celery")
    try:
        for number in range(3):
            with transaction.atomic():
                for _ in range(20):
                    step.delay("restart", number)
            if number == 1:
                rabbitmq.kill()
                with pytest.raises(BrokerUnavailable):
                    lane.dispatch()
                lane.close()
                rabbitmq.start()
            if number == 2:
                rabbitmq.close_all_connections()
            wait_until(lambda: not lane.dispatch() and not _pending(), deadline=60)
    finally:
        lane.close()

    with app.connection_for_write() as connection:
        queue = app.amqp.default_queue(connection.default_channel)
        assert queue.queue_declare(passive=True).message_count >= 60


def _pending() -> int:
    return OutboxMessage.objects.filter(dispatched_at=None).count()


def test_a_task_that_the_broker_refuses_is_refused_alone(
    worker: Start, rabbitmq: RabbitMQ
) -> None:
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare(
            "tests.celery.other", durable=False, auto_delete=False
        )
    with transaction.atomic():
        step.delay("before")
        step.apply_async(("refused",), queue="tests.celery.other")
        step.apply_async(("no such exchange",), exchange="nowhere", routing_key="x")
        step.delay("after")

    ship(broker="celery")

    rows = OutboxMessage.objects.order_by("id")
    assert [row.dispatched_at is not None for row in rows] == [True, False, False, True]
    assert "cannot be declared" in rows[1].last_error
    assert "nowhere" in rows[2].last_error
    # An operator can repair both, so no attempt counts.
    assert {row.attempts for row in rows} == {0}


@pytest.mark.parametrize("url", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("begin", "end", "error"),
    [
        (f"{REPLICAS} 1", f"{REPLICAS} 0", "NOREPLICAS"),
        ("CLIENT PAUSE 20000 WRITE", "CLIENT UNPAUSE", "TimeoutError"),
    ],
)
def test_tasks_wait_while_redis_accepts_no_writes(
    worker: Start, monkeypatch: pytest.MonkeyPatch, begin: str, end: str, error: str
) -> None:
    """This is an outage, not a fault of the task."""
    monkeypatch.setattr(brokers.celery, "TIMEOUT", 0.5)
    with app.connection_for_write() as connection, transaction.atomic():
        client = connection.default_channel.client
        # Its declaration would be refused first.
        step.apply_async(("later",), queue=Queue("tests.celery", no_declare=True))
    client.execute_command(begin)
    try:
        with pytest.raises(BrokerUnavailable, match=error):
            Relay(["default"], ["celery"], lanes=1).run(once=True)
        assert OutboxMessage.objects.get().attempts == 0
    finally:
        client.execute_command(end)

    Relay(["default"], ["celery"], lanes=1).run(once=True)

    assert _pending() == 0


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_a_redis_that_lost_its_data_loses_no_further_task(worker: Start) -> None:
    """The open session declares the lost bindings of the exchange again."""
    exchange = Exchange("tests.celery.bindings", type="topic")
    queue = Queue("tests.celery.bound", exchange, routing_key="bound")
    lane = Lane("default", "celery")
    try:
        with app.connection_for_write() as connection:
            client = connection.default_channel.client
            for _ in range(2):
                with transaction.atomic():
                    step.apply_async(("of an exchange",), queue=queue)
                lane.dispatch()
                assert (_pending(), client.llen(queue.name)) == (0, 1)
                client.flushdb()
    finally:
        lane.close()


def test_a_task_for_a_full_queue_waits_without_attempts(
    worker: Start, rabbitmq: RabbitMQ, settings: Any
) -> None:
    """A task's queue is full, and refuses more. Calls of the same task for another
    queue are sent meanwhile, and the refused ones when there is room."""
    settings.TXMSG = {**settings.TXMSG, "RELAY": {"BREAKER_MAX_PAUSE": 1.0}}
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    full = Queue("tests.celery.limited", queue_arguments=limits)
    lane = Lane("default", "celery", batch_size=4)
    try:
        with app.connection_for_write() as connection:
            bound = full(connection.default_channel)
            bound.declare()
            bound.purge()
            with transaction.atomic():
                for number in range(10):
                    step.apply_async((number,), queue=full)
                step.delay("to a queue with room")

            def the_other_is_sent() -> bool:
                lane.dispatch()
                return OutboxMessage.objects.latest("id").dispatched_at is not None

            wait_until(the_other_is_sent)
            for _ in range(20):
                lane.dispatch()
            waiting = list(OutboxMessage.objects.filter(dispatched_at=None))
            assert len(waiting) == 9
            (outage,) = breaker.outages()
            assert (outage.kind, "is full" in outage.error) == ("destination", True)
            with pytest.raises(DestinationUnavailable, match="is full"):
                Relay(["default"], ["celery"], lanes=1).run(once=True)
            assert {row.attempts for row in waiting} == {0}
            assert {"is full" in row.last_error for row in waiting} == {True}

            def sent_when_there_is_room() -> bool:
                bound.purge()
                lane.dispatch()
                return _pending() == 0

            wait_until(sent_when_there_is_room, deadline=60)

            def reported_as_over() -> bool:
                lane.dispatch()
                return not breaker.outages()

            wait_until(reported_as_over)
            bound.delete()
    finally:
        lane.close()


def test_a_queue_that_was_deleted_loses_no_task(
    worker: Start, rabbitmq: RabbitMQ
) -> None:
    """The task's queue was deleted, and its exchange would drop the task without an
    error. The task stays in the outbox, and the next call declares the queue again."""
    exchange = Exchange("tests.celery.topic", type="topic")
    queue = Queue("tests.celery.eu", exchange, routing_key="eu.#")
    lane = Lane("default", "celery")

    def call_and_ship() -> OutboxMessage:
        with transaction.atomic():
            result = step.apply_async(("of a topic",), queue=queue, mandatory=True)
        lane.dispatch()
        return OutboxMessage.objects.get(message_id=result.id)

    try:
        with app.connection_for_write() as connection:
            assert call_and_ship().dispatched_at is not None
            queue(connection.default_channel).delete()
            lost = call_and_ship()
            assert lost.dispatched_at is None
            assert "takes 'eu.#' any more" in lost.last_error
            # The next call declares the queue again.
            assert call_and_ship().dispatched_at is not None
            queue(connection.default_channel).delete()
    finally:
        lane.close()


def test_messages_after_a_once_task_are_confirmed(
    worker: Start, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next task of a OnceTask's chain goes to a full queue, which refuses it. The
    worker uses publisher confirms, so it notices the refusal."""
    monkeypatch.setattr(following, "PAUSE", 0.0)
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    full = Queue("tests.celery.full", queue_arguments=limits)
    trace = build_tracer(charge.name, charge, app=app)
    request = {"id": "one", "retries": 0, "delivery_info": {}}

    def deliver() -> Any:
        chain = [step.s().set(queue=full)]
        return trace("one", [1], {}, {**request, "chain": chain}).retval

    with app.connection_for_write() as connection:
        bound = full(connection.default_channel)
        bound.declare()
        bound.purge()
        assert deliver() == [1]
        for _ in range(2):
            error = deliver().exception
            assert isinstance(getattr(error, "exc", error), Reject)
        bound.purge()
        rabbitmq.close_all_connections()
    assert deliver() == [1]
    assert effects("charge") == ["charge [1]"]


@pytest.mark.soak  # each death takes Celery a second
def test_a_once_task_that_kills_its_worker_every_time_ends(
    worker: Start, url: str
) -> None:
    with transaction.atomic():
        app.signature("tests.celery_shop.poison").delay()
    ship(broker="celery")
    one = worker()

    dead = InboxMessage.objects.filter(dead_at__isnull=False)
    wait_until(dead.exists, deadline=90, message=one.said)
    row = InboxMessage.objects.get()
    assert row.last_error.startswith("django_txmsg.errors.TaskGivenUp: ")
    assert (row.attempts, row.deliveries) == (8, 8)
    # It does not come again.
    step.delay("next")
    worked(one, 'step ["next"]')
    row.refresh_from_db()
    assert (row.state, row.deliveries) == ("dead", 8)
