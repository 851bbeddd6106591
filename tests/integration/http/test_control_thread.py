"""Nothing blocks the receiver of control messages, and it ends when the process
stops."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.backends.signals import connection_created
from django.test import override_settings

from django_txmsg import outbox_session, send_message
from django_txmsg.brokers import get_broker
from django_txmsg.http_outbox import control_thread
from django_txmsg.http_outbox.control_message import ControlMessage
from django_txmsg.models import OutboxMessage, QueueMessage
from django_txmsg.runtime.breaker import Breaker
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from tests.faults import ManageProcess, wait_until

from .conftest import txmsg
from .server import SETTINGS

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Sessions that keep the thread busy; it takes no more than three at a time.
OTHERS = 7


@pytest.fixture(autouse=True)
def settings_in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(control_thread, "PREFETCH", 3)
    with override_settings(TXMSG=txmsg(MAX_COMMIT_DURATION=60)):
        yield


@contextmanager
def serving() -> Iterator[Callable[[], None]]:
    """Run the thread that receives control messages. The returned function stops it,
    and checks that it ends."""
    stopping = threading.Event()
    serving_thread = control_thread.ControlThread(
        "default", stopping, Breaker("default", 1.0), Activity()
    )
    thread = ThreadGroup(stopping.set).add("txmsg-control", serving_thread.run)
    thread.start()

    def stop() -> None:
        stopping.set()
        thread.join(10)
        assert not thread.is_alive()

    try:
        yield stop
    finally:
        stop()


def announce_what_never_ends(count: int) -> None:
    """Send control messages of sessions whose outcome cannot be found out."""
    with get_broker().open() as session:
        session.send(
            [
                ControlMessage(
                    str(uuid.uuid4()), uuid.uuid4(), "default", "delay"
                ).outgoing()
                for _ in range(count)
            ]
        )


def one_that_needs_help_gets_it() -> None:
    with outbox_session() as session:
        send_message("http.orders", {"part": "pay"})
    rows = OutboxMessage.objects.filter(session_id=session.id)
    with serving():
        wait_until(lambda: not rows.filter(dispatched_at=None).exists())


def test_sessions_with_delayed_messages_keep_no_other_waiting() -> None:
    for _ in range(OTHERS):
        with outbox_session():
            send_message("http.orders", {}, delay=dt.timedelta(seconds=50))
    one_that_needs_help_gets_it()


def test_sessions_that_do_not_end_keep_no_other_waiting(monkeypatch) -> None:
    monkeypatch.setattr(control_thread, "HOLD", 0.1, raising=False)
    announce_what_never_ends(OTHERS)
    one_that_needs_help_gets_it()
    # And not one of them was lost on the way to the queue's end.
    queue = QueueMessage.objects.using("other").filter(queue="web.txmsg.control")
    assert queue.count() == OTHERS


def test_it_stops_while_several_looks_are_due(monkeypatch) -> None:
    """Each check takes longer than the interval between checks, so several checks are
    always due. The thread still stops when requested."""
    monkeypatch.setattr(control_thread, "PREFETCH", 50)
    looked = threading.Event()

    def slowly(execute: Any, *arguments: Any) -> Any:
        looked.set()
        threading.Event().wait(0.06)
        return execute(*arguments)

    def slow_down(connection: Any, **_: Any) -> None:
        if threading.current_thread().name.startswith("txmsg-control"):
            connection.execute_wrappers.append(slowly)

    announce_what_never_ends(20)
    connection_created.connect(slow_down)
    try:
        http = txmsg(MAX_COMMIT_DURATION=60, COMMIT_DELAY_INCREMENT=0.01)
        with override_settings(TXMSG=http), serving() as stop:
            assert looked.wait(10)
            threading.Event().wait(2.0)
            stop()
    finally:
        connection_created.disconnect(slow_down)


def test_an_outdated_control_message_is_dropped(monkeypatch) -> None:
    """A control message is older than a day, and its session's outcome is still
    unknown. The receiver drops the message instead of sending it again."""
    monkeypatch.setattr(control_thread, "HOLD", 0.0, raising=False)
    long_ago = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=2)
    old = ControlMessage(
        str(uuid.uuid4()), uuid.uuid4(), "default", "delay", sent_at=long_ago
    )
    with get_broker().open() as session:
        session.send([old.outgoing()])
    with serving():
        wait_until(lambda: not QueueMessage.objects.using("other").exists())


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Open a server socket that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        listener.settimeout(30)
        yield listener


def nobody() -> int:
    """Return a port on which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.mark.parametrize("place", ["holding", "silent", "refused", "dispatching"])
def test_sigterm_ends_consume_wherever_it_waits(place, manage, silent) -> None:
    port = nobody() if place == "refused" else silent.getsockname()[1]
    server = {"URL": f"stomp://127.0.0.1:{port}?connect_timeout=3"}
    embedded = {"URL": "database://other?poll=0.02"}
    brokers = {
        "holding": {"default": embedded},
        "dispatching": {"default": embedded, "second": server},
    }.get(place, {"default": server})
    told = {**txmsg(MAX_COMMIT_DURATION=600), "BROKERS": brokers}
    with override_settings(TXMSG=told):
        if place == "holding":
            announce_what_never_ends(20)
        if place == "dispatching":
            with outbox_session():
                send_message("http.orders", {}, broker="second")
    consumer: ManageProcess = manage(
        "consume", txmsg=told, env={"DJANGO_SETTINGS_MODULE": SETTINGS}
    )
    with contextlib.ExitStack() as stack:
        if place == "holding":
            taken = QueueMessage.objects.using("other").exclude(lease_token=None)
            wait_until(taken.exists)
        elif place == "refused":
            consumer.wait_for_line("cannot be used")
        else:
            stack.enter_context(silent.accept()[0])

        consumer.terminate()
        consumer.succeed(deadline=20)
