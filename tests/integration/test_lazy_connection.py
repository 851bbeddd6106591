"""A stage that runs no query costs the database nothing.

On PostgreSQL, the tests count the statements that the server receives. On both
databases, they check whether Django opened a connection.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_txmsg import signals
from django_txmsg.consuming.protocol import StageTransaction
from django_txmsg.envelope.message import Message
from django_txmsg.sending.outbox import send_message
from django_txmsg.stages import Stage, TransactionDefinition
from tests import services
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import Handler, committing, declared, put, step, txmsg

pytestmark = committing

MODES = ["best_effort_1pc", "broker_only"]


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Put the broker into the second database, so that only the stage uses the default
    one."""
    with txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}):
        yield


def sends(message: Message) -> None:
    send_message("tests.next", None)


def writes(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


def reads(message: Message) -> None:
    Effect.objects.exists()


class Received:
    """The statements and connections that the server has logged since the start of the
    test."""

    def __init__(self, server: services.PostgreSQL) -> None:
        self._server = server
        with connection.cursor() as cursor:
            cursor.execute("ALTER SYSTEM SET log_statement = 'all'")
            cursor.execute("ALTER SYSTEM SET log_connections = 'on'")
            cursor.execute("SELECT pg_reload_conf()")
        self._begin = self._mark()

    def _mark(self) -> str:
        # Seen in the log: the new settings are in force, and all before is written.
        mark = uuid.uuid4().hex

        def seen() -> bool:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT '{mark}'")
            return mark in self._server.log()

        wait_until(seen)
        return mark

    def statements(self) -> list[str]:
        """Return the statements since the last call. A new connection counts as the
        statement CONNECT."""
        end = self._mark()
        lines = self._server.log().rpartition(self._begin)[2].partition(end)[0]
        found = re.findall(
            r"(connection authorized: .*|(?:statement|execute [^:]*): *(.*))", lines
        )
        return [words or "CONNECT" for _, words in found][:-1]


@pytest.fixture
def received(postgres: services.PostgreSQL) -> Iterator[Received]:
    """The statements that the server of the default database receives."""
    yield Received(postgres)
    with connection.cursor() as cursor:
        cursor.execute("ALTER SYSTEM RESET log_statement")
        cursor.execute("ALTER SYSTEM RESET log_connections")
        cursor.execute("SELECT pg_reload_conf()")


@pytest.mark.postgresql
@pytest.mark.parametrize("mode", MODES)
def test_a_stage_without_a_query_sends_nothing(mode: Any, received: Received) -> None:
    with declared(sends, transaction=mode) as stage:
        put(stage.destination)
        put(stage.destination)
        connections["default"].close()
        step(stage, parked=False)
        assert connections["default"].connection is None
        with connection.cursor() as cursor:  # a connection that is there already
            cursor.execute("SELECT 'between'")
        step(stage, parked=False)
    seen = received.statements()
    assert [one for one in seen if one != "CONNECT"][-1] == "SELECT 'between'"
    assert seen.count("CONNECT") == 1
    assert not [one for one in seen if re.match("BEGIN|COMMIT|ROLLBACK|SAVE", one)]


@pytest.mark.postgresql
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("act", [writes, reads])
def test_one_statement_costs_begin_statement_commit(
    act: Handler, fresh: bool, received: Received
) -> None:
    with declared(act, transaction="best_effort_1pc", isolation="serializable") as s:
        put(s.destination)
        if fresh:
            connections["default"].close()
        step(s, parked=False)
    seen = [one for one in received.statements() if "app_effect" not in one]
    assert seen.count("CONNECT") == int(fresh)
    assert seen[-3:] == [
        "BEGIN",
        "SET TRANSACTION ISOLATION LEVEL serializable",
        "COMMIT",
    ]


@pytest.mark.parametrize(
    ("mode", "act", "used"),
    [(mode, sends, False) for mode in MODES] + [("best_effort_1pc", reads, True)],
)
def test_the_log_says_whether_the_connection_was_used(
    mode: Any, act: Handler, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg")
    told: list[bool] = []

    def listen(employed: bool, **facts: Any) -> None:
        told.append(employed)

    signals.message_processed.connect(listen)
    try:
        with declared(act, transaction=mode) as stage:
            put(stage.destination)
            connections["default"].close()
            step(stage, parked=False)
            assert (connections["default"].connection is not None) == used
    finally:
        signals.message_processed.disconnect(listen)
    assert told == [used]
    assert ("db=used" if used else "db=unused") in caplog.text


@pytest.mark.parametrize("isolation", [None, "serializable"])
def test_an_atomic_of_the_handler_is_a_savepoint_of_a_lazy_transaction(
    isolation: str | None,
) -> None:
    def handler(message: Message) -> None:
        try:
            with transaction.atomic():
                writes(message)
                raise KeyError
        except KeyError:
            pass
        with transaction.atomic():
            writes(message)
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(handler, transaction="best_effort_1pc", isolation=isolation) as stage:
        put(stage.destination)
        connections["default"].close()
        step(stage, parked=False)
        assert not Effect.objects.exists()
        connections["default"].close()
        step(stage)
    assert Effect.objects.count() == 1
    assert not connections["default"].in_atomic_block


@pytest.mark.postgresql
def test_isolation_level_ends_with_the_stage() -> None:
    levels: list[str] = []

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    with declared(handler, isolation="repeatable read") as stage:
        put(stage.destination)
        step(stage, parked=False)
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])
    assert levels == ["repeatable read", "read committed"]


