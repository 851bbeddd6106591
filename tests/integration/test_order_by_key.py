"""Messages of one key are sent in the order in which they were stored. Messages of
other keys do not wait for them."""

from __future__ import annotations

import datetime as dt
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_txmsg import cancel_message, reschedule_message
from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.errors import DispatchRejected
from django_txmsg.models import OutboxMessage
from django_txmsg.models.outbox_claim import Claimed
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying import lane as lanes
from django_txmsg.relaying.dispatcher import dispatch_inline
from django_txmsg.relaying.lane import Lane, Sweep
from django_txmsg.relaying.relay import Relay
from django_txmsg.sending.outbox import send_message, send_messages
from tests.faults import wait_until
from tests.running import IMPATIENT, at_work, committing, ship, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def store(keys: list[str | None]) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": n, "key": key}
            for n, key in enumerate(keys)
        )


def queued() -> list[int]:
    return [int(bytes(one.body)) for one in QueueMessage.objects.order_by("id")]


def test_rejected_message_holds_back_only_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store(["a", "a", "b", None, "a"])
    real = DatabaseSession.send

    def send(session: Any, batch: Any, **options: Any) -> Any:
        good = [one for one in batch if one.body != b"0"]
        real(session, good, **options)
        return [None if one.body != b"0" else DispatchRejected("no") for one in batch]

    monkeypatch.setattr(DatabaseSession, "send", send)
    with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 1}):
        ship()
        assert queued() == [2, 3]
        monkeypatch.undo()
        OutboxMessage.objects.update(due_at=Now())
        ship()
    assert queued() == [2, 3, 0, 1, 4]


def test_a_head_that_is_due_again_does_not_drown_behind_its_followers() -> None:
    """The first message of a key has a later due time than its followers, which fill
    several batches. The messages of the key are still sent in order."""
    store(["a"] * 30 + ["b", None])
    head = OutboxMessage.objects.order_by("id")[0]
    OutboxMessage.objects.exclude(pk=head.pk).update(
        due_at=Now() - dt.timedelta(minutes=5)
    )
    with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 5}):
        Relay(["default"], ["default"], lanes=1).run(once=True)
    sent = queued()
    assert sorted(sent) == list(range(32))
    assert [one for one in sent if one < 30] == list(range(30))


@pytest.mark.postgresql
def test_a_locked_message_holds_back_only_its_key() -> None:
    """The rows behind the locked row fill the batch. The relay still sends messages of
    other keys and messages without a key."""
    store(["a"] * 4 + [None, "b", "b", "c"])
    first = OutboxMessage.objects.order_by("id")[0].message_id
    cancelled, leave = threading.Event(), threading.Event()

    def cancel() -> None:
        with transaction.atomic():
            assert cancel_message(first)
            cancelled.set()
            leave.wait(30)
        connection.close()

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        assert cancelled.wait(30)
        with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 3}):
            ship()
        assert queued() == [4, 5, 7, 6]
    finally:
        leave.set()
        thread.join()
    ship()
    assert queued() == [4, 5, 7, 6, 1, 2, 3]


@pytest.mark.postgresql
def test_messages_behind_a_locked_one_do_not_hold_the_floor() -> None:
    """Otherwise each claim would read all rows that were sent since the lock."""
    store(["a", "a"])
    first = OutboxMessage.objects.earliest("id")
    OutboxMessage.objects.update(due_at=Now() - dt.timedelta(hours=1))
    store([None, None])
    floors: list[str | None] = []

    def claim(floor: str | None) -> list[Claimed]:
        floors.append(floor)
        return OutboxMessage.objects.claim(
            broker="default", token=uuid.uuid4(), lease=60, limit=9, floor=floor
        )

    operator: Any = connection.copy()
    operator.set_autocommit(False)
    sweep = Sweep()
    try:
        with operator.cursor() as cursor:
            cursor.execute(
                "SELECT due_at::text FROM django_txmsg_outboxmessage WHERE id = %s"
                " FOR UPDATE",
                [first.pk],
            )
            (an_hour_ago,) = cursor.fetchone()
        assert len(sweep.claim(claim)) == 2
        sweep.claim(claim)
    finally:
        operator.close()
    assert floors[0] is None
    assert floors[1] is not None
    assert floors[1] > an_hour_ago


@contextmanager
def stopped_relay() -> Iterator[psycopg.Connection]:
    """Link messages of the keys "a" and "new", and do not commit before the block ends.
    The key "a" had messages before."""
    store(["a"])
    ship()
    with psycopg.connect(**connection.get_connection_params()) as tails:
        tails.execute(
            "SELECT 1 FROM django_txmsg_keytail WHERE key = 'a' FOR UPDATE",
        )
        tails.execute(
            "INSERT INTO django_txmsg_keytail (broker, destination, key, last_id,"
            " last_at) VALUES ('default', 'tests.q', 'new', gen_random_uuid(), 1)"
        )
        try:
            yield tails
        finally:
            tails.rollback()


