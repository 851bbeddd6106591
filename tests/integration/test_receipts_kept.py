"""A relay keeps the broker's receipts while the database is unavailable."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models.functions import Now

from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.models import OutboxMessage
from django_txmsg.models.outbox_claim import Claimed
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.limits import Turn
from django_txmsg.relaying.relay import Relay
from django_txmsg.relaying.settlement import Settlement
from django_txmsg.runtime import database_health, notifications
from django_txmsg.runtime.leases import Lease
from django_txmsg.sending.outbox import send_messages
from tests.faults import wait_until
from tests.running import IMPATIENT, at_work, committing, ship, txmsg

pytestmark = [
    committing,
    pytest.mark.postgresql,
    pytest.mark.usefixtures("impatient"),
]

COUNT = 500


@pytest.fixture(autouse=True)
def stored(impatient: None) -> None:
    with transaction.atomic():
        send_messages({"destination": "tests.q", "body": n} for n in range(COUNT))


def copies() -> Counter[str]:
    """Count the copies of each message in the queue."""
    return Counter(one.headers["txmsg-id"] for one in QueueMessage.objects.all())


def terminate() -> None:
    """End this connection at the server, as a restart or a failover would."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    settings = connection.get_connection_params()
    known = ("user", "password", "host", "port")
    with psycopg.connect(
        dbname="postgres",
        **{name: settings[name] for name in known if settings.get(name)},
    ) as other:
        other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


def after_the_receipts(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None]
) -> None:
    """Cause `fault` once, after the broker's receipts have arrived and before the rows
    are marked."""
    real, left = DatabaseSession.send, [fault]

    def send(session: Any, batch: Any, **options: Any) -> Any:
        outcomes = real(session, batch, **options)
        if left:
            left.pop()()
        return outcomes

    monkeypatch.setattr(DatabaseSession, "send", send)


def demote() -> None:
    """Make this connection read-only, as a failover would."""
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")


