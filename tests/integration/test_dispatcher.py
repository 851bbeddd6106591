"""A process sends some of its messages right after their commit. The relay sends the
others."""

from __future__ import annotations

import datetime as dt
import gc
import logging
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import DurationField, ExpressionWrapper, F
from django.db.models.functions import Now

from django_txmsg import signals
from django_txmsg.brokers.amqp import session
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.models import OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying import dispatcher
from django_txmsg.relaying.lane import AFTER_COMMIT_LEASE
from django_txmsg.runtime import breaker, database_health, leases
from django_txmsg.runtime.per_process import PerProcess
from django_txmsg.sending.outbox import send_message
from django_txmsg.testing.profiles import RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests.faults import wait_until
from tests.running import committing, ship, txmsg

pytestmark = committing


@pytest.fixture(autouse=True)
def own_dispatchers() -> Iterator[None]:
    """End the threads that a test has started, so that their connections do not outlive
    it."""
    dispatcher.stop_dispatchers(30)
    yield
    dispatcher.stop_dispatchers(30)


def pending() -> int:
    return OutboxMessage.objects.filter(dispatched_at=None).count()


def send() -> None:
    with transaction.atomic():
        send_message("tests.q", 1)


def test_thread_dispatches_right_after_the_commit() -> None:
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        send()
        wait_until(lambda: not pending())
        for _ in range(20):
            send()
        wait_until(lambda: not pending())
    assert QueueMessage.objects.count() == 21


def test_a_row_follows_soon_when_another_process_has_sent_the_one_before() -> None:
    """Another process has claimed the first row of the key, and no relay runs. The
    dispatcher of the second row checks repeatedly until the first row is dispatched."""
    with txmsg(DISPATCH_ON_COMMIT="off"), transaction.atomic():
        send_message("tests.q", 1, key="hot")
    token = uuid.uuid4()
    (first,) = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=1
    )
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with transaction.atomic():
            send_message("tests.q", 2, key="hot")
        held = dispatcher._dispatcher("default", "default")
        wait_until(lambda: held._again)
        assert pending() == 2
        OutboxMessage.objects.mark_dispatched([first.id], token)
        wait_until(lambda: not pending(), deadline=5)
    assert QueueMessage.objects.count() == 1


def test_row_takes_along_unsent_earlier_rows_of_its_key() -> None:
    with txmsg(DISPATCH_ON_COMMIT="off"), transaction.atomic():
        send_message("tests.q", 1, key="hot")
        send_message("tests.q", 2, key="another")
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with transaction.atomic():
            send_message("tests.q", 3, key="hot")
        wait_until(lambda: pending() == 1, deadline=5)
    bodies = QueueMessage.objects.order_by("id").values_list("body", flat=True)
    assert [bytes(one) for one in bodies] == [b"1", b"3"]


def test_rows_that_are_not_due_or_in_other_hands_are_not_tried_again() -> None:
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with transaction.atomic():
            send_message("tests.q", 1, key="later", delay=dt.timedelta(hours=1))
            send_message("tests.q", 2, key="now")
        wait_until(lambda: pending() == 1)
        held = dispatcher._dispatcher("default", "default")
        send()
        wait_until(lambda: pending() == 1)
        assert not held._again


