"""`outbox_session()` gives code outside a request the same transaction and session that
a request has."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.test import override_settings

from django_txmsg import outbox_session, send_message
from django_txmsg.errors import (
    BlockLeftOpen,
    SessionError,
    SwallowedDatabaseError,
)
from django_txmsg.http_outbox import database_identity
from django_txmsg.http_outbox.session import OutboxSession
from django_txmsg.models import OutboxMessage, QueueMessage
from tests.app.models import Order

from .conftest import txmsg

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def settings_in_force() -> Iterator[None]:
    with override_settings(TXMSG=txmsg()):
        yield


def send_two() -> None:
    send_message("http.orders", {"part": "pay"})
    send_message("http.orders", {"part": "ship"})


def test_a_session_is_used_once() -> None:
    session = OutboxSession()
    with pytest.raises(SessionError, match="not begun"):
        session.commit()
    session.begin()
    with pytest.raises(SessionError, match="begun already"):
        session.begin()
    session.commit()
    assert session.committed
    for late in (session.commit, session.rollback, session.begin):
        with pytest.raises(SessionError):
            late()
    assert not connection.in_atomic_block


def test_an_inner_session_joins_the_outer_one() -> None:
    with outbox_session() as outer:
        send_two()
        with outbox_session() as inner:
            assert inner is outer
            send_two()
        with suppress(RuntimeError), outbox_session():
            send_two()
            raise RuntimeError
    assert OutboxMessage.objects.filter(session_id=outer.id).count() == 4
    assert QueueMessage.objects.using("other").count() == 1


def place(number: str) -> None:
    with transaction.atomic():
        Order.objects.create(number=number)
        send_message("http.orders", {"number": number})


@pytest.mark.postgresql
def test_a_control_message_names_the_transaction_of_its_session() -> None:
    """Another thread runs in a copy of the session's context, and stores a message in
    its own transaction. The control message names the session's transaction."""

    def elsewhere() -> None:
        place("elsewhere")
        connections.close_all()

    with outbox_session():
        send_two()
        thread = threading.Thread(target=copy_context().run, args=[elsewhere])
        thread.start()
        thread.join(60)
        own = database_identity.transaction_id(connection)
    (control,) = QueueMessage.objects.using("other").all()
    assert control.headers["txmsg-transaction"] == own
    assert OutboxMessage.objects.count() == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_in_a_session_commits_by_itself() -> None:
    """A process forks inside a session whose transaction has not begun on the server.
    The child's message is committed in the child's own transaction."""
    connections.close_all()
    with outbox_session() as session:
        child = multiprocessing.get_context("fork").Process(
            target=place, args=("child",)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        send_message("http.orders", {"number": "parent"})
        transaction.on_commit(lambda: place("hook"))
    numbers = Order.objects.order_by("pk").values_list("number", flat=True)
    assert list(numbers) == ["child", "hook"]
    stored = OutboxMessage.objects.values_list("session_id", flat=True)
    assert sorted(map(bool, stored)) == [False, False, True]
    assert session.id in stored


def test_a_swallowed_error_fails_the_session() -> None:
    Order.objects.create(number="1")
    with pytest.raises(SwallowedDatabaseError), outbox_session():  # noqa: PT012
        send_two()
        with suppress(IntegrityError):
            Order.objects.create(number="1")
    assert not OutboxMessage.objects.exists()
    # One that was kept to an inner block is none, and an explicit rollback is obeyed.
    with outbox_session():
        with pytest.raises(IntegrityError), transaction.atomic():
            Order.objects.create(number="1")
        send_two()
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()


def test_two_databases_have_two_sessions() -> None:
    with outbox_session():
        send_two()
        with suppress(RuntimeError), outbox_session(using="other"):
            Order.objects.using("other").create(number="1")
            send_two()
            raise RuntimeError
    assert OutboxMessage.objects.count() == 2
    assert not OutboxMessage.objects.using("other").exists()
    assert not Order.objects.using("other").exists()


@pytest.mark.parametrize("savepoint", [True, False])
@pytest.mark.parametrize("work", [send_two, lambda: None])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_block_left_open_rolls_the_session_back(
    heard, error, work, savepoint
) -> None:
    """Otherwise the end of the session would only end that block. The transaction would
    stay open, and its connection's end would roll it back."""
    with pytest.raises(error or BlockLeftOpen), outbox_session() as session:  # noqa: PT012
        transaction.atomic(savepoint=savepoint).__enter__()
        work()
        if error:
            raise error
    assert not connection.in_atomic_block
    assert not session.committed
    assert heard["sent"] == []
    assert [one["outcome"] for one in heard["ended"]] == [
        "rolled_back" if error else "failed"
    ]
    connection.close()
    assert not OutboxMessage.objects.exists()


def test_the_drivers_connection_is_in_the_transaction_once_it_is_ensured() -> None:
    with outbox_session():
        connection.ensure_connection()
        connection.connection.cursor().execute(
            "INSERT INTO app_order (number, total, note) VALUES ('1', 0, '')"
        )
        transaction.set_rollback(True)
    assert not Order.objects.exists()


@pytest.mark.parametrize("commits", [False, True])
def test_a_session_in_a_transaction_begun_by_hand_is_part_of_it(heard, commits) -> None:
    transaction.set_autocommit(False)
    try:
        Order.objects.create(number="1")  # SQLite begins the transaction here
        with outbox_session() as session:
            send_two()
        (transaction.commit if commits else transaction.rollback)()
    finally:
        transaction.set_autocommit(True)
    assert not session.committed
    assert [one["outcome"] for one in heard["ended"]] == ["joined"]
    assert OutboxMessage.objects.count() == 2 * commits