@pytest.mark.parametrize("fault", [terminate, demote])
def test_a_lost_connection_doubles_nothing(
    fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    after_the_receipts(monkeypatch, fault)
    lane = Lane("default", "default")
    try:
        assert lane.dispatch() == COUNT
    finally:
        lane.close()
    assert lane.counts == {"dispatched": COUNT}
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    # What a lease that ended would have let another relay do.
    OutboxMessage.objects.update(lease_until=Now())
    assert ship() == 0
    assert set(copies().values()) == {1}
    assert len(copies()) == COUNT


def test_a_connection_to_a_demoted_server_does_not_go_back_to_the_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg.relay")
    # Its thread has a connection that did not come from the pool.
    notifications.stop_notifiers(30)
    pooled: Any = connection
    pooled.close()
    after_the_receipts(monkeypatch, demote)
    with txmsg(NOTIFY=False), monkeypatch.context() as patch:
        options = {"min_size": 1, "max_size": 1}
        patch.setitem(pooled.settings_dict["OPTIONS"], "pool", options)
        lane = Lane("default", "default")
        try:
            assert lane.dispatch() == COUNT
            assert lane.counts == {"dispatched": COUNT}
        finally:
            lane.close()
            pooled.close()
            pooled.close_pool()
    assert caplog.text.count("retrying to record") == 1


def test_the_lane_waits_for_a_database_that_refuses_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg.relay")
    name = connection.ops.quote_name(str(connection.settings_dict["NAME"]))

    def allow(yes: bool) -> None:
        settings = connection.get_connection_params()
        known = ("user", "password", "host", "port")
        with psycopg.connect(
            dbname="postgres",
            autocommit=True,
            **{one: settings[one] for one in known if settings.get(one)},
        ) as other:
            other.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {yes}")

    def fault() -> None:
        allow(False)
        terminate()

    after_the_receipts(monkeypatch, fault)
    lane = Lane("default", "default")

    def work() -> None:
        lane.dispatch()
        lane.close()
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        # At the first try the connection is lost. At the next ones no server listens.
        wait_until(lambda: caplog.text.count("retrying to record") >= 3)
        assert not lane.counts["dispatched"]
    finally:
        allow(True)
    thread.join(30)
    assert lane.counts["dispatched"] == COUNT
    assert set(copies().values()) == {1}


def test_a_slow_broker_does_not_cost_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker needs longer than the lease to answer. The relay renews the lease, so
    no other relay sends a copy. If the connection ends then, the relay still keeps the
    receipts."""
    slow = threading.Event()

    def take_ones_time() -> None:
        def somebody_else_looks() -> bool:
            other = Lane("default", "default")
            try:
                return other.dispatch() > 0
            finally:
                other.close()

        began = threading.Event()
        for _ in range(90):
            assert not somebody_else_looks()
            began.wait(0.1)
        slow.set()
        terminate()

    after_the_receipts(monkeypatch, take_ones_time)
    with txmsg(RELAY={**IMPATIENT["RELAY"], "LEASE": 3.0}):
        lane = Lane("default", "default")
        try:
            assert lane.dispatch() == COUNT
        finally:
            lane.close()
    assert slow.is_set()
    assert lane.counts == {"dispatched": COUNT}
    assert set(copies().values()) == {1}


def test_a_locked_row_does_not_keep_the_leases_of_others_from_being_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = OutboxMessage.objects.order_by("id").values_list("id", flat=True)
    with psycopg.connect(**connection.get_connection_params()) as operator:

        def wait_for_the_renewal() -> None:
            operator.execute(
                "SELECT 1 FROM django_txmsg_outboxmessage WHERE id = %s FOR UPDATE",
                [first],
            )
            rows = OutboxMessage.objects.filter(pk__in=others)
            claimed_until = rows.latest("lease_until").lease_until
            try:
                wait_until(
                    lambda: not rows.filter(lease_until__lte=claimed_until).exists()
                )
            finally:
                operator.rollback()

        after_the_receipts(monkeypatch, wait_for_the_renewal)
        with txmsg(RELAY={**IMPATIENT["RELAY"], "LEASE": 3.0}):
            lane = Lane("default", "default")
            try:
                assert lane.dispatch() == COUNT
            finally:
                lane.close()
    assert lane.counts == {"dispatched": COUNT}


def test_a_renewal_does_not_lock_settled_rows() -> None:
    token = uuid.uuid4()
    outbox = OutboxMessage.objects
    rows = outbox.claim(broker="default", token=token, lease=60, limit=COUNT)
    settled, *others = [row.id for row in rows]
    outbox.mark_dispatched([settled], token)
    with (
        transaction.atomic(),
        psycopg.connect(**connection.get_connection_params()) as other,
    ):
        assert sorted(outbox.extend([settled, *others], token, 60)) == others
        other.execute(
            "SELECT 1 FROM django_txmsg_outboxmessage WHERE id = %s FOR UPDATE NOWAIT",
            [settled],
        )


def test_rows_that_a_renewal_has_locked_still_belong_to_their_lane() -> None:
    token, locked, back = uuid.uuid4(), threading.Event(), threading.Event()
    rows = OutboxMessage.objects.claim(broker="default", token=token, lease=60, limit=9)

    def renew() -> None:
        with psycopg.connect(**connection.get_connection_params()) as other:
            other.execute("SELECT 1 FROM django_txmsg_outboxmessage FOR UPDATE")
            locked.set()
            assert back.wait(30)

    def still_held() -> list[Claimed]:
        try:
            return settlement.still_held(rows)
        finally:
            connections.close_all()

    lapsed = Lease("default", 60, renew, since=time.monotonic() - 100)
    stop = threading.Event()
    settlement = Settlement("default", token, lapsed, Counter(), stop, Turn())
    with lapsed, ThreadPoolExecutor() as pool:
        assert locked.wait(30)
        held = pool.submit(still_held)
        wait([held], timeout=1.0)  # it waits for the renewal, and has not ended
        back.set()
        assert held.result() == rows


def test_a_lane_that_hangs_ends_no_lease_of_another_lane() -> None:
    """While the thread that renews the leases probes the database, a lane begins to
    release rows, and its connection hangs."""
    renewed = threading.Event()
    long_ago = time.monotonic() - 40
    hangs = Lease("default", 60, lambda: None, since=long_ago)
    other = Lease("default", 60, renewed.set, since=long_ago)
    health = database_health.breaker("default")
    with psycopg.connect(**connection.get_connection_params()) as operator:
        operator.execute("LOCK TABLE django_txmsg_inboxmessage")
        health.failed(OperationalError("the server does not answer"))
        try:
            with hangs:
                wait_until(health.connecting.locked)
                with hangs.between_renewals(), other:
                    operator.rollback()
                    assert renewed.wait(30)
        finally:
            health.worked()


def test_settlements_that_wait_for_a_lock_hold_up_no_other_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a few lanes may use the database at the same time. The settlements of two
    lanes wait for a lock, and a third lane still sends its messages."""
    batch_size, real = COUNT // 2, DatabaseSession.send
    statement = "SELECT 1 FROM django_txmsg_outboxmessage WHERE message_id = %s"
    with psycopg.connect(**connection.get_connection_params()) as operator:

        def send(session: Any, batch: Any, **options: Any) -> Any:
            outcomes = real(session, batch, **options)
            if len(batch) == batch_size:
                operator.execute(
                    f"{statement} FOR UPDATE", [batch[0].headers["txmsg-id"]]
                )
            return outcomes

        monkeypatch.setattr(DatabaseSession, "send", send)
        relay = Relay(["default"], ["default"], batch_size=batch_size, lanes=4)
        with at_work(relay):
            wait_until(lambda: waiting_for_locks() == 2)
            with transaction.atomic():
                send_messages({"destination": "tests.q", "body": n} for n in range(9))
            wait_until(lambda: relay.counts["dispatched"] == 9)
            operator.rollback()
            wait_until(lambda: relay.counts["dispatched"] == COUNT + 9)
    assert set(copies().values()) == {1}


def waiting_for_locks() -> int:
    """Return how many sessions of this database wait for a lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database()"
        )
        (count,) = cursor.fetchone()
    return int(count)