def test_inline_before_the_commit_returns() -> None:
    with txmsg(DISPATCH_ON_COMMIT="inline"):
        with transaction.atomic():
            send_message("tests.q", 1)
            assert not QueueMessage.objects.exists()
        assert QueueMessage.objects.count() == 1
    assert not pending()


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_rows_of_a_killed_process_are_soon_free(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay claims rows for a minute here. A dispatch after a commit claims them for
    only 15 seconds, so the rows of a killed process are soon free."""
    seen: list[float] = []
    send_really = DatabaseSession.send

    def send_and_look(session: Any, batch: Any, **options: Any) -> Any:
        (row,) = OutboxMessage.objects.annotate(
            left=ExpressionWrapper(F("lease_until") - Now(), DurationField())
        )
        seen.append(row.left.total_seconds())
        return send_really(session, batch, **options)

    monkeypatch.setattr(DatabaseSession, "send", send_and_look)
    with txmsg(DISPATCH_ON_COMMIT=mode, RELAY={"LEASE": 60}):
        send()
        wait_until(lambda: not pending())
    assert 0 < seen[0] <= AFTER_COMMIT_LEASE
    with txmsg(DISPATCH_ON_COMMIT="off", RELAY={"LEASE": 60}):
        OutboxMessage.objects.all().delete()
        send()
        assert ship() == 1
    assert 30 < seen[1] <= 60


def test_exception_of_a_receiver_does_not_end_the_thread() -> None:
    def receiver(**_: Any) -> None:
        raise GeneratorExit

    signals.message_dispatched.connect(receiver, weak=False)
    try:
        with txmsg(DISPATCH_ON_COMMIT="thread"):
            for _ in range(2):
                send()
                wait_until(lambda: not pending())
    finally:
        signals.message_dispatched.disconnect(receiver)


def test_exception_of_a_broker_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        raise SystemExit

    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with monkeypatch.context() as patch:
            patch.setattr(DatabaseSession, "send", ended)
            send()
            wait_until(lambda: "the relay will do it" in caplog.text)
        send()
        wait_until(lambda: pending() == 1)


class Refuses(logging.Handler):
    """A handler of the project's own that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.tried = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.tried.set()
        raise OSError("the disk is full")


@pytest.mark.parametrize("error", [RuntimeError, BrokerUnavailable])
def test_a_log_that_raises_does_not_end_the_thread(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **_: Any) -> Any:
        raise error("no broker")

    handler = Refuses()
    logger = logging.getLogger("django_txmsg")
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        logger.addHandler(handler)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(DatabaseSession, "send", fail)
                send()
                assert handler.tried.wait(30)
        finally:
            logger.removeHandler(handler)
        (thread,) = dispatcher._dispatcher.all()
        wait_until(lambda: not thread._breaker.remaining)
        send()
        wait_until(lambda: pending() <= 1)


def test_dispatch_off_leaves_messages_to_the_relay() -> None:
    with txmsg(DISPATCH_ON_COMMIT="off"):
        send()
        assert pending() == 1
        assert ship() == 1


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_dead_broker_fails_no_commit_and_burns_no_attempt(mode: str) -> None:
    dead = {"default": {"URL": "stomp://127.0.0.1:1"}}
    with txmsg(DISPATCH_ON_COMMIT=mode, BROKERS=dead):
        send()
        if mode == "thread":
            (one,) = dispatcher._dispatcher.all()
            # The pause itself is short enough to be missed by a loaded machine.
            wait_until(lambda: one._breaker.error)
    row = OutboxMessage.objects.get()
    assert (row.attempts, row.lease_until, row.state) == (0, None, "pending")
    with txmsg():
        assert ship() == 1


def test_rollback_wakes_no_dispatcher() -> None:
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with transaction.atomic():
            send_message("tests.q", 1)
            transaction.set_rollback(True)
        assert not dispatcher._dispatcher.all()


def test_no_thread_dispatches_on_an_in_memory_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database is in-memory SQLite, as in many projects' tests. No thread
    dispatches, because a second connection that writes would fail immediately."""
    connections["other"].ensure_connection()
    name = "file:memorydb_other?mode=memory&cache=shared"
    monkeypatch.setitem(connections["other"].settings_dict, "NAME", name)
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        with transaction.atomic(using="other"):
            send_message("tests.q", 1, using="other")
        assert not dispatcher._dispatcher.all()


def test_without_a_transaction_when_that_is_allowed() -> None:
    with txmsg(DISPATCH_ON_COMMIT="inline", REQUIRE_ATOMIC=False):
        send_message("tests.q", 1)
    assert QueueMessage.objects.count() == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_its_own_thread() -> None:
    """A server forks while one of its threads has the dispatcher's lock. The child
    still dispatches its messages."""
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        send()
        wait_until(lambda: not pending())
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with dispatcher._dispatcher._lock:
                held.set()
                forked.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(30)
        connections.close_all()
        child = os.fork()
        if child == 0:  # pragma: no cover - the other process
            status = 1
            signal.alarm(30)
            try:
                send()
                wait_until(lambda: not pending(), deadline=20)
                status = 0
            finally:
                os._exit(status)
        forked.set()
        holder.join(30)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert QueueMessage.objects.count() == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_multiprocessing_that_ends_at_once_dispatches_first() -> None:
    """A child sends a message and ends immediately. The message is dispatched, although
    forked children run no `atexit` hooks."""
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        connections.close_all()
        child = multiprocessing.get_context("fork").Process(target=send)
        child.start()
        child.join(60)
        assert (child.exitcode, pending()) == (0, 0)
    assert QueueMessage.objects.count() == 1


@pytest.mark.postgresql
def test_a_database_connection_that_ended_meanwhile_costs_no_delay() -> None:
    """All database connections were terminated, and no relay runs. The next message is
    still dispatched after its commit."""
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        send()
        wait_until(lambda: not pending())
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            assert cursor.fetchone()[0] >= 1
        send()
        wait_until(lambda: not pending())
    assert QueueMessage.objects.count() == 2


@pytest.mark.parametrize("broker", ["stomp", "amqp", "embedded"])
def test_a_process_that_ends_and_gets_no_threads_leaves_it_to_the_relay_in_silence(
    broker: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python 3.12 and later start no new threads while the interpreter exits. If the
    dispatch of a message needs a new thread, the relay dispatches the message, and no
    warning is logged."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith("txmsg-dispatch"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    with ScriptedBroker(RABBITMQ) as rabbitmq, caplog.at_level("WARNING"):
        monkeypatch.setattr(leases, "_keeper", PerProcess(leases._begin))
        monkeypatch.setattr(session, "_heart", PerProcess(session._heart._make))
        url = rabbitmq.url if broker == "stomp" else "database://"
        if broker == "amqp":
            url = request.getfixturevalue("rabbitmq_amqp").url()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with txmsg(DISPATCH_ON_COMMIT="thread", BROKERS={"default": {"URL": url}}):
            send()
            dispatcher.stop_dispatchers(30)
        monkeypatch.undo()
        assert not [one for one in caplog.records if "django_txmsg" in one.name]
        row = OutboxMessage.objects.get()
        # The embedded broker needs none: it has left.
        assert (row.state == "dispatched") is (broker == "embedded")
        assert (row.lease_until, row.attempts) == (None, 0)


@pytest.mark.postgresql
def test_without_commits_the_thread_gives_its_connection_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CONN_MAX_AGE = 0 (the default), an idle thread closes its connection, and
    the next commit opens a new one."""
    monkeypatch.setattr(dispatcher, "IDLE", 0.1)
    alone = txmsg(DISPATCH_ON_COMMIT="thread", NOTIFY=False)
    with alone, connection.cursor() as cursor:

        def others() -> int:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_type = %s"
                " AND datname = current_database() AND pid <> pg_backend_pid()",
                ["client backend"],
            )
            return int(cursor.fetchone()[0])

        before = others()
        for _ in range(2):
            send()
            wait_until(lambda: not pending())
            wait_until(lambda: others() <= before)
    assert QueueMessage.objects.count() == 2


