"""A worker's database connections obey CONN_MAX_AGE and CONN_HEALTH_CHECKS, as in a
request. A broken connection makes at most one attempt fail, because the worker opens a
new connection for the next attempt. The tests check this at the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from django_txmsg import Refuse
from django_txmsg.consuming.stage_thread import StageThread
from django_txmsg.envelope.message import Message
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.runtime.connections import close_broken
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.stages import CallNext, Stage
from tests import services
from tests.app.models import Effect
from tests.faults import wait_until
from tests.integration.test_lazy_connection import Received
from tests.running import committing, declared, put, running, thread_of, txmsg

pytestmark = [committing, pytest.mark.postgresql]

APART = {"default": {"URL": "database://other?poll=0.01"}}


@pytest.fixture
def second(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the alias `other` to the same database, for threads that start from now
    on."""
    mine = {**connections.databases["default"]}
    monkeypatch.setitem(connections.databases, "other", mine)
    return "other"


@contextmanager
def default(**settings: Any) -> Iterator[None]:
    """Change the settings of the default database, for connections that are opened from
    now on."""
    given: dict[str, Any] = connections.databases["default"]
    before = dict(given)
    given.update(settings)
    try:
        yield
    finally:
        given.clear()
        given.update(before)


@contextmanager
def alone(stage: Stage) -> Iterator[StageThread]:
    """Run one thread of the stage. No other thread of the worker uses the database."""
    stop = threading.Event()
    group = ThreadGroup(stop.set)
    thread = thread_of(stage, stop)
    group.add("stage", thread.run)
    group.start()
    try:
        yield thread
    finally:
        stop.set()
        group.join()


#: The server's processes that an earlier test has left: no affair of this one.
_left: set[int] = set()


@pytest.fixture(autouse=True)
def what_was_there(transactional_db: None) -> None:
    _left.clear()
    _left.update(backends())


def backends() -> set[int]:
    """Return the process ids of PostgreSQL's sessions on this database, except ours."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )
        return {pid for (pid,) in cursor.fetchall()} - _left


def effect(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


def test_a_restart_of_another_database_costs_no_message(second: str) -> None:
    """The server ends the idle connections to another database. The next message opens
    new ones."""

    def handler(message: Message) -> None:
        Effect.objects.using(second).exists()
        effect(message)

    with txmsg(), declared(handler) as stage, running(stage):
        put(stage.destination)
        wait_until(lambda: Effect.objects.count() == 1)
        for pid in backends():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        for _ in range(5):
            put(stage.destination)
        wait_until(lambda: Effect.objects.count() == 6)
    attempts = InboxMessage.objects.values_list("attempts", flat=True)
    assert sum(attempts) <= 7, "at most the one in hand was tried again"


def test_a_connection_that_breaks_in_a_handlers_hands_breaks_one_attempt(
    second: str,
) -> None:
    def handler(message: Message) -> None:
        with connections[second].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            if message.body == "breaks" and message.delivery_attempt == 1:
                with connection.cursor() as mine:
                    mine.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            cursor.execute("SELECT 1")
        effect(message)

    with txmsg(), declared(handler) as stage, running(stage):
        for body in (b'"well"', b'"breaks"', b'"well"', b'"well"'):
            put(stage.destination, body)
        wait_until(lambda: Effect.objects.count() == 4)
    attempts = InboxMessage.objects.values_list("attempts", flat=True)
    assert sorted(attempts) == [1, 1, 1, 2]


def refusing(call_next: CallNext) -> Callable[[Message], Any]:
    """A middleware that buries a message whose handler could not use a database."""

    def run(message: Message) -> Any:
        try:
            return call_next(message)
        except OperationalError as error:
            raise Refuse("no database") from error

    return run


refusing.outside_transaction = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("middleware", [False, True])
def test_outage_of_another_database_is_a_failure_of_a_handler_outside_transactions(
    second: str, middleware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread gives its own connection back before it calls the handler. That is no
    outage of its own database, so the policy decides about the message."""
    nobody = {"HOST": "127.0.0.1", "PORT": str(services.free_port())}
    monkeypatch.setitem(
        connections.databases, second, {**connections.databases[second], **nobody}
    )

    def handler(message: Message) -> None:
        Effect.objects.using(second).exists()

    with (
        txmsg(
            REDELIVERY={"INITIAL_DELAY": 600.0, "MAX_DELAY": 600.0},
            STAGE_MIDDLEWARE=[f"{__name__}.refusing"] if middleware else [],
        ),
        declared(handler, transaction="none") as stage,
        running(stage),
    ):
        put(stage.destination)
        wait_until(Attempt.objects.exists)
        wait_until(lambda: not QueueMessage.objects.exists())
    assert InboxMessage.objects.get().attempts == 1
    assert DeadLetter.objects.filter(reason="refused").exists() == middleware


