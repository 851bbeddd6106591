"""LISTEN and NOTIFY wake waiting processes, but no message depends on them.

Here the processes poll only once in ten minutes. If something happens sooner, a
notification has caused it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, connections, transaction

from django_txmsg import stages
from django_txmsg.checks import check, check_databases
from django_txmsg.envelope.message import Message
from django_txmsg.models import OutboxMessage, StageState
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying import dispatcher, listener
from django_txmsg.runtime import (
    database_health,
    liveness,
    notifications,
    thread_group,
)
from django_txmsg.runtime.per_process import PerProcess
from django_txmsg.sending.outbox import send_message
from tests import services
from tests.app.models import Effect
from tests.faults import ManageProcess, broken_log, wait_until
from tests.integration.test_database_away import ReadOnly
from tests.running import IMPATIENT, committing, put, txmsg

pytestmark = [committing, pytest.mark.postgresql]

Manage = Callable[..., ManageProcess]

#: Polls so seldom that only a notification can wake a process.
PATIENT: dict[str, Any] = {
    **IMPATIENT,
    "BROKERS": {"default": {"URL": "database://?poll=600"}},
    "RELAY": {"POLL_INTERVAL": 600.0},
}


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """End the threads that a test has started, so that their connections do not outlive
    it."""
    yield
    dispatcher.stop_dispatchers(30)
    notifications.stop_notifiers(30)


def test_error_in_the_notifiers_thread_does_not_stop_later_notifications(
    django_db_blocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    notifications.notify("default", {"warms up"})
    notifications.stop_notifiers(30)
    with django_db_blocker.block():
        notifications._notifier("default").add({"lost"})
        wait_until(lambda: "notifying in database 'default' failed" in caplog.text)
    with connection.cursor() as cursor:
        cursor.execute("LISTEN django_txmsg")
    notifications.notify("default", {"queue after"})
    wait_until(lambda: "queue after" in listener._received(connection, 0.2))
    with connection.cursor() as cursor:
        cursor.execute("UNLISTEN *")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_notifications_go_on_after_the_log_has_failed_too(
    django_db_blocker: Any,
) -> None:
    notifications.notify("default", {"warms up"})
    notifications.stop_notifiers(30)
    with django_db_blocker.block(), broken_log("django_txmsg.notify"):
        notifications._notifier("default").add({"lost"})
        wait_until(lambda: not _notifying())
    notifications.notify("default", {"queue after"})
    assert _notifying()


def _notifying() -> bool:
    """Return whether a thread of this process sends notifications."""
    return any(one.name == "txmsg-notify-default" for one in threading.enumerate())


def hook() -> None:
    """Declare a stage in the worker process. Let the process poll as rarely as the test
    requires."""
    listener.LOOK = float(os.environ["LOOK"])
    listener.PROVED = 600.0
    liveness.CALM = 0.0

    def effect(message: Message) -> None:
        Effect.objects.create(name="woken", message_id=str(message.id))

    stages.stage("tests.woken")(effect)
    ready = threading.Thread(target=_say_when_it_listens, daemon=True)
    ready.start()


def _say_when_it_listens() -> None:
    pause = threading.Event()
    before = False
    while True:
        listening = notifications.has_listener("default")
        if listening != before:
            print("it listens" if listening else "it polls", flush=True)  # noqa: T201 - the test waits for it
        before = listening
        pause.wait(0.02)


@pytest.fixture
def process(manage: Manage) -> Callable[..., ManageProcess]:
    """Return a function that starts a process and waits until it listens."""

    def start(*command: str, look: float = 600.0, **more: Any) -> ManageProcess:
        started = manage(
            *command,
            hook="tests.integration.test_wakeups.hook",
            txmsg={**PATIENT, **more},
            env={"LOOK": str(look)},
        )
        started.wait_for_line("it listens")
        return started

    return start


def store() -> None:
    with transaction.atomic():
        send_message("tests.woken", None)


def woken(process: ManageProcess, count: int) -> None:
    wait_until(
        lambda: Effect.objects.count() == count,
        message=lambda: process.output,
        deadline=60,
    )


def test_a_handler_begins_when_another_process_commits(
    process: Callable[..., ManageProcess],
) -> None:
    run = process("txmsg", "run")
    for mode in ("thread", "off"):  # dispatched here, or by the process's own relay
        with txmsg(DISPATCH_ON_COMMIT=mode):
            store()
            woken(run, 1 if mode == "thread" else 2)
    run.terminate()
    run.succeed()


def test_rows_without_notification_are_found_by_the_query(
    process: Callable[..., ManageProcess],
) -> None:
    """Rows are stored without a notification. The process finds them with its regular
    query."""
    run = process("txmsg", "run", look=0.5)
    with txmsg(NOTIFY=False):
        store()
        woken(run, 1)
        put("tests.woken")
        woken(run, 2)
    run.terminate()
    run.succeed()


def test_after_a_restart_of_the_database_it_listens_again(
    process: Callable[..., ManageProcess], postgres: services.PostgreSQL
) -> None:
    run = process("txmsg", "run")
    connections.close_all()
    postgres.kill()
    run.wait_for_line("it polls")
    postgres.start()
    wait_until(
        lambda: run.output.count("it listens") >= 2,
        message=lambda: run.output,
        deadline=60,
    )
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        store()
        woken(run, 1)
    run.terminate()
    run.succeed()


def test_an_idle_process_asks_less_than_once_a_second(
    process: Callable[..., ManageProcess],
) -> None:
    run = process("txmsg", "run", look=4.0)

    def asked() -> set[Any]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid, query_start FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND query_start > now() - interval '20 seconds'"
            )
            return set(cursor.fetchall())

    seen: set[Any] = set()
    pause = threading.Event()
    began = time.monotonic()
    # It starts, and then there is nothing to do.
    wait_until(lambda: Effect.objects.count() == 0 and time.monotonic() > began + 3)
    seen_at_first = asked()
    for _ in range(100):
        seen |= asked() - seen_at_first
        pause.wait(0.03)
    took = time.monotonic() - began - 3
    assert len(seen) <= 1.5 * took + 5, f"{len(seen)} in {took:.0f} s"
    run.terminate()
    run.succeed()


def test_pausing_a_stage_wakes_its_consumer(
    process: Callable[..., ManageProcess],
) -> None:
    run = process("txmsg", "run")
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        store()
        woken(run, 1)
        StageState.objects.pause("tests.woken")
        taken = QueueMessage.objects.filter(lease_token__isnull=False)
        # It closes its session, and takes nothing.
        wait_until(lambda: not taken.exists())
        StageState.objects.resume("tests.woken")
        store()
        woken(run, 2)
    run.terminate()
    run.succeed()


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the payloads of all notifications, as another client of the server
    receives them."""
    settings = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    payloads: list[str] = []
    with closing(
        psycopg.connect(**{name: settings[name] for name in names}, autocommit=True)
    ) as client:
        client.execute(f"LISTEN {notifications.CHANNEL}")
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                payloads.extend(one.payload for one in client.notifies(timeout=0.1))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield payloads
        finally:
            stop.set()
            thread.join(30)