@pytest.mark.postgresql
def test_messages_of_a_locked_key_are_released_and_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relay that was stopped in the middle of linking keeps its locks. The messages
    of its keys fill a batch."""
    monkeypatch.setattr(lanes, "LINK_WAIT", 0.1)
    with stopped_relay():
        store(["a", "new", "a", "a", "b", "c", None, "b"])
        due = dict(OutboxMessage.objects.values_list("id", "due_at"))
        with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 4}):
            lane = Lane("default", "default")
            try:
                wait_until(lambda: lane.dispatch() and len(queued()) == 5)
            finally:
                lane.close()
        assert not OutboxMessage.objects.filter(lease_token__isnull=False).exists()
        assert queued() == [0, 4, 5, 6, 7]
        # They count as overdue after a while, as all others do.
        assert dict(OutboxMessage.objects.values_list("id", "due_at")) == due
        ids = list(OutboxMessage.objects.values_list("id", flat=True))
        dispatch_inline("default", "default", ids)
    ship()
    assert [one for one in queued()[5:] if one != 1] == [0, 2, 3]
    assert len(queued()) == 9


@pytest.mark.postgresql
def test_a_lane_waits_for_a_slow_relay_while_another_key_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One relay has stopped, and another one takes long to store its links. If the lane
    did not wait for the slow relay, it would link the keys of the batch one by one. So
    would the slow relay, and both would stay slow."""
    monkeypatch.setattr(lanes, "KEY_PAUSE", 60.0)
    monkeypatch.setattr(lanes, "LINK_WAIT", 0.1)
    lane = Lane("default", "default")
    with psycopg.connect(**connection.get_connection_params()) as slow, stopped_relay():
        store(["b"])
        ship()
        store(["new"])
        lane.dispatch()
        monkeypatch.setattr(lanes, "LINK_WAIT", 30.0)
        slow.execute("SELECT 1 FROM django_txmsg_keytail WHERE key = 'b' FOR UPDATE")
        store(["b"])
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(in_thread, lane.dispatch)
            try:
                wait_until(lambda: waits_long() or sent.done())
            finally:
                slow.rollback()
            sent.result()
        lane.close()
    assert [*lane.locked] == ["new"]
    assert queued() == [0, 0, 0]


def waits_long() -> bool:
    """Return whether a statement has waited for a lock for some time."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND query_start < clock_timestamp() - interval '0.2 seconds'"
        )
        return bool(cursor.fetchone()[0])


def in_thread(work: Callable[[], object]) -> None:
    """Run `work`, and close the thread's connections."""
    try:
        work()
    finally:
        connections.close_all()


@pytest.mark.postgresql
def test_messages_that_were_not_linked_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a lane links two messages, its lease on one of them ends, and an operator
    reschedules that message."""
    monkeypatch.setattr(lanes, "LINK_WAIT", 30.0)
    lane = Lane("default", "default")
    with stopped_relay() as tails, ThreadPoolExecutor() as pool:
        store(["a", "b"])
        sent = pool.submit(in_thread, lane.dispatch)
        row = OutboxMessage.objects.filter(lease_until__isnull=False, key="a")
        wait_until(row.exists)
        row.update(lease_until=Now())
        assert reschedule_message(row.get().message_id, delay=dt.timedelta(hours=1))
        tails.rollback()
        sent.result()
        assert lane.dispatch() == 1
        lane.close()
    assert queued() == [0, 1]


@pytest.mark.postgresql
def test_a_relay_with_once_waits_for_the_links_of_another_relay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "LINK_WAIT", 0.1)
    ended = threading.Event()

    def run() -> None:
        Relay(["default"], ["default"], lanes=1).run(once=True)
        ended.set()

    thread = threading.Thread(target=run)
    with stopped_relay():
        store(["a"])
        thread.start()
        wait_until(lambda: caplog.text.count("wait for a lock") > 1)
    thread.join(30)
    assert ended.is_set()
    assert queued() == [0, 0]


@pytest.mark.postgresql
def test_a_locked_row_of_a_key_holds_up_no_other_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a relay waits for the place of a key, another transaction locks the row of
    the key's message. The relay leaves this message, and sends the others."""
    monkeypatch.setattr(lanes, "LINK_WAIT", 0.3)
    claimed = OutboxMessage.objects.filter(lease_until__isnull=False)
    parameters = connection.get_connection_params()
    with psycopg.connect(**parameters) as operator, stopped_relay():
        store(["a", "b", None])
        with at_work(Relay(["default"], ["default"], lanes=1)):
            wait_until(claimed.exists)
            lock(operator, claimed.earliest("id"))
            wait_until(lambda: queued() == [0, 1, 2])
            operator.rollback()


def lock(operator: psycopg.Connection, row: OutboxMessage) -> None:
    """Lock a row of the outbox until the operator's transaction ends."""
    table = OutboxMessage._meta.db_table
    operator.execute(f"SELECT 1 FROM {table} WHERE id = {row.pk} FOR UPDATE")


