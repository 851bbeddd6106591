"""What one claim brings into memory is bounded in bytes, not only in rows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.models import OutboxMessage, claiming
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.budget import Budget
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.relay import Relay
from django_txmsg.relaying.turn import Turn
from django_txmsg.sending.outbox import send_messages
from tests.running import committing, ship, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the budget, so that the test's bodies can be small."""
    monkeypatch.setattr(claiming, "MAX_BYTES", 1000)


def store(*sizes: int, key: str | None = None) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": b"x" * size, "key": key}
            for size in sizes
        )


def sizes_claimed() -> list[int]:
    claimed = OutboxMessage.objects.claim(
        broker="default", token=uuid.uuid4(), lease=60, limit=100
    )
    return [len(row.body) for row in claimed]


def test_claim_is_limited_in_bytes_and_the_next_takes_the_rest() -> None:
    store(400, 500, 300, 100)
    assert sizes_claimed() == [400, 500]
    assert sizes_claimed() == [300, 100]


def test_a_larger_message_goes_alone() -> None:
    store(5000, 10, 10)
    assert sizes_claimed() == [5000]
    assert sizes_claimed() == [10, 10]


@pytest.mark.parametrize("key", [None, "order-1"])
def test_large_messages_leave_in_order(key: str | None) -> None:
    store(900, 900, 5000, 1, 2, 3000, 3, key=key)
    ship()
    rows = QueueMessage.objects.filter(queue="tests.q").order_by("id")
    assert [len(one.body) for one in rows] == [900, 900, 5000, 1, 2, 3000, 3]


class Counted(DatabaseBroker):
    """The embedded broker, which counts the bytes that are being sent at a time."""

    lock, now, most = threading.Lock(), 0, 0

    def open(self, **options: Any) -> DatabaseSession:
        session = super().open(**options)
        send = session.send

        def counted(batch: Sequence[Outgoing], **more: Any) -> Any:
            size = sum(len(one.body) for one in batch)
            with Counted.lock:
                Counted.now += size
                Counted.most = max(Counted.most, Counted.now)
            threading.Event().wait(0.05)  # as a server far away
            try:
                return send(batch, **more)
            finally:
                with Counted.lock:
                    Counted.now -= size

        session.send = counted  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([900] * 16, 1000), ([200] * 40, 1000), ([5000, 100, 900, 3000] * 4, 5750)],
)
def test_lanes_hold_no_more_together_and_leave_nothing(
    sizes: list[int], most: int
) -> None:
    """Each lane used to have the whole budget, so four lanes had four times as much."""
    Counted.most = 0
    with txmsg(BROKERS={"default": {"BACKEND": f"{__name__}.Counted"}}):
        store(*sizes)
        Relay(["default"], ["default"], lanes=4).run(once=True)
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert QueueMessage.objects.filter(queue="tests.q").count() == len(sizes)
    assert 0 < Counted.most <= most


def test_prefetch_is_limited_in_bytes() -> None:
    QueueMessage.objects.bulk_create(
        QueueMessage(queue="tests.q", body=b"x" * size) for size in (600, 400, 1, 5000)
    )

    def claim() -> list[int]:
        rows = QueueMessage.objects.claim("tests.q", uuid.uuid4(), limit=10, lease=60)
        return [len(body) for _, _, body, _ in rows]

    assert claim() == [600, 400]
    assert claim() == [1]
    assert claim() == [5000]


@pytest.mark.postgresql
def test_a_large_message_that_another_lane_looks_at_is_not_left_behind() -> None:
    """The other lane may not claim it, but its attempt locks the row for a moment, and
    SKIP LOCKED hides it from the lane that may."""
    store(5000)
    budget, looks = Budget(8), iter([True])

    class Turns(Turn):
        @contextmanager
        def at_database(self) -> Iterator[None]:
            with ExitStack() as stack, super().at_database():
                if next(looks, False):
                    look(stack)
                yield

    def look(stack: ExitStack) -> None:
        other = stack.enter_context(psycopg.connect(**parameters))
        other.execute("SELECT id FROM django_txmsg_outboxmessage FOR UPDATE")
        with budget.part(threading.Event()) as part:
            assert part is not None
            assert not part.larger
            budget.claimed(part, 0)

    wanted = ("host", "port", "user", "password", "dbname")
    given = connection.get_connection_params()
    parameters = {name: given[name] for name in wanted if name in given}
    lane = Lane("default", "default", turn=Turns(), budget=budget)
    try:
        assert lane.dispatch() == 1
    finally:
        lane.close()