def test_without_commits_the_thread_forgets_that_the_broker_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "IDLE", 0.05)
    with (
        ScriptedBroker(RABBITMQ) as rabbitmq,
        txmsg(BROKERS={"default": {"URL": rabbitmq.url}}, DISPATCH_ON_COMMIT="thread"),
    ):
        rabbitmq.stop()
        send()
        wait_until(breaker.outages)
        rabbitmq.restart()
        ship()
        assert not pending()
        assert breaker.outages()
        monkeypatch.setattr(breaker, "QUIET", 0.05)
        wait_until(lambda: not breaker.outages())


def test_a_dispatcher_that_was_stopped_reports_no_outage() -> None:
    gc.collect()  # the breakers of earlier tests
    with (
        ScriptedBroker(RABBITMQ) as rabbitmq,
        txmsg(BROKERS={"default": {"URL": rabbitmq.url}}, DISPATCH_ON_COMMIT="thread"),
    ):
        rabbitmq.stop()
        send()
        stopped = dispatcher._dispatcher("default", "default")  # not garbage
        wait_until(breaker.outages)
        stopped.stop(30)
        assert not breaker.outages()


def test_a_log_that_raises_between_commits_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg.breaker")
    handler = Refuses()
    logger = logging.getLogger("django_txmsg.breaker")
    monkeypatch.setattr(dispatcher, "IDLE", 0.05)
    with (
        ScriptedBroker(RABBITMQ) as rabbitmq,
        txmsg(BROKERS={"default": {"URL": rabbitmq.url}}, DISPATCH_ON_COMMIT="thread"),
    ):
        rabbitmq.stop()
        send()
        wait_until(breaker.outages)
        rabbitmq.restart()
        ship()
        logger.addHandler(handler)
        try:
            monkeypatch.setattr(breaker, "QUIET", 0.05)
            assert handler.tried.wait(30)  # says that the broker works again
        finally:
            logger.removeHandler(handler)
        send()
        wait_until(lambda: not pending())