def test_many_commits_share_a_notification_that_names_all() -> None:
    with listening() as payloads:
        began = time.monotonic()
        for number in range(2000):
            notifications.notify("default", {f"queue {number}"})
        said = {f"queue {number}" for number in range(2000)}

        def told() -> set[str]:
            return {one for payload in payloads for one in payload.split("\n")}

        wait_until(lambda: told() == said or notifications.ALL in told())
        took = time.monotonic() - began
    assert len(payloads) <= took / notifications.GAP + 2


def test_only_a_commit_notifies() -> None:
    with listening() as payloads, txmsg(DISPATCH_ON_COMMIT="off"):
        with transaction.atomic():
            send_message("tests.woken", None)
            transaction.set_rollback(True)
        with transaction.atomic():
            notifications.notify("default", {"queue afterwards"})
            send_message("tests.woken", None)
            assert payloads == []
        wait_until(lambda: len(payloads) >= 1)
        wait_until(lambda: "outbox default" in "\n".join(payloads))
        assert "queue afterwards" in "\n".join(payloads)
    assert OutboxMessage.objects.count() == 1


def test_a_quiet_notifier_gives_its_connection_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications, "_notifier", PerProcess(notifications._Notifier))
    monkeypatch.setattr(thread_group, "IDLE", 0.1)
    for _ in range(2):
        with listening() as payloads:
            notifications.notify("default", {"queue any"})
            wait_until(lambda: payloads)
        wait_until(lambda: not _notifying())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_sends_its_own_notifications() -> None:
    with listening() as payloads:
        notifications.notify("default", {"queue parent"})
        wait_until(lambda: "queue parent" in payloads)
        connection.close()
        child = os.fork()
        if child == 0:  # pragma: no cover - the other process
            signal.alarm(30)
            try:
                notifications.notify("default", {"queue child"})
                notifications.stop_notifiers(20)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        wait_until(lambda: "queue child" in payloads)


