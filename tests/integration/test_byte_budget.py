"""What one claim brings into memory is bounded in bytes, not only in rows."""

from __future__ import annotations

import uuid

import pytest
from django.db import transaction

from django_txmsg.models import OutboxMessage, claiming
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_messages
from tests.running import committing, ship

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it small, so that the test's bodies can be."""
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


def test_a_relay_takes_so_many_bytes_and_comes_again() -> None:
    store(400, 500, 300, 100)
    assert sizes_claimed() == [400, 500]
    assert sizes_claimed() == [300, 100]


def test_a_larger_message_goes_alone() -> None:
    store(5000, 10, 10)
    assert sizes_claimed() == [5000]
    assert sizes_claimed() == [10, 10]


@pytest.mark.parametrize("key", [None, "order-1"])
def test_all_of_them_leave_in_order(key: str | None) -> None:
    store(900, 900, 5000, 1, 2, 3000, 3, key=key)
    ship()
    rows = QueueMessage.objects.filter(queue="tests.q").order_by("id")
    assert [len(one.body) for one in rows] == [900, 900, 5000, 1, 2, 3000, 3]


def test_a_consumer_takes_so_many_bytes_ahead() -> None:
    QueueMessage.objects.bulk_create(
        QueueMessage(queue="tests.q", body=b"x" * size) for size in (600, 400, 1, 5000)
    )

    def claim() -> list[int]:
        rows = QueueMessage.objects.claim("tests.q", uuid.uuid4(), limit=10, lease=60)
        return [len(body) for _, _, body, _ in rows]

    assert claim() == [600, 400]
    assert claim() == [1]
    assert claim() == [5000]