@pytest.mark.parametrize(("age", "kept"), [(0, False), (None, True), (600, True)])
def test_idle_thread_keeps_connections_within_their_age(
    age: int | None, kept: bool
) -> None:
    with (
        default(CONN_MAX_AGE=age),
        txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}),
        declared(effect) as stage,
        alone(stage) as thread,
    ):
        wait_until(lambda: not backends())
        put(stage.destination)
        wait_until(lambda: thread.handled == 1 and thread.dry)
        if kept:
            assert len(backends()) == 1
        else:
            wait_until(lambda: not backends())


def test_a_connection_past_its_age_is_replaced() -> None:
    seen: list[int] = []

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            seen.append(cursor.fetchone()[0])

    with (
        default(CONN_MAX_AGE=1),
        txmsg(BROKERS=APART),
        declared(handler) as stage,
        alone(stage),
    ):

        def another() -> bool:
            put(stage.destination)
            return len(set(seen)) >= 2

        wait_until(another)
    assert seen == sorted(seen, key=seen.index), "one after the other"


def test_a_session_that_the_server_has_ended_is_noticed_without_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """eventlet removes poll() from the module `select`."""
    monkeypatch.delattr("select.poll")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [pid] = cursor.fetchone()
    close_broken("default")
    assert connection.connection is not None
    other = connections["default"].copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 30000)", [pid])
    other.close()
    close_broken("default")
    assert connection.connection is None


@pytest.mark.parametrize("checks", [False, True])
def test_a_ping_is_sent_where_django_sends_one(
    checks: bool, postgres: services.PostgreSQL
) -> None:
    with (
        default(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=checks),
        txmsg(BROKERS=APART),
        declared(effect) as stage,
        alone(stage) as thread,
    ):
        put(stage.destination)
        wait_until(lambda: thread.handled == 1)
        received = Received(postgres)
        for _ in range(2):
            put(stage.destination)
        wait_until(lambda: thread.handled == 3)
        statements = received.statements()
    assert statements.count("SELECT 1") == (2 if checks else 0)
    with connection.cursor() as cursor:
        cursor.execute("ALTER SYSTEM RESET log_statement")
        cursor.execute("ALTER SYSTEM RESET log_connections")
        cursor.execute("SELECT pg_reload_conf()")


def test_debug_keeps_the_statements_of_the_present_message_only(settings: Any) -> None:
    settings.DEBUG = True
    seen: list[list[bool]] = []

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT 'message {len(seen)}'")
        log = str(connection.queries)
        seen.append([f"'message {number}'" in log for number in range(2)])

    with (
        txmsg(BROKERS=APART),
        declared(handler) as stage,
        alone(stage) as thread,
    ):
        put(stage.destination)
        wait_until(lambda: thread.handled == 1)
        put(stage.destination)
        wait_until(lambda: thread.handled == 2)
    assert seen == [[True, False], [False, True]]


def test_a_stage_without_a_database_stays_without_one() -> None:
    with (
        txmsg(BROKERS=APART),
        declared(lambda message: None, transaction="broker_only") as stage,
        alone(stage) as thread,
    ):
        wait_until(lambda: not backends())
        for _ in range(5):
            put(stage.destination)
        wait_until(lambda: thread.handled == 5)
        assert not backends()
