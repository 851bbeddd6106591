"""A failed message is parked: the inbox keeps the complete message until it is due."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from django.core.management import call_command
from django.db import transaction

from django_txmsg import Redeliver, Refuse
from django_txmsg.consuming import stage_thread
from django_txmsg.consuming.limits import Throttle
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import Dead, RedeliveryPolicy
from django_txmsg.errors import MAX_SECONDS
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.models.fields import clock
from django_txmsg.models.queue import QueueMessage
from django_txmsg.monitoring import alarms, status
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect
from tests.factories import ago
from tests.faults import wait_until
from tests.integration.test_operators_at_work import meanwhile
from tests.running import (
    Script,
    committing,
    declared,
    put,
    running,
    send,
    step,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def left_in_queue(destination: str) -> int:
    return QueueMessage.objects.filter(queue=destination).count()


def test_parked_messages_do_not_delay_others() -> None:
    def handler(message: Message) -> None:
        if message.body == "poison":
            raise ValueError
        Effect.objects.create(name=message.body, message_id=str(message.id))

    slow = RedeliveryPolicy(initial_delay=600.0, jitter=0.0, max_delay=600.0)
    with declared(handler, redelivery=slow) as stage:
        for _ in range(5):
            send(stage.destination, "poison")
        send(stage.destination, "good")
        step(stage, times=6)
        assert left_in_queue(stage.destination) == 0
    assert Effect.objects.count() == 1
    rows = InboxMessage.objects.filter(due_at__isnull=False)
    assert rows.count() == 5
    for row in rows:
        pause = (row.due_at - row.started_at).total_seconds()
        assert 599 < pause < 640


@dataclass
class Note:
    """A body that lists how often it was read."""

    text: str
    readings: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        self.readings.append(self.text)


def test_parked_message_whose_workers_died_is_buried_without_being_read() -> None:
    """The body itself may have killed the workers that read it."""

    def handler(note: Note) -> None:
        raise ValueError

    with declared(handler, redelivery=RedeliveryPolicy(initial_delay=0.0)) as stage:
        put(stage.destination, b'{"text": "deadly"}')
        step(stage)
        before = len(Note.readings)
        # As if the workers of all later attempts had died.
        InboxMessage.objects.update(attempts=stage.policy.max_begun)
        step(stage)
    assert DeadLetter.objects.get().reason == "worker_lost"
    assert len(Note.readings) == before


def test_a_slow_attempt_that_fails_keeps_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_thread, "LEASE", 0.2)
    claimed: list[object] = []

    class TooSlow(Refuse):
        def __str__(self) -> str:
            """Let another worker look for the message while its failure is noted."""
            rows = InboxMessage.objects
            claimed.append(rows.claim_parked(stage.name, uuid.uuid4(), 60.0))
            return "too slow"

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 0.5)
        raise TooSlow("never")

    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=2)

    assert claimed
    assert set(claimed) == {None}
    assert DeadLetter.objects.get().reason == "refused"


def test_throttled_stage_claims_a_parked_message_in_its_turn() -> None:
    """A thread waits for its turn without a parked message. If it had claimed the
    message before, the lease might end during the wait: other threads would count
    attempts, and bury the message although its handler has hardly run."""
    leased_until: list[dt.datetime] = []

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError
        leased_until.append(InboxMessage.objects.get().lease_until)

    throttle = Throttle(after=1)
    throttle.note(Dead("refused"))
    with declared(handler, transaction="none") as stage, ExitStack() as held:
        put(stage.destination)
        step(stage)
        held.enter_context(throttle.turn(lambda: False))
        with running(stage, throttle=throttle) as (thread,):
            wait_until(lambda: thread.on_parked)
            its_turn = clock("default")
            held.close()
            wait_until(lambda: leased_until)
    assert leased_until[0] - dt.timedelta(seconds=stage_thread.LEASE) >= its_turn


@pytest.mark.postgresql
def test_idle_thread_does_not_query_all_the_time_for_what_a_handler_has_locked() -> (
    None
):
    """A handler that runs for longer than the lease cannot renew it: its transaction
    has locked the row. A stage with a rate pauses until its next message is due."""
    later = RedeliveryPolicy(initial_delay=3600.0, max_delay=7200.0)
    script = Script(ValueError(), ValueError())
    with declared(script, rate="600/m", redelivery=later) as stage:
        for _ in range(2):
            send(stage.destination)
            step(stage)
        waits, locked = InboxMessage.objects.order_by("-pk")
        InboxMessage.objects.filter(pk=locked.pk).update(due_at=ago(minutes=1))
        InboxMessage.objects.filter(pk=waits.pk).update(due_at=ago(seconds=-100))
        parking = stage_thread.Parking(stage)
        found = meanwhile(
            lambda: InboxMessage.objects.select_for_update().get(pk=locked.pk),
            parking.claim,
        )
    assert found is None
    assert 60 < parking.pause <= 100


def test_redeliver_decides_when_the_next_attempt_is_due() -> None:
    script = Script(Redeliver(after=900.0))
    with declared(script) as stage:
        send(stage.destination)
        step(stage)
    row = InboxMessage.objects.get()
    assert 899 < (row.due_at - row.started_at).total_seconds() < 940


def test_the_longest_delay_has_a_place_in_the_database() -> None:
    with declared(Script(Redeliver(after=MAX_SECONDS))) as stage:
        with transaction.atomic():
            longest = dt.timedelta(seconds=MAX_SECONDS)
            send_message("tests.later", 1, delay=longest, expires=longest)
        send(stage.destination)
        step(stage)
        row = InboxMessage.objects.get()
    assert row.due_at - row.started_at >= longest
    assert not DeadLetter.objects.exists()


def test_a_parked_message_is_whole_and_outlives_its_process() -> None:
    """The inbox keeps the complete message, and another process continues with it."""
    got: list[Message] = []

    def handler(message: Message) -> None:
        got.append(message)
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(handler) as stage:
        send(stage.destination, b"\x00\xff", headers={"a": "b"}, key="k")
        step(stage)
        assert left_in_queue(stage.destination) == 0
        step(stage)
    first, second = got
    assert (second.delivery_attempt, second.redelivered) == (2, True)
    for name in ("id", "body", "headers", "key", "created_at", "service"):
        assert getattr(first, name) == getattr(second, name), name
    row = InboxMessage.objects.get()
    assert (row.state, row.body, row.headers, row.due_at) == ("processed",) + (
        None,
    ) * 3


def test_messages_of_an_unknown_stage_wait_and_are_reported() -> None:
    """A message is parked for a stage that no process here declares. It is not buried,
    because a process of another version may have the stage. It is reported as
    overdue."""
    script = Script(ValueError())
    with declared(script, "tests.unknown") as stage:
        send(stage.destination)
        step(stage)
    InboxMessage.objects.update(due_at=ago(minutes=5))
    with declared(script) as another, running(another) as (thread,):
        put(another.destination)
        wait_until(lambda: len(script.attempts) == 2)
        wait_until(lambda: thread.dry)
    facts = status.read()
    assert (facts.parked.overdue, alarms.well(facts)) == (1, False)
    assert not facts.stages["tests.unknown"].known
    assert InboxMessage.objects.get(stage="tests.unknown").attempts == 1
    assert not DeadLetter.objects.exists()
    with declared(script, "tests.unknown") as stage:
        step(stage)
    assert InboxMessage.objects.get(stage=stage.name).state == "processed"


def test_a_foreign_message_keeps_its_identity_when_parked() -> None:
    got: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        got.append(message.id)
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(handler) as stage:
        put(stage.destination, b"1", {"content-type": "application/json"})
        step(stage, times=2)
    assert len(set(got)) == 1
    assert len(got) == 2
    assert InboxMessage.objects.get().state == "processed"


def test_due_messages_of_a_thousand_stages_are_found() -> None:
    """SQLite refuses a query that joins more than 500 SELECTs by UNION ALL."""
    names = [f"tests.many{number}" for number in range(1000)]
    for name in (names[0], names[-1]):
        InboxMessage.objects.create(
            stage=name, message_id=uuid.uuid4(), destination=name,
            due_at=ago(seconds=1), headers={}, body=b"x",
        )  # fmt: skip
    found = InboxMessage.objects.due_stages(dict.fromkeys(names))
    assert found == {names[0], names[-1]}


def test_a_copy_of_a_parked_message_is_dropped() -> None:
    slow = RedeliveryPolicy(initial_delay=600.0)
    script = Script(ValueError())
    with declared(script, redelivery=slow) as stage:
        message = send(stage.destination)
        step(stage)
        put(stage.destination, message_id=message.id)
        step(stage)
        assert left_in_queue(stage.destination) == 0
    assert script.attempts == [1]
    assert InboxMessage.objects.get().deliveries == 2


def test_a_database_error_is_the_messages_failure_and_is_parked() -> None:
    """A handler's query fails and breaks the transaction. The message is parked, and
    its next attempt gets a usable connection."""

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            Effect.objects.raw("SELECT nothing FROM nowhere")[0]
        Effect.objects.create(name="done", message_id=str(message.id))

    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=2)
    assert Effect.objects.count() == 1
    assert InboxMessage.objects.get().attempts == 2


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc", "broker_only"])
def test_a_stop_during_a_blocking_wait_keeps_no_lease(transaction: Any) -> None:
    """A stage with mode "blocking" stops while it waits for the next attempt of a
    parked message. The row keeps no lease, so another worker can process it
    immediately."""
    slow = RedeliveryPolicy(mode="blocking", initial_delay=600.0, max_delay=600.0)
    script = Script(Refuse(), ValueError())
    with declared(script, transaction=transaction, redelivery=slow) as stage:
        put(stage.destination)
        step(stage)
        call_command("dead_letters", "redeliver", "--all", verbosity=0)
        with running(stage):
            wait_until(lambda: Attempt.objects.filter(exception="ValueError").exists())
        row = InboxMessage.objects.get()
        assert (row.attempts, row.lease_token, row.lease_until) == (1, None, None)
        step(stage)
    assert script.attempts == [1, 1, 2]
    assert InboxMessage.objects.get().state == "processed"
