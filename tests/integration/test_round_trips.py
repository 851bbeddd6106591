"""The number of round trips to the database that a stage needs, counted on the
network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import DatabaseError, connection

from django_txmsg import Destination, send_message, send_messages, stages
from django_txmsg.consuming import protocol
from django_txmsg.consuming.stage_thread import StageThread
from django_txmsg.envelope.message import new_id
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.flows import Flow, Next, step
from django_txmsg.models import FlowStep, InboxMessage, OutboxMessage, Run
from tests.app.models import Effect
from tests.faults import ANSWERS, REQUESTS, Proxy, wait_until
from tests.running import committing, declared, put, thread_of, txmsg
from tests.shelved_flows import at_hand, shelved

pytestmark = [
    committing,
    pytest.mark.postgresql,
    pytest.mark.usefixtures("impatient"),
]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the database, which counts round trips. The queues are in
    another database."""
    # However slow the machine is: a delivery that takes long is marked once more.
    monkeypatch.setattr(protocol, "MARK_AGAIN_AFTER", 60)
    settings = connection.settings_dict
    connection.close()
    # Without notifications, which another connection sends.
    with txmsg(NOTIFY=False), Proxy(int(settings["PORT"])) as proxy:
        monkeypatch.setitem(settings, "HOST", "127.0.0.1")
        monkeypatch.setitem(settings, "PORT", proxy.port)
        monkeypatch.setitem(settings, "CONN_MAX_AGE", None)
        yield proxy
        connection.close()


asked = Destination("tests.asked", int, reply=int)


@shelved
class Round(Flow[int, int], name="tests.round", within=None, broker="apart"):
    text: str = ""

    @step
    def start(self, number: int) -> Next[int]:
        return self.ask(asked, number, then=self.replied)

    @step
    def replied(self, number: int) -> Next[int]:
        self.text = str(number)
        return self.ask(asked, number, then=self.replied)


def nothing(message: Any) -> None:
    """A handler that runs no query."""


def a_row(message: Any) -> None:
    """A handler that inserts a row."""
    Effect.objects.create(name="counted", message_id=message.id)


def a_row_and_a_message(message: Any) -> None:
    """A handler that inserts a row and sends a message."""
    a_row(message)
    send_message("tests.next", 1)


def a_row_and_three_messages(message: Any) -> None:
    """A handler that inserts a row and sends three messages together."""
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
    """In addition to the handler's statements, a stage needs two round trips. The first
    records the arrival, begins the transaction and locks the row. The second
    commits."""
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
    # The first one connects.
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


@contextmanager
def rounds() -> Iterator[StageThread]:
    """Start a run, and return the stage thread that executes its steps."""
    with at_hand(Round):
        begin, go_on = map(thread_of, stages.find(["tests.round", "tests.round.steps"]))
        try:
            put("tests.round", b"1", broker="apart")
            begin._step()
            yield go_on
        finally:
            begin._close()
            go_on._close()


def reply(number: int) -> None:
    """Answer the request for which the run waits."""
    run = Run.objects.get()
    headers = {
        "txmsg-id": str(new_id()),
        "content-type": "application/json",
        "txmsg-ticket": f"{run.run_id.hex}.{run.turn.hex}",
    }
    put("tests.round.steps", str(number).encode(), headers, broker="apart")


def test_a_step_costs_the_round_trips_of_a_stage_that_keeps_its_state(
    wire: Proxy,
) -> None:
    """A step needs three more round trips than a stage: to lock and read the run, to
    store the request, and to write the run together with its history."""
    with rounds() as go_on:
        counted = []
        for number in range(8):
            reply(number)
            before = wire.round_trips
            go_on._step()
            counted.append(wire.round_trips - before)
    assert FlowStep.objects.count() == 9
    assert OutboxMessage.objects.filter(destination="tests.asked").count() == 9
    assert min(counted) == 5


@pytest.mark.parametrize("way", [REQUESTS, ANSWERS])
def test_a_step_whose_connection_breaks_at_any_statement_commits_once(
    wire: Proxy, way: str
) -> None:
    """The connection breaks at each of the step's five round trips, before or after the
    server executes the statement. The step still commits once."""
    with rounds() as go_on:
        for trip in range(1, 6):
            reply(trip)
            before = FlowStep.objects.count(), wire.accepted
            wire.cut_at(trip, way)

            def gone_on(steps: int = before[0]) -> bool:
                with suppress(DatabaseError, BrokerUnavailable):
                    go_on._step()
                connection.close()
                return FlowStep.objects.count() > steps

            wait_until(gone_on)
            assert wire.accepted > before[1]
        go_on._step()  # a delivery that was not acknowledged
    assert FlowStep.objects.count() == 6
    assert OutboxMessage.objects.filter(destination="tests.asked").count() == 6
    assert Run.objects.get().state == '{"text":"5"}'
    done = InboxMessage.objects.filter(stage="tests.round.steps")
    assert done.exclude(processed_at=None).count() == 5
