"""Plain messages of a session or a stage wait for one INSERT before the commit."""

from __future__ import annotations

import contextvars
import datetime as dt
import threading
import uuid

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_txmsg.errors import DuplicateMessage
from django_txmsg.models import OutboxMessage
from django_txmsg.sending import outbox
from django_txmsg.sending.outbox import send_message, send_messages
from django_txmsg.sessions.session import outbox_session
from tests.running import committing

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def bodies() -> list[bytes]:
    """Return what is stored, in the order of its storing."""
    rows = OutboxMessage.objects.order_by("id").values_list("body", flat=True)
    return [bytes(body) for body in rows]


def inserts(queries: CaptureQueriesContext) -> int:
    """Return how many statements have stored messages."""
    table = f"INSERT INTO {OutboxMessage._meta.db_table}"
    return sum(table in query["sql"] for query in queries.captured_queries)


def test_messages_of_a_session_share_a_statement_and_keep_their_order() -> None:
    with CaptureQueriesContext(connection) as queries, outbox_session() as session:
        sent = [send_message("tests.q", number) for number in range(5)]
        assert session.stored == 5
        assert not OutboxMessage.objects.exists()

    assert inserts(queries) == 1
    assert bodies() == [b"0", b"1", b"2", b"3", b"4"]
    stored = OutboxMessage.objects.order_by("id").values_list("message_id", flat=True)
    assert list(stored) == [message.id for message in sent]


def test_what_a_savepoint_rolls_back_is_never_inserted() -> None:
    with outbox_session():
        send_message("tests.q", "outer")
        with transaction.atomic():
            send_message("tests.q", "inner")
            with transaction.atomic():
                send_message("tests.q", "released, and rolled back with the outer one")
            transaction.set_rollback(True)
        with transaction.atomic():
            send_message("tests.q", "kept")

    assert bodies() == [b'"outer"', b'"kept"']


def test_a_session_that_rolls_back_stores_nothing() -> None:
    with outbox_session():
        send_message("tests.q", 1)
        transaction.set_rollback(True)

    assert bodies() == []


def test_many_are_inserted_on_the_way_and_roll_back_with_their_savepoint() -> None:
    """Memory is bounded, and what an outer savepoint gathered outlives the inner."""
    with outbox_session():
        send_message("tests.q", "outer")
        with transaction.atomic():
            for number in range(outbox.MAX_GATHERED + 1):
                send_message("tests.q", number)
            assert OutboxMessage.objects.count() == outbox.MAX_GATHERED
            transaction.set_rollback(True)

    assert bodies() == [b'"outer"']


def test_what_counts_from_now_or_in_its_place_is_stored_at_once() -> None:
    with outbox_session():
        send_message("tests.q", "key", key="k")
        send_message("tests.q", "delay", delay=dt.timedelta(seconds=5))
        send_message("tests.q", "expires", expires=dt.timedelta(seconds=5))
        send_message("tests.q", "id", message_id=uuid.uuid4())
        assert OutboxMessage.objects.count() == 4


def test_a_callers_id_is_refused_at_the_second_call() -> None:
    taken = uuid.uuid4()
    with outbox_session():
        send_message("tests.q", 1, message_id=taken)
        with pytest.raises(DuplicateMessage):
            send_message("tests.q", 2, message_id=taken)
        send_messages([{"destination": "tests.q", "body": 3}])

    assert bodies() == [b"1", b"3"]


def test_another_threads_transaction_is_its_own() -> None:
    """A context that is copied to a thread brings the session along, and not its
    connection: what is sent there belongs to the transaction there."""

    def elsewhere() -> None:
        with transaction.atomic():
            send_message("tests.q", "elsewhere")
        connections.close_all()

    with outbox_session():
        send_message("tests.q", "here")
        context = contextvars.copy_context()
        transaction.set_rollback(True)
    thread = threading.Thread(target=context.run, args=(elsewhere,))
    thread.start()
    thread.join(30)

    assert bodies() == [b'"elsewhere"']
