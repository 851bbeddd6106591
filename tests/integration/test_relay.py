"""A relay claims, sends and settles rows, while rows, brokers and databases fail."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models.functions import Now

from django_txmsg import signals, tasks
from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.errors import BrokerUnavailable, DispatchRejected, DispatchUnknown
from django_txmsg.models import DeadLetter, OutboxMessage
from django_txmsg.models.outbox import OutboxManager
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying import lane, limits
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime import breaker
from django_txmsg.sending.outbox import send_message, send_messages
from django_txmsg.testing.profiles import RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests.factories import OutboxMessageFactory
from tests.faults import wait_until
from tests.running import IMPATIENT, at_work, committing, ship, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def store(count: int = 1, **arguments: Any) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": n, **arguments} for n in range(count)
        )


def queued() -> list[bytes]:
    rows = QueueMessage.objects.filter(queue="tests.q").order_by("id")
    return [bytes(one.body) for one in rows]


def all_due() -> None:
    OutboxMessage.objects.filter(dispatched_at=None, dead_at=None).update(due_at=Now())


def test_all_leave_in_the_order_they_were_stored() -> None:
    store(50)
    assert ship() == 50
    assert queued() == [str(n).encode() for n in range(50)]
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert ship() == 0


def test_a_slow_search_for_the_heads_of_keys_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle lane spends only a small share of its time on this search, which reads
    all due rows that cannot be claimed."""
    monkeypatch.setattr(lane, "HEADS_INTERVAL", 0.0)
    searches: list[str] = []

    def slow(execute: Any, sql: str, *rest: Any) -> Any:
        if "(TRUE OR " in sql:
            searches.append(sql)
            threading.Event().wait(0.1)  # as a database with millions of them
        return execute(sql, *rest)

    idle = Lane("default", "default")
    try:
        with connection.execute_wrapper(slow):
            assert idle.dispatch() == 0
            assert len(searches) == 1
            assert idle.dispatch() == 0
            assert len(searches) == 1
    finally:
        idle.close()


def test_late_commit_of_many_messages_leaves_beside_other_traffic() -> None:
    """The late messages were due before all that a busy lane has sent since. The lane
    finds them with a sweep, and then continues with them."""
    busy = Lane("default", "default", batch_size=10)

    def left() -> int:
        # The lane always finds a new message, too.
        store()
        busy.dispatch()
        late = OutboxMessage.objects.filter(destination="tests.late")
        return late.filter(dispatched_at=None).count()

    try:
        left()
        store(30, destination="tests.late")
        rows = OutboxMessage.objects.filter(destination="tests.late")
        rows.update(due_at=Now() - dt.timedelta(hours=1))
        wait_until(lambda: left() < 30)
        assert [left(), left()] == [10, 0]
    finally:
        busy.close()


def test_a_delayed_message_waits() -> None:
    store(delay=dt.timedelta(hours=1))
    assert ship() == 0
    all_due()
    assert ship() == 1


def test_an_expired_message_ends_visibly() -> None:
    store(expires=dt.timedelta(0))
    ship()
    row = OutboxMessage.objects.get()
    assert row.state == "dead"
    assert row.last_error.startswith("expired")
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.message_id) == ("expired", row.message_id)
    assert queued() == []


def test_a_broker_that_is_down_costs_no_attempt_and_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = threading.Event()
    down.set()
    real, tries = DatabaseSession.send, []

    def send(session: Any, batch: Any, **options: Any) -> Any:
        if down.is_set():
            tries.append(1)
            raise BrokerUnavailable("connection refused")
        return real(session, batch, **options)

    monkeypatch.setattr(DatabaseSession, "send", send)
    store(3)
    leased = OutboxMessage.objects.filter(lease_until__isnull=False)
    with at_work(Relay(["default"], ["default"], lanes=1)):
        wait_until(lambda: len(tries) >= 3)
        wait_until(lambda: not leased.exists())  # between two tries
        down.clear()
        wait_until(lambda: len(queued()) == 3)
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1, [one.getMessage() for one in warnings]


