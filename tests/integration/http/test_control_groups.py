"""Many requests share one control message. A group's control message is replaced in
time, and not settled too early."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection, connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_txmsg import conf, outbox_session, send_message, signals
from django_txmsg.http_outbox import (
    control_connection,
    control_group,
    control_message,
    control_receive,
    control_thread,
)
from django_txmsg.http_outbox.session import OutboxSession
from django_txmsg.models import OutboxMessage
from django_txmsg.models.outbox_store import NewMessage
from django_txmsg.runtime.breaker import Breaker
from django_txmsg.runtime.liveness import Activity
from tests.faults import Proxy, wait_until
from tests.running import drained
from tests.services import ActiveMQ, PostgreSQL
from tests.services.postgresql import Standby
from tests.services.server import free_port

from .conftest import wait_for_the_database

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql,
]

#: Seconds for which sessions join, and beyond which their rows need another message.
WINDOW, SPARE = 0.3, 0.2


@pytest.fixture
def proxy(activemq: ActiveMQ) -> Iterator[Proxy]:
    with Proxy(activemq.port) as between:
        yield between


@pytest.fixture
def settings_for(
    activemq: ActiveMQ,
    proxy: Proxy,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., override_settings]]:
    monkeypatch.setattr(control_group, "SPARE", SPARE)
    monkeypatch.setattr(control_group, "LEAD", 0.1)
    monkeypatch.setattr(control_group, "MARGIN", 0.1)

    def settings(**http: Any) -> override_settings:
        return override_settings(
            TXMSG={
                "SERVICE": destination,
                "BROKERS": {
                    "default": {"URL": activemq.url(port=proxy.port)},
                    "down": {"URL": f"stomp://127.0.0.1:{free_port()}"},
                },
                "DISPATCH_ON_COMMIT": "off",
                "HTTP": {"CONTROL_GROUP": WINDOW, **http},
            }
        )

    yield settings
    control_connection.close_channels()


@pytest.fixture
def grouped(settings_for: Callable[..., override_settings]) -> Iterator[None]:
    with settings_for():
        yield


@pytest.fixture
def receiver(grouped: None) -> Iterator[Callable[[], None]]:
    """Return a function that starts the receiver of control messages. The receiver runs
    until the end of the test."""
    stopping = threading.Event()
    receiving = control_thread.ControlThread(
        "default", stopping, Breaker("default", 1.0), Activity()
    )

    def run() -> None:
        try:
            receiving.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    yield thread.start
    stopping.set()
    if thread.ident is not None:
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def database_at(url: str) -> Iterator[None]:
    """Make the alias `default` use the database at `url`."""
    parts, usual = urlsplit(url), connections["default"]
    there = connections.create_connection("default")
    there.settings_dict = {
        **usual.settings_dict,
        "NAME": parts.path[1:],
        "HOST": parts.hostname,
        "PORT": str(parts.port),
        "USER": parts.username,
        "PASSWORD": parts.password,
    }
    connections["default"] = there
    try:
        yield
    finally:
        there.close()
        connections["default"] = usual


def store(number: str = "1", **arguments: Any) -> None:
    with outbox_session():
        send(number, **arguments)


def send(number: str = "1", **arguments: Any) -> None:
    send_message("groups.orders", {"number": number}, **arguments)


def groups() -> set[uuid.UUID]:
    """The ids of the control groups whose rows are stored."""
    return set(OutboxMessage.objects.values_list("session_id", flat=True))


def pending() -> int:
    return OutboxMessage.objects.filter(dispatched_at=None).count()


def outcomes(heard: Any) -> list[str]:
    return [one["outcome"] for one in heard["handled"]]


def test_sessions_that_store_soon_share_one_message(grouped, receiver, heard) -> None:
    for number in range(5):
        store(str(number))
    assert len(heard["sent"]) == len(groups()) <= 2
    assert {one["session_id"] for one in heard["sent"]} == groups()
    receiver()
    wait_until(lambda: pending() == 0 and len(heard["handled"]) == len(heard["sent"]))
    assert set(outcomes(heard)) <= {"dispatched", "already_dispatched"}


def test_late_store_sends_the_groups_message_again(grouped, receiver, heard) -> None:
    store("opens")
    receiver()
    with outbox_session():
        send("early", key="a")  # which is inserted where it is sent
        wait_for_the_database(WINDOW + SPARE + 1)
        send("late", key="b")
    assert len(heard["sent"]) == 2
    wait_until(lambda: pending() == 0)


def test_an_open_session_keeps_its_groups_message_unsettled(
    grouped, receiver, heard
) -> None:
    store("opens")
    with outbox_session():
        send("joins", key="a")
        receiver()
        wait_until(lambda: pending() == 1)  # of what the other connection can see
        wait_for_the_database(WINDOW + SPARE + 1.5)
        assert heard["handled"] == []
        assert len(heard["sent"]) == 1
    assert len(groups()) == 1
    wait_until(lambda: pending() == 0)
    # A late receipt may bring the message a second time.
    wait_until(lambda: heard["handled"])
    assert set(outcomes(heard)) <= {"dispatched", "already_dispatched"}


def test_a_broker_that_is_down_ends_no_check_of_an_open_session(
    grouped, receiver, heard, monkeypatch
) -> None:
    # The receiver has no patience with messages that cannot be sent.
    monkeypatch.setattr(control_receive, "PATIENCE", -conf.get().RELAY.LEASE)
    store("opens", broker="down")
    with outbox_session():
        send("joins", key="a")
        receiver()
        wait_for_the_database(WINDOW + SPARE + 4)
        assert heard["handled"] == []
    wait_until(lambda: pending() == 1)  # the one to the broker that is down
    wait_until(lambda: outcomes(heard) == ["left_to_relay"])


def test_a_savepoint_gives_back_lock_and_rows(grouped, receiver, heard) -> None:
    store("opens")
    with outbox_session():
        with contextlib.suppress(RuntimeError), transaction.atomic():
            send("lost", key="a")
            raise RuntimeError
        receiver()
        # Nobody holds the lock any more.
        wait_until(lambda: heard["handled"])
        send("kept", key="a")
    assert len(heard["sent"]) == 2
    wait_until(lambda: pending() == 0)
    assert OutboxMessage.objects.count() == 2


def test_a_transaction_around_it_may_take_its_time(grouped, receiver, heard) -> None:
    store("opens")
    with transaction.atomic():
        store("inner")
        receiver()
        wait_for_the_database(WINDOW + SPARE + 1.5)
        assert heard["handled"] == []
    wait_until(lambda: pending() == 0)


def test_requests_under_traffic_wait_for_no_receipt(grouped, heard) -> None:
    """The first request sends its control message itself. For later requests, a thread
    sends the control messages, so these requests do not wait for a receipt."""
    store("opens")
    mine = threading.get_ident()
    senders: list[int] = []

    def note(**_: Any) -> None:
        senders.append(threading.get_ident())

    signals.control_message_sent.connect(note)
    try:
        wait_until(lambda: store() is None and len(groups()) >= 4)
    finally:
        signals.control_message_sent.disconnect(note)
    assert len(senders) >= 3
    assert senders.count(mine) < len(senders) / 2


def test_two_threads_of_one_context_store_under_one_group(grouped, monkeypatch) -> None:
    usual, both, found = control_group.find, threading.Barrier(2), []

    def find(*arguments: Any) -> control_group.Group | None:
        found.append(usual(*arguments))
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return found[-1]

    monkeypatch.setattr(control_group, "find", find)
    session, joined = OutboxSession(), []

    def store_one() -> None:
        try:
            with transaction.atomic():
                joined.append(session.join())
        finally:
            connection.close()

    threads = [threading.Thread(target=store_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 1
    assert [session_id for session_id, _ in joined] == [found[0].id] * 2


def test_a_clock_that_was_ahead_is_forgotten(grouped) -> None:
    """The database's clock was a day ahead, and was then corrected. The next control
    group opens at the corrected time."""
    store()
    (groups_,) = control_group._groups.all()
    now = timezone.now()
    groups_.note(now + dt.timedelta(days=1))
    groups_._open_next()
    groups_.note(now)
    groups_._open_next()
    assert groups_._open.opened_at == now


def test_where_no_thread_can_start_requests_go_on(grouped, monkeypatch, heard) -> None:
    monkeypatch.setattr(
        control_group, "LEAD", 60.0
    )  # so that each session would open the next
    store("opens")
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        wait_until(lambda: store() is None and "txmsg-control-group" in refused)
        store()
        # One that has to connect meanwhile is as one without a broker.
        control_connection.close_channels()
        control_group._groups.clear()
        store()
    assert "txmsg-control-connect" in refused
    assert [one["outcome"] for one in heard["sent"]][-1] == "failed"
    wait_until(lambda: store() is None and heard["sent"][-1]["outcome"] == "sent")
    # Nothing is left behind that keeps the next one from being opened beside them.
    names: set[str] = set()

    def note(**_: Any) -> None:
        names.add(threading.current_thread().name)

    signals.control_message_sent.connect(note)
    try:
        wait_until(lambda: store() is None and "txmsg-control-group" in names)
    finally:
        signals.control_message_sent.disconnect(note)


def test_without_a_group_settings_decide_what_an_outage_means(
    settings_for, proxy, heard, caplog
) -> None:
    caplog.set_level("INFO", "django_txmsg")
    proxy.refuse()
    with settings_for():
        store()
        assert OutboxMessage.objects.count() == 1
    with settings_for(CONTROL_GROUP=0):
        store()
        OutboxMessage.objects.latest("pk").delete()
    lines = [one for one in caplog.records if "without a control" in one.message]
    names = [one.name for one in lines]
    assert names == ["django_txmsg.session", "django_txmsg.control"]
    with settings_for(ON_CONTROL_FAILURE="fail"):
        with pytest.raises(Exception, match="broker"):
            store()
        assert OutboxMessage.objects.count() == 1
        proxy.accept()
        wait_until(lambda: _stored())
        # The message of the open group guards the next one, whatever the broker does.
        proxy.cut()
        proxy.refuse()
        store()
    assert [one["outcome"] for one in heard["sent"]][-1] == "sent"


def _stored() -> bool:
    try:
        store()
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    "http",
    [
        {"CONTROL_GROUP": 0},
        {"CONTROL_MESSAGE_ORACLE": "delay"},
        {"CONTROL_MESSAGE": "off"},
    ],
)
def test_without_shared_messages_each_session_is_its_own_group(
    settings_for, heard, http
) -> None:
    with settings_for(**http):
        for _ in range(3):
            store()
    assert len(groups()) == 3
    assert len(heard["sent"]) == (0 if "CONTROL_MESSAGE" in http else 3)


def test_session_with_metadata_has_its_own_control_message(
    grouped, receiver, heard
) -> None:
    store()
    receiver()
    with outbox_session() as session:
        session.metadata["tenant"] = "north"
        send()
    with outbox_session() as session:
        send(key="a")
        session.metadata["tenant"] = "south"
    assert len(heard["sent"]) == 3
    wait_until(lambda: len(heard["handled"]) == 3 and pending() == 0)
    tenants = {one["headers"].get("tenant") for one in heard["handled"]}
    assert tenants == {None, "north", "south"}


def test_a_copy_is_stored_under_a_group_too(grouped, receiver) -> None:
    """A session stores many rows, so it inserts them with COPY. It still takes the lock
    of its control group, and the receiver dispatches the rows."""
    store()
    with outbox_session():
        for number in range(20):
            send(str(number))
    assert len(groups()) == 1
    receiver()
    wait_until(lambda: pending() == 0)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_lock_is_held_until_the_commit_and_for_the_group_alone(
    grouped, count
) -> None:
    """Storing rows locks their control group until the commit, and locks no other
    group. The INSERT of a few rows takes the lock in the same statement."""
    one, other = uuid.uuid4(), uuid.uuid4()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp() - interval '1 hour'")
        (over,) = cursor.fetchone()
    answers: list[bool] = []

    def ask() -> None:
        answers.extend(
            control_group.has_ended("default", each, over) for each in (one, other)
        )
        connections.close_all()

    for inside in (True, False):
        with transaction.atomic() if inside else contextlib.nullcontext():
            if inside:
                _inserted(one, count)
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    assert answers == [False, True, True, True]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_clock_is_read_when_the_lock_is_there(grouped, count) -> None:
    """A session waits for the lock of its group, and then reads the clock. If it read
    the clock first, it could join a group that a receiver has already declared
    ended."""
    one = uuid.uuid4()
    locked_at: list[dt.datetime] = []

    def stores() -> None:
        with transaction.atomic():
            locked_at.append(_inserted(one, count))
        connections.close_all()

    def somebody_waits() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted")
            return cursor.fetchone() is not None

    thread = threading.Thread(target=stores)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [control_group.lock_of(one)])
        thread.start()
        wait_until(somebody_waits)
        cursor.execute("SELECT clock_timestamp()")
        (free,) = cursor.fetchone()
    thread.join()
    assert len(locked_at) == 1
    assert locked_at[0] > free


def _inserted(one: uuid.UUID, count: int) -> dt.datetime:
    rows = [NewMessage(uuid.uuid4(), "q", "text/plain", b"") for _ in range(count)]
    stored = OutboxMessage.objects.store(rows, lock=control_group.lock_of(one))
    assert stored.locked_at is not None
    return stored.locked_at


def test_broker_gets_one_control_message_per_window(
    grouped, destination, monkeypatch
) -> None:
    """The process opens the next group in advance, so a group may have a control
    message but no rows."""
    # No session is so late that its group needs a second message.
    monkeypatch.setattr(control_group, "SPARE", 60)
    for _ in range(20):
        store()
    found = drained(f"{destination}.txmsg.control")
    announced = {uuid.UUID(one.headers[control_message.SESSION]) for one in found}
    assert groups() <= announced
    assert len(found) == len(announced) < 20


def test_a_standby_reports_no_outcome_until_it_is_promoted(
    postgres: PostgreSQL,
) -> None:
    """A standby cannot see the primary's locks, so it reports no outcome. After its
    promotion, it reports that the group has ended, because all earlier transactions
    have ended."""
    one, long_ago = uuid.uuid4(), timezone.now() - dt.timedelta(hours=1)
    standby, asked = Standby(postgres), []
    here, there = (server.url("postgres") for server in (postgres, standby))
    try:
        standby.start()
        with database_at(here), transaction.atomic():
            with connections["default"].cursor() as cursor:
                lock = control_group.lock_of(one)
                cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [lock])
            for url in (here, there):
                asked += _asked(url, one, long_ago)
            standby.promote()
            asked += _asked(there, one, long_ago)
    finally:
        standby.remove()
    assert asked == [False, False, True]


def _asked(url: str, one: uuid.UUID, until: dt.datetime) -> list[bool]:
    with database_at(url):
        return [control_group.has_ended("default", one, until)]