def serializable(stage: Stage) -> TransactionDefinition | None:
    """Return a transaction definition with the isolation level "serializable", or None
    for stages that must have the default definition."""
    if stage.destination.startswith("tests.default"):
        return None
    return TransactionDefinition(using="default", isolation="serializable")


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("name", "own", "level"),
    [
        ("tests.hook", None, "serializable"),
        ("tests.hook.own", "repeatable read", "repeatable read"),
        ("tests.default", None, "read committed"),
    ],
)
def test_a_function_of_the_project_defines_the_transactions_of_all_stages(
    name: str, own: str | None, level: str
) -> None:
    levels: list[str] = []

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])

    path = "tests.integration.test_lazy_connection.serializable"
    with (
        txmsg(TRANSACTION_DEFINITION=path),
        declared(handler, name, isolation=own) as stage,
    ):
        put(stage.destination)
        step(stage, parked=False)
    assert levels == [level]


@pytest.mark.parametrize("outer", [True, False])
def test_hooks_of_an_unused_transaction_run_after_success_only(outer: bool) -> None:
    """A transaction runs no query. Its hooks run if it succeeds, but not if it fails. A
    failing robust hook does not affect the other hooks."""
    ran: list[str] = []

    def broken() -> None:
        raise RuntimeError

    connections["default"].close()
    with StageTransaction(TransactionDefinition()) as block:
        transaction.on_commit(broken, robust=True)
        transaction.on_commit(lambda: ran.append("after"))
        assert ran == []
    assert (block.committed, block.employed) == (True, False)
    assert ran == ["after"]
    with pytest.raises(KeyError), StageTransaction(TransactionDefinition()):  # noqa: PT012
        transaction.on_commit(lambda: ran.append("never"))
        raise KeyError
    assert ran == ["after"]
    assert connections["default"].connection is None
    Effect.objects.create(name="autocommit again", message_id="")
    assert not connections["default"].in_atomic_block


def test_failed_connect_does_not_change_the_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler's first query cannot connect, and the handler tries again. Its later
    queries run in the stage's transaction, not in autocommit mode."""
    connections["default"].close()
    real = type(connections["default"]).get_new_connection
    tries: list[int] = []

    def fails_once(wrapper: Any, parameters: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OperationalError("no route")
        return real(wrapper, parameters)

    monkeypatch.setattr(type(connections["default"]), "get_new_connection", fails_once)
    with pytest.raises(KeyError), StageTransaction(TransactionDefinition()):  # noqa: PT012
        with pytest.raises(OperationalError):
            Effect.objects.exists()
        Effect.objects.create(name="second", message_id="")
        raise KeyError
    assert not Effect.objects.exists()