@pytest.fixture
def pooled(
    pgbouncer: services.PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Connect the alias `other` to the same database, through a pooler in transaction
    mode."""
    given = {
        **connections.databases["default"],
        "PORT": pgbouncer.port,
        "DISABLE_SERVER_SIDE_CURSORS": True,
    }
    monkeypatch.setitem(connections.databases, "other", given)
    monkeypatch.setattr(listener, "PROOF", 1.0)
    yield "other"
    wait_until(lambda: not _listens())


def _listens() -> bool:
    return any(one.name.startswith("txmsg-listen") for one in threading.enumerate())


def checked() -> list[str]:
    """Run the database checks in another thread, and return the ids of the problems
    that they report."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(str(one.id) for one in check_databases(databases=["default"]))
        finally:
            connections.close_all()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    return found


def test_behind_a_pooler_a_warning_is_logged_and_all_threads_poll(
    pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    with txmsg(LISTEN_DATABASE=pooled):
        with listener.listening({"default"}):
            wait_until(lambda: "no notification arrived" in caplog.text)
            assert not notifications.has_listener("default")
        assert checked() == ["txmsg.W030"]


def test_check_leaves_the_session_of_its_caller_as_it_was() -> None:
    with txmsg(), connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE mine ()")
        try:
            assert check_databases(databases=["default"]) == []
            cursor.execute("SELECT pg_listening_channels()")
            assert cursor.fetchall() == []
        finally:
            cursor.execute("DROP TABLE mine")


def test_no_advice_names_a_setting_that_does_not_help(
    pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """LISTEN_DATABASE serves only the outbox's database. Here, the other database is
    behind the pooler."""
    stop = threading.Event()
    thread = threading.Thread(target=listener.Listener(pooled).run, args=(stop,))
    with txmsg():
        thread.start()
        wait_until(lambda: "no notification arrived" in caplog.text)
        stop.set()
        thread.join(60)
    assert "serves only the outbox's database" in caplog.text
    assert "connects directly" not in caplog.text


def test_a_listener_that_received_nothing_once_tries_again_soon(
    pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener does not receive the notification that tests its connection. On a
    slow machine, the notification may only be late. So the listener soon tries
    again."""
    with txmsg(LISTEN_DATABASE=pooled), listener.listening({"default"}):
        wait_until(lambda: "no notification arrived" in caplog.text)
        connections.databases[pooled]["PORT"] = connection.settings_dict["PORT"]
        wait_until(lambda: notifications.has_listener("default"))


def test_listener_of_a_former_primary_falls_back_to_polling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections reach another server, while the old server still answers the
    listener. The listener notices that notifications do not arrive, and the process
    polls."""
    given = connections.databases["default"]
    elsewhere = given["NAME"].replace("test_", "elsewhere_", 1) + "_x"
    monkeypatch.setattr(notifications, "_notifier", PerProcess(notifications._Notifier))
    monkeypatch.setattr(listener, "PROVE_EVERY", 0.1)
    monkeypatch.setattr(listener, "PROVED", 2.0)
    monkeypatch.setattr(listener, "LOOK", 0.2)
    monkeypatch.setattr(thread_group, "IDLE", 0.05)
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{elsewhere}"')
    try:
        with txmsg(), listener.listening({"default"}):
            wait_until(lambda: notifications.has_listener("default"))
            with monkeypatch.context() as moved:
                # Whoever connects from now on is led to another server.
                moved.setitem(connections.databases, "default",
                              {**given, "NAME": elsewhere})  # fmt: skip
                wait_until(lambda: "no notification arrived" in caplog.text)
                wait_until(lambda: not notifications.has_listener("default"))
        wait_until(lambda: not _listens())
        wait_until(lambda: not _notifying())
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f'DROP DATABASE "{elsewhere}" WITH (FORCE)')


def test_a_read_only_server_is_not_called_a_pooler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the server is read-only, this process sends no notifications, so the
    listener does not receive its own."""
    monkeypatch.setattr(listener, "PROVE_EVERY", 0.1)
    monkeypatch.setattr(listener, "PROVED", 2.0)
    monkeypatch.setattr(listener, "LOOK", 0.2)
    with txmsg(), listener.listening({"default"}):
        wait_until(lambda: notifications.has_listener("default"))
        with ReadOnly():
            with pytest.raises(DatabaseError) as refused, transaction.atomic():
                Effect.objects.create(name="no")
            assert database_health.note("default", refused.value)
            wait_until(lambda: not notifications.has_listener("default"))
        wait_until(lambda: notifications.has_listener("default"))
    assert "no notification arrived" not in caplog.text


def test_foreign_notifications_are_ignored() -> None:
    with txmsg(), listener.listening({"default"}):
        wait_until(lambda: notifications.has_listener("default"))
        with connection.cursor() as cursor:
            for payload in ("+x", "+nan", "+-1e9", "", "\n\n", "*", "queue '; --"):
                cursor.execute("SELECT pg_notify(%s, %s)", ["django_txmsg", payload])
        woken = notifications.Wakeup("default", "queue rung")
        woken.due()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify('django_txmsg', 'queue rung')")
        assert woken.wait(30)
        assert notifications.has_listener("default")


def test_a_server_that_binds_parameters_is_listened_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = connections.databases["default"]
    options = {**given["OPTIONS"], "server_side_binding": True}
    monkeypatch.setitem(connections.databases, "default", {**given, "OPTIONS": options})
    with txmsg(), listener.listening({"default"}):
        wait_until(lambda: notifications.has_listener("default"))
    wait_until(lambda: not _listens())


def test_with_a_direct_way_it_listens() -> None:
    with txmsg():
        with listener.listening({"default"}):
            wait_until(lambda: notifications.has_listener("default"))
        wait_until(lambda: not notifications.has_listener("default"))


def test_an_alias_that_is_not_there_is_an_error() -> None:
    with txmsg(LISTEN_DATABASE="nowhere"):
        assert "txmsg.E030" in {one.id for one in check()}