def test_a_broker_that_answers_no_message_has_one_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broker with a memory alarm accepts sessions, but answers no message. If a lane
    only opens a session, because another lane holds the row, that proves nothing. Nor
    does a batch in which every row has expired."""
    caplog.set_level(logging.INFO)

    def lines(level: int) -> list[str]:
        found = [one for one in caplog.records if one.name == "django_txmsg.breaker"]
        return [one.getMessage() for one in found if one.levelno == level]

    with (
        ScriptedBroker(RABBITMQ) as broker,
        txmsg(BROKERS={"default": {"URL": f"{broker.url}?send_timeout=0.3"}}),
    ):
        broker.on("SEND").park()
        store()
        with at_work(Relay(["default"], ["default"], lanes=2)):
            broker.wait_for("SEND", 2)
            store(expires=dt.timedelta(0))
            wait_until(OutboxMessage.objects.exclude(dead_at=None).exists)
            broker.wait_for("SEND", 6)
            assert not lines(logging.INFO)
            broker.forget_rules()
            wait_until(lambda: lines(logging.INFO))
        assert not breaker.outages()
    assert OutboxMessage.objects.get(dead_at=None).dispatched_at is not None
    assert len(lines(logging.WARNING)) == len(lines(logging.INFO)) == 1


def test_a_rejected_message_backs_off_and_dies_while_others_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = DatabaseSession.send

    def send(session: Any, batch: Any, **options: Any) -> Any:
        outcomes = real(session, [one for one in batch if one.body != b"3"], **options)
        refused = [
            DispatchRejected("no permission") for one in batch if one.body == b"3"
        ]
        return [*outcomes[:3], *refused, *outcomes[3:]]

    monkeypatch.setattr(DatabaseSession, "send", send)
    with txmsg(RELAY={"MAX_ATTEMPTS": 3}):
        store(6)
        ship()
        assert queued() == [b"0", b"1", b"2", b"4", b"5"]
        row = OutboxMessage.objects.get(dispatched_at=None)
        assert (row.attempts, row.state) == (1, "pending")
        assert row.due_at > row.created_at + dt.timedelta(seconds=0.5)
        monkeypatch.setattr(
            DatabaseSession,
            "send",
            lambda *_, **__: [DispatchRejected("no permission")],
        )
        for _ in range(4):
            all_due()
            ship()
    row.refresh_from_db()
    assert (row.attempts, row.state) == (3, "dead")
    assert "no permission" in row.last_error
    letter = DeadLetter.objects.get()
    assert (letter.reason, bytes(letter.body), letter.attempts) == ("rejected", b"3", 3)


def test_no_receipt_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message with an unknown outcome stays pending. After the breaker's pause it is
    sent again with the same id."""
    real = DatabaseSession.send
    unknown: list[int] = []

    def send(session: Any, batch: Any, **options: Any) -> Any:
        real(session, batch, **options)
        return [DispatchUnknown("receipt lost")] * len(batch)

    def listen(count: int, **facts: Any) -> None:
        unknown.append(count)

    monkeypatch.setattr(DatabaseSession, "send", send)
    signals.outcome_unknown.connect(listen)
    store(2)
    lane = Lane("default", "default")
    try:
        with pytest.raises(BrokerUnavailable, match="sent again with the same ids"):
            lane.dispatch()
    finally:
        lane.close()
        signals.outcome_unknown.disconnect(listen)
    assert unknown == [2]
    assert OutboxMessage.objects.filter(dispatched_at=None, attempts=0).count() == 2
    monkeypatch.undo()
    ship()
    ids = [one.headers["txmsg-id"] for one in QueueMessage.objects.all()]
    assert len(ids) == 4
    assert len(set(ids)) == 2