@pytest.mark.postgresql
def test_rows_that_a_slow_renewal_has_locked_are_released_after_it() -> None:
    """A lane releases the message of a locked key while its lease is being renewed."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(2); RETURN NEW; END';"
            " CREATE TRIGGER slow BEFORE UPDATE ON django_txmsg_outboxmessage"
            " FOR EACH ROW WHEN (OLD.lease_until < NEW.lease_until)"
            " EXECUTE FUNCTION slow()"
        )
    lane = Lane("default", "default", longest_lease=1.0)
    try:
        with stopped_relay():
            store(["a"])
            assert lane.dispatch() == 1
        assert not OutboxMessage.objects.filter(lease_until__isnull=False).exists()
    finally:
        lane.close()
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION slow CASCADE")


@pytest.mark.postgresql
def test_after_an_incomplete_renewal_no_message_overtakes_a_locked_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store([None, "a", "a"])
    _, first, second = OutboxMessage.objects.order_by("id")
    OutboxMessage.objects.filter(pk=first.pk).update(attempts=1)
    real, rows = DatabaseSession.send, OutboxMessage.objects.filter(pk=second.pk)
    lane = Lane("default", "default", longest_lease=2.0)
    with psycopg.connect(**connection.get_connection_params()) as operator:

        def send(session: Any, batch: Any, **options: Any) -> Any:
            monkeypatch.undo()
            outcomes = real(session, batch, **options)
            until = rows.get().lease_until
            lock(operator, first)
            wait_until(lambda: rows.get().lease_until > until)
            return outcomes

        monkeypatch.setattr(DatabaseSession, "send", send)
        lane.dispatch()
        lane.close()
        assert queued() == [0]
        assert rows.get().lease_until is None
        operator.rollback()
    wait_until(lambda: ship() and len(queued()) == 3)
    assert queued() == [0, 1, 2]


def test_a_leased_message_holds_back_its_key() -> None:
    store(["a", "a", "b"])
    claim: dict[str, Any] = {"broker": "default", "lease": 60}
    first = OutboxMessage.objects.claim(token=uuid.uuid4(), limit=1, **claim)
    assert [bytes(one.body) for one in first] == [b"0"]
    second = OutboxMessage.objects.claim(token=uuid.uuid4(), limit=9, **claim)
    assert [bytes(one.body) for one in second] == [b"2"]


def test_rows_of_other_brokers_and_services_are_not_held_back() -> None:
    """Rows of other brokers and services may have the same key. They do not block the
    rows of this broker and service."""
    with transaction.atomic():
        for broker in ("apart", "apart", "default", "default"):
            send_message("tests.q", None, key="a", broker=broker)
    _, strange, *ours = OutboxMessage.objects.order_by("id").values_list(
        "id", flat=True
    )
    OutboxMessage.objects.filter(id=strange).update(broker="default", service="other")
    with txmsg(RELAY={**IMPATIENT["RELAY"], "BATCH_SIZE": 2}):
        lane = Lane("default", "default")
        try:
            assert lane.held_back(ours[1:]) == ours
        finally:
            lane.close()


def test_two_relays_keep_the_order_of_keys_despite_rejections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two relays send the messages of several keys, and the broker rejects some of them
    at first. The messages of each key are still sent in order."""
    dice, lock = random.Random(7), threading.Lock()
    sent: dict[str, list[int]] = defaultdict(list)

    def send(session: Any, batch: Any, **options: Any) -> Any:
        outcomes: list[Any] = []
        with lock:
            refused: set[str] = set()
            for one in batch:
                key = one.headers["txmsg-key"]
                if key in refused or dice.random() < 0.1:
                    # As a broker that is asked one by one; the rest of the key's
                    # batch must not pass it either.
                    refused.add(key)
                    outcomes.append(DispatchRejected("not now"))
                else:
                    sent[key].append(int(one.body))
                    outcomes.append(None)
        return outcomes

    monkeypatch.setattr(DatabaseSession, "send", send)
    keys = [f"k{n % 7}" for n in range(200)]
    store(keys)  # type: ignore[arg-type]
    settings = {**IMPATIENT["RELAY"], "BATCH_SIZE": 9, "MAX_ATTEMPTS": 99}
    with txmsg(RELAY=settings):
        relays = [Relay(["default"], ["default"]) for _ in range(2)]
        threads = [threading.Thread(target=relay.run) for relay in relays]
        for thread in threads:
            thread.start()

        def done() -> bool:
            waiting = OutboxMessage.objects.filter(dispatched_at=None)
            waiting.filter(attempts__gt=0, lease_until=None).update(due_at=Now())
            return not waiting.exists()

        try:
            wait_until(done, deadline=60)
        finally:
            for relay, thread in zip(relays, threads, strict=True):
                relay.stop()
                thread.join(30)
    assert sum(map(len, sent.values())) == 200
    for key, bodies in sent.items():
        assert bodies == sorted(bodies), key