def test_a_log_that_raises_at_the_end_of_an_outage_of_the_database_ends_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "django_txmsg.breaker")
    handler = Refuses()
    logger = logging.getLogger("django_txmsg.breaker")
    with txmsg(DISPATCH_ON_COMMIT="thread"):
        send()
        wait_until(lambda: not pending())
        outage = database_health.breaker("default")
        outage.failed(OperationalError("no route to host"))
        wait_until(lambda: not outage.remaining)
        logger.addHandler(handler)
        try:
            send()
            assert handler.tried.wait(30)  # says that the database works again
        finally:
            logger.removeHandler(handler)
        send()
        wait_until(lambda: pending() <= 1)


class Broken(DatabaseBroker):
    """A broker of the project's own. Its first session neither sends nor closes."""

    sessions = 0

    def open(self, *arguments: Any, **options: Any) -> Any:
        Broken.sessions += 1
        if Broken.sessions == 1:
            return Refusing("default", 30.0, 0.1)
        return super().open(*arguments, **options)


class Refusing(DatabaseSession):
    def send(self, *_: Any, **__: Any) -> Any:
        raise SystemExit

    def close(self) -> None:
        raise OSError("the socket is closed already")


def test_a_session_that_cannot_be_closed_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "sessions", 0)
    backend = f"{Broken.__module__}.{Broken.__qualname__}"
    broker = {"URL": "database://", "BACKEND": backend}
    with txmsg(DISPATCH_ON_COMMIT="thread", BROKERS={"default": broker}):
        send()
        wait_until(lambda: "the relay will do it" in caplog.text)
        send()
        wait_until(lambda: pending() == 1)


def test_rows_that_another_process_holds_do_not_end_an_outage() -> None:
    """A broker with a memory alarm accepts sessions, but answers no message. A dispatch
    that claims no row proves nothing about messages."""
    with (
        ScriptedBroker(RABBITMQ) as rabbitmq,
        txmsg(
            BROKERS={"default": {"URL": f"{rabbitmq.url}?send_timeout=0.3"}},
            DISPATCH_ON_COMMIT="thread",
        ),
    ):
        rabbitmq.on("SEND").park()
        with transaction.atomic():
            send_message("tests.q", 1, key="hot")
        wait_until(breaker.outages)
        wait_until(lambda: OutboxMessage.objects.get().lease_until is None)
        assert OutboxMessage.objects.claim(
            broker="default", token=uuid.uuid4(), lease=60, limit=1
        )
        thread = dispatcher._dispatcher("default", "default")
        wait_until(lambda: not thread._breaker.remaining)
        with transaction.atomic():
            send_message("tests.q", 2, key="hot")
        wait_until(lambda: thread._again)
        assert breaker.outages()
