"""How many round trips to the database a stage needs, counted on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from django_txmsg import send_message, send_messages
from django_txmsg.models import InboxMessage, OutboxMessage
from tests.app.models import Effect
from tests.faults import Proxy
from tests.running import committing, declared, put, thread_of, txmsg

pytestmark = [
    committing,
    pytest.mark.postgresql,
    pytest.mark.usefixtures("impatient"),
]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A counting proxy in front of the database. Queues are in another database."""
    settings = connection.settings_dict
    connection.close()
    # Without notifications, which another connection sends.
    with txmsg(NOTIFY=False), Proxy(int(settings["PORT"])) as proxy:
        monkeypatch.setitem(settings, "HOST", "127.0.0.1")
        monkeypatch.setitem(settings, "PORT", proxy.port)
        monkeypatch.setitem(settings, "CONN_MAX_AGE", None)
        yield proxy
        connection.close()


def nothing(message: Any) -> None:
    """Run no query."""


def a_row(message: Any) -> None:
    """Insert a row of its own."""
    Effect.objects.create(name="counted", message_id=message.id)


def a_row_and_a_message(message: Any) -> None:
    """Insert a row and send a message."""
    a_row(message)
    send_message("tests.next", 1)


def a_row_and_three_messages(message: Any) -> None:
    """Insert a row and send three messages together."""
    a_row(message)
    send_messages({"destination": "tests.next", "body": n} for n in range(3))


@pytest.mark.parametrize(
    ("handler", "trips"),
    [
        (nothing, 2),
        (a_row, 3),
        (a_row_and_a_message, 4),
        (a_row_and_three_messages, 4),
    ],
)
def test_a_stage_costs_two_round_trips_beside_its_own_statements(
    handler: Any, trips: int, wire: Proxy
) -> None:
    """Recorded, begun and taken in one; the commit is the other."""
    with declared(handler, broker="apart") as stage:
        thread = thread_of(stage)
        try:
            counted = []
            for _ in range(8):
                put(stage.destination, broker="apart")
                before = wire.round_trips
                thread._step()
                counted.append(wire.round_trips - before)
        finally:
            thread._close()
    assert InboxMessage.objects.exclude(processed_at=None).count() == 8
    assert OutboxMessage.objects.count() in (0, 8, 24)
    # The first one connects. One that takes longer than 20 ms is marked once more.
    assert min(counted) == trips


def test_a_batch_shares_the_round_trips_of_its_transaction(wire: Proxy) -> None:
    with declared(a_row, broker="apart", batch=20) as stage:
        thread = thread_of(stage)
        try:
            put(stage.destination, broker="apart")
            thread._step()
            for _ in range(20):
                put(stage.destination, broker="apart")
            before = wire.round_trips
            thread._step()
            counted = wire.round_trips - before
        finally:
            thread._close()
    assert Effect.objects.count() == 21
    # For each message its INSERT and a savepoint, and a few for all.
    assert counted <= 2 * 20 + 6