def test_a_lost_lease_is_counted_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another relay has claimed the rows of a late relay. Because of the fencing token,
    the late relay does not settle them. The late relay counts and logs the lost
    leases."""
    lost: list[int] = []
    other = uuid.uuid4()
    real = DatabaseSession.send

    def send(session: Any, batch: Any, **options: Any) -> Any:
        OutboxMessage.objects.update(lease_token=other)
        return real(session, batch, **options)

    def listen(count: int, **facts: Any) -> None:
        lost.append(count)

    monkeypatch.setattr(DatabaseSession, "send", send)
    signals.lease_lost.connect(listen)
    store(3)
    lane = Lane("default", "default")
    try:
        lane.dispatch()
    finally:
        lane.close()
        signals.lease_lost.disconnect(listen)
    assert lost == [3]
    assert lane.counts["lease_lost"] == 3
    rows = OutboxMessage.objects.filter(dispatched_at=None, lease_token=other)
    assert rows.count() == 3
    assert "the lease of 3 messages ended" in caplog.text
    assert "what stops this process or the database for longer than 60 s" in caplog.text


def test_a_lease_that_ran_out_is_taken_by_another() -> None:
    store()
    manager = OutboxMessage.objects
    claim = {"broker": "default", "limit": 10}
    (row,) = manager.claim(token=uuid.uuid4(), lease=60, **claim)
    assert manager.claim(token=uuid.uuid4(), lease=60, **claim) == []
    manager.update(lease_until=Now() - dt.timedelta(seconds=1))
    (again,) = manager.claim(token=uuid.uuid4(), lease=60, **claim)
    assert again.id == row.id


@pytest.mark.parametrize("method", ["claim", "mark_dispatched"])
def test_a_database_outage_between_claim_and_settle(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database fails between a claim and its settlement. The relay waits and
    continues. If it could not settle a row, it sends the row again."""
    real, left = getattr(OutboxManager, method), [3]

    def failing(manager: Any, *given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            connection_of = connections["default"]
            connection_of.close()
            raise OperationalError("the database system is shutting down")
        return real(manager, *given, **named)

    monkeypatch.setattr(OutboxManager, method, failing)
    with txmsg(RELAY={**IMPATIENT["RELAY"], "LEASE": 1}):
        store(4)
        with at_work(Relay(["default"], ["default"], lanes=1)):
            wait_until(
                lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists()
            )
    assert {one.headers["txmsg-id"] for one in QueueMessage.objects.all()} == {
        str(one.message_id) for one in OutboxMessage.objects.all()
    }
    assert not OutboxMessage.objects.exclude(attempts=0).exists()


def test_a_lane_that_is_stopped_as_it_waits_for_its_turn_takes_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LONGEST", 20.0)
    store(40)
    relay = Relay(["default"], ["default"], batch_size=10)
    shared, waiting = relay.lanes[0]._turn, threading.Event()
    is_free = shared._is_free

    def seen() -> bool:
        free = is_free()
        if not free:
            waiting.set()
        return free

    monkeypatch.setattr(shared, "_is_free", seen)
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(shared.at_database())
        with at_work(relay):
            assert waiting.wait(30)
            relay.stop()
            held.close()
    assert not relay.counts
    assert queued() == []


def test_row_by_row_settlement_waits_for_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two other lanes block the database, while this lane settles its batch row by row.
    If it waited for its turn before each row, the batch would take minutes."""
    monkeypatch.setattr(limits, "LONGEST", 1.0)
    store(100, expires=dt.timedelta(0))
    relay = Relay(["default"], ["default"], lanes=1)
    at_database = relay.lanes[0]._turn.at_database
    with at_database(), at_database(), at_work(relay):
        wait_until(lambda: relay.counts["dead"] == 100, deadline=30)


def test_two_relays_send_each_row_once() -> None:
    store(400)
    with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 20}):
        relays = [Relay(["default"], ["default"]) for _ in range(2)]
        with at_work(*relays):
            wait_until(
                lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists()
            )
    assert len(queued()) == 400
    assert len(set(queued())) == 400
    assert sum(relay.counts["dispatched"] for relay in relays) == 400


def test_a_commit_elsewhere_is_seen_by_an_idle_relay() -> None:
    with at_work(Relay(["default"], ["default"], lanes=1)):
        store()
        wait_until(lambda: queued() == [b"0"])


def test_once_ends_when_nothing_is_due_and_raises_when_the_broker_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store(3)
    store(1, delay=dt.timedelta(hours=1))
    Relay(["default"], ["default"]).run(once=True)
    assert len(queued()) == 3

    def down(*_: Any, **__: Any) -> Any:
        raise BrokerUnavailable("connection refused")

    monkeypatch.setattr(DatabaseSession, "send", down)
    store(1)
    with pytest.raises(BrokerUnavailable):
        Relay(["default"], ["default"]).run(once=True)


@pytest.mark.parametrize(
    "entry",
    [
        {"URL": "database://", "BACKEND": "no_such_library.Broker"},
        {"URL": "celery://no_such_library:app"},
    ],
)
def test_a_broker_whose_library_is_missing_leaves_the_others_working(
    entry: dict[str, str],
) -> None:
    """The Celery task runs no system checks, which would report the missing library."""
    with txmsg(BROKERS={**IMPATIENT["BROKERS"], "away": entry}):
        OutboxMessageFactory(broker="away")
        store()
        counts = tasks.relay_outbox()
    assert counts["dispatched"] == len(queued()) == 1
    assert "no_such_library" in counts["unavailable"]["away"]
    waiting = OutboxMessage.objects.get(dispatched_at=None)
    assert (waiting.broker, waiting.attempts) == ("away", 0)


def test_rows_of_several_databases_and_brokers() -> None:
    with transaction.atomic(using="other"):
        send_message("tests.q", "there", using="other", broker="apart")
    store()
    Relay(["default", "other"], ["default", "apart"]).run(once=True)
    assert queued() == [b"0"]
    assert QueueMessage.objects.using("other").filter(queue="tests.q").count() == 1


def test_the_broker_is_asked_with_no_transaction_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, states = DatabaseSession.send, []

    def send(session: Any, batch: Any, **options: Any) -> Any:
        states.append(connection.in_atomic_block)
        return real(session, batch, **options)

    monkeypatch.setattr(DatabaseSession, "send", send)
    store(2)
    ship()
    assert states == [False]
