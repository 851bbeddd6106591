"""One statement counts the attempt and begins the stage's transaction."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from psycopg import IsolationLevel

from django_txmsg.consuming import inbox, protocol
from django_txmsg.django_internals import begins_early
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import InboxMessage
from tests import services
from tests.app.models import Effect
from tests.integration.test_refused_statements import trigger
from tests.running import committing, declared, put, step, thread_of

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@pytest.mark.postgresql
def test_the_count_of_the_attempt_is_kept_when_its_transaction_is_not() -> None:
    """One round trip counts the attempt, commits the count, and begins the transaction
    of the stage's work. If the work rolls back, the count stays."""
    statements: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        if "inboxmessage" in sql:
            statements.append(sql.split()[0])
        return execute(sql, *rest)

    def handler(message: Message) -> None:
        Effect.objects.create(name="done", message_id=str(message.id))
        with connections["default"].copy().cursor() as other:
            other.execute(
                "SELECT attempts, processed_at FROM django_txmsg_inboxmessage"
            )
            assert other.fetchall() == [(message.delivery_attempt, None)]
            other.connection.close()
        if message.delivery_attempt == 1:
            raise ValueError

    policy = RedeliveryPolicy(initial_delay=0.0, mode="blocking")
    with declared(handler, redelivery=policy) as stage:
        put(stage.destination)
        with connection.execute_wrapper(note):
            step(stage, parked=False)
        assert not connection.in_atomic_block
        assert connection.get_autocommit()
    # The second attempt is counted by its own statement, and then takes the row.
    assert statements[0] == "BEGIN;"
    assert statements[-2:] == ["UPDATE", "UPDATE"]
    assert InboxMessage.objects.get().attempts == 2
    assert Effect.objects.count() == 1


@pytest.mark.postgresql
@pytest.mark.parametrize("own", [None, "read committed"])
def test_a_stage_without_a_level_has_its_connections_level(own: Any) -> None:
    """OPTIONS sets the connection's isolation level. A stage that declares no level of
    its own processes every message at this level."""
    seen: list[str] = []

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            seen.append(cursor.fetchone()[0])

    options = connection.settings_dict["OPTIONS"]
    connection.close()
    options["isolation_level"] = IsolationLevel.SERIALIZABLE
    try:
        with declared(handler, isolation=own) as stage:
            for _ in range(3):
                put(stage.destination)
            step(stage, times=3, parked=False)
    finally:
        del options["isolation_level"]
        connection.close()
    assert seen == [own or "serializable"] * 3


@pytest.mark.postgresql
def test_rows_are_locked_while_they_are_read_in_chunks() -> None:
    """The driver has not begun the transaction. Nevertheless a cursor of the server
    belongs to the transaction, and need not outlast it: PostgreSQL would refuse that
    for SELECT … FOR UPDATE."""
    for name in "abc":
        Effect.objects.create(name=name, message_id="")
    seen: list[str] = []
    held: list[tuple[bool]] = []

    def handler(message: Message) -> None:
        rows = Effect.objects.select_for_update().order_by("name")
        for one in rows.iterator(chunk_size=2):
            seen.append(one.name)
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT is_holdable FROM pg_cursors WHERE name LIKE '%django%'"
                )
                held.extend(cursor.fetchall())
        [own] = InboxMessage.objects.iterator()
        assert own.first_received_at.utcoffset() is not None

    with declared(handler, redelivery=RedeliveryPolicy(max_redeliveries=0)) as stage:
        put(stage.destination)
        step(stage, parked=False)
    assert InboxMessage.objects.get().state == "processed"
    assert seen == ["a", "b", "c"]
    assert held == [(False,)] * 3
    # Outside of a transaction, a cursor must outlast its statement.
    assert len(list(Effect.objects.iterator(chunk_size=2))) == 3


@pytest.mark.postgresql
def test_asking_whether_it_can_begin_early_does_not_connect() -> None:
    connection.close()
    assert not begins_early(connection)
    assert connection.connection is None


@pytest.mark.postgresql
def test_a_locks_time_out_leaves_no_transaction_behind() -> None:
    message_id = uuid.uuid4()
    other = connections["default"].copy()
    with declared(lambda _: None) as stage:
        put(stage.destination, message_id=message_id)
        with connection.cursor() as cursor, other.cursor() as elsewhere:
            elsewhere.execute("BEGIN")
            elsewhere.execute(
                "INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,"
                " correlation_id, service, deliveries, attempts, last_error)"
                " VALUES (%s, %s, '', '', '', 1, 1, '')",
                [stage.name, message_id],
            )
            cursor.execute("SET lock_timeout = '20ms'")
            thread = thread_of(stage)
            session = thread._open()
            assert session is not None
            delivery = session.receive(30)
            assert delivery is not None
            try:
                with pytest.raises(OperationalError, match="lock timeout"):
                    inbox.process(thread._arrival(session, delivery))
                assert not connection.in_atomic_block
                with transaction.atomic():
                    Effect.objects.create(name="next", message_id="")
            finally:
                cursor.execute("SET lock_timeout = 0")
                elsewhere.execute("ROLLBACK")
                session.close()
        other.close()
        step(stage, parked=False)
    assert InboxMessage.objects.get().state == "processed"
    assert Effect.objects.get().name == "next"


@pytest.mark.postgresql
def test_an_attempt_is_counted_once_behind_a_pooler(
    pgbouncer: services.PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pooler uses two sessions of the server in turn. The statement's first half
    succeeds, and its second half is refused."""
    monkeypatch.setitem(connection.settings_dict, "PORT", pgbouncer.port)
    connection.close()
    message = Message(id=uuid.uuid4(), destination="tests.pooled", body=None)
    rows = InboxMessage.objects.db_manager("default")
    with trigger("UPDATE", InboxMessage._meta.db_table):
        with closing(connections["default"].copy()) as second, transaction.atomic():
            assert rows.count() == 0
            second.cursor().execute("SELECT 1")
        found = protocol.record(rows, "tests.pooled", message, runs=lambda _: True)
    connection.close()
    assert (found[0].attempt, found[1]) == (1, False)
