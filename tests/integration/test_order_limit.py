"""An ordered stage stops receiving if too many of its messages are blocked, and reports
this."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from django_txmsg import health, metrics
from django_txmsg.consuming import limits, ordering
from django_txmsg.consuming.consumer import Consumer, wake_for_parked
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import InboxMessage, StageState
from django_txmsg.models.queue import QueueMessage
from django_txmsg.monitoring import alarms, status
from django_txmsg.stages import Stage
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import (
    committing,
    declared,
    put,
    running,
    step,
    thread_of,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body)[:9], message_id=str(message.id))


def headers(
    key: str, own: uuid.UUID, after: uuid.UUID | None, second: int = 0
) -> dict[str, str]:
    found = {
        "txmsg-id": str(own),
        "content-type": "application/json",
        "txmsg-key": key,
    }
    if after is not None:
        found["txmsg-after"] = f"{after};at=2026-01-01T00:00:{second:02}+00:00"
    return found


def chain(stage: Stage, count: int, body: bytes = b"1") -> uuid.UUID:
    """Put `count` messages of one key into the stage's queue. The predecessor of the
    first message is missing. Return the missing message's id."""
    first = before = uuid.uuid4()
    for number in range(count):
        own = uuid.uuid4()
        put(stage.destination, body, headers("stuck", own, before, number))
        before = own
    return first


def waiting() -> int:
    return InboxMessage.objects.filter(waits_for__isnull=False).count()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stage count its blocked messages each time it checks the limit."""
    monkeypatch.setattr(limits, "LOOK", 0.0)
    monkeypatch.setattr(limits, "SHARE", 0)


@pytest.mark.parametrize(
    ("limit", "body"),
    [({"ORDER_MAX_WAITING": 10}, b"1"), ({"ORDER_MAX_BYTES": 20_000}, b"1" * 1_900)],
)
def test_full_stage_stops_receiving_and_resumes_when_there_is_room(
    limit: dict[str, int], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_PAUSE", 600.0)
    full = StageState.objects.filter(full_since__isnull=False)
    with txmsg(**limit), declared(effect, ordered="block") as stage:
        chain(stage, 20, body)
        with running(stage, concurrency=2, room=limits.Room(stage)) as threads:
            wait_until(full.exists, deadline=60)
            wait_until(lambda: all(one.receives_nothing for one in threads))
            # Each of its threads may have been processing one message more.
            assert 8 <= waiting() <= 12
            assert QueueMessage.objects.filter(queue=stage.destination).exists()
            InboxMessage.order.let_go(stage.name, "stuck", link="txmsg-after")
            wait_until(lambda: Effect.objects.count() == 20, deadline=60)
            wait_until(lambda: not full.exists(), deadline=60)


def test_a_full_stage_takes_one_message_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage has too many blocked messages. The predecessor of these messages may
    still be in the queue, behind messages that would be blocked too. To reach the
    predecessor, the stage receives one message now and then."""
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(limits, "LONGEST_PAUSE", 0.01)
    with txmsg(ORDER_MAX_WAITING=5), declared(effect, ordered="block") as stage:
        first = chain(stage, 12)
        put(stage.destination, b"0", headers("stuck", first, None))
        with running(stage, concurrency=2):
            wait_until(lambda: Effect.objects.count() == 13, deadline=60)
            full = StageState.objects.filter(full_since__isnull=False)
            wait_until(lambda: not full.exists(), deadline=60)


def test_a_full_stage_does_not_miss_a_message_of_its_queue_after_a_restart() -> None:
    """The missing predecessor is still in the queue, and the stage was not able to read
    the queue since its start. So the predecessor is not lost."""
    with declared(effect, ordered="skip") as stage:
        first = chain(stage, 2)
        step(stage, times=2)
        assert waiting() == 2
        put(stage.destination, b"0", headers("stuck", first, None))
        with txmsg(ORDER_MAX_WAITING=1):
            room = limits.Room(stage)
            thread = thread_of(stage, room=room)
            for _ in range(3):
                InboxMessage.objects.filter(waits_for__isnull=False).update(
                    waits_since=Now() - timedelta(hours=1), due_at=Now()
                )
                wake_for_parked([thread])
                thread._step()
            assert waiting() == 2
            assert room.full

            def all_done() -> bool:
                passes(room)
                thread._step()
                return Effect.objects.count() == 3

            wait_until(all_done)
            thread._close()
    assert Effect.objects.earliest("id").name == "0"


def test_parked_messages_use_up_no_permission_to_receive() -> None:
    """A full stage processes messages that their predecessors have released. It may
    still receive one message afterwards."""
    with declared(effect, ordered="block") as stage:
        chain(stage, 4)
        step(stage, times=4)
        with txmsg(ORDER_MAX_WAITING=1):
            room = limits.Room(stage)
            thread = thread_of(stage, room=room)
            room.look()
            assert room.full
            InboxMessage.order.let_go(stage.name, "stuck", link="txmsg-after")
            thread.parked_due.set()
            passes(room)
            for _ in range(4):
                thread._step()
            thread._close()
        assert Effect.objects.count() == 4
        assert room.admits()


def test_a_full_stage_does_not_keep_a_consumer_running_that_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FIRST_PAUSE", 10.0)
    with txmsg(ORDER_MAX_WAITING=2), declared(effect, ordered="block") as stage:
        chain(stage, 4)
        Consumer([stage]).run(once=True)
        assert 2 <= waiting() < 4


def test_a_full_stage_processes_a_failed_message_of_mode_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first message of a key fails once, and its followers fill the stage. The next
    attempt does not depend on a message that the stage must receive."""
    monkeypatch.setattr(limits, "FIRST_PAUSE", 600.0)

    def handler(message: Message) -> None:
        if message.body == 0 and message.delivery_attempt == 1:
            raise ValueError
        effect(message)

    policy = RedeliveryPolicy(mode="broker", initial_delay=0.0)
    with (
        txmsg(ORDER_MAX_WAITING=2),
        declared(handler, ordered="block", redelivery=policy) as stage,
    ):
        one, two, three = (uuid.uuid4() for _ in range(3))
        put(stage.destination, b"0", headers("k", one, None))
        put(stage.destination, b"1", headers("k", two, one))
        put(stage.destination, b"2", headers("k", three, two, 1))
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 3, deadline=60)


def test_a_full_stage_pauses_longer_each_time() -> None:
    with txmsg(ORDER_MAX_WAITING=1), declared(effect, ordered="block") as stage:
        chain(stage, 1)
        step(stage)
        room = limits.Room(stage)
        assert room.admits()
        room.look()
        assert room.full
        assert not room.admits()
        assert [room.admits() for _ in range(3) if passes(room)] == [True] * 3
        assert room._pause == 8 * limits.FIRST_PAUSE


def passes(room: limits.Room) -> bool:
    """End the pause of a full stage."""
    room._next_at = 0.0
    return True


def test_without_a_limit_nothing_is_counted() -> None:
    limits = {"ORDER_MAX_WAITING": 0, "ORDER_MAX_BYTES": 0}
    with txmsg(**limits), declared(effect, ordered="block") as stage:
        chain(stage, 3)
        step(stage, times=3)
        assert waiting() == 3
        assert not StageState.objects.filter(full_since__isnull=False).exists()


@pytest.mark.parametrize(
    ("limit", "changed"),
    [
        (0, {"ordered": "block"}),
        (2, {}),
        (2, {"transaction": "none"}),
        (2, {"transaction": "broker_only"}),
    ],
)
def test_a_stage_is_full_no_more_without_its_limit_or_its_order(
    limit: int, changed: dict[str, Any]
) -> None:
    with (
        txmsg(ORDER_MAX_WAITING=2),
        declared(effect, name="tests.full", ordered="block") as stage,
    ):
        chain(stage, 2)
        step(stage, times=3)
        assert waiting() == 2
        assert StageState.objects.filter(full_since__isnull=False).exists()
    with (
        txmsg(ORDER_MAX_WAITING=limit, ORDER_MAX_BYTES=0),
        declared(effect, stage.destination, name="tests.full", **changed) as stage,
    ):
        ordering.begin([stage])
        assert not StageState.objects.filter(full_since__isnull=False).exists()
        step(stage, times=2)
        assert Effect.objects.count() == (0 if limit == 0 else 2)


def test_a_full_stage_is_seen_everywhere(client: Client) -> None:
    with txmsg(ORDER_MAX_WAITING=2), declared(effect, ordered="block") as stage:
        chain(stage, 2, b"1" * 1_000)
        step(stage, times=3)
        picture = status.read()
        place = picture.stages[stage.name]
        assert place.line.count == 2
        assert 2_000 <= place.line.size < 4_000
        assert place.full_since is not None
        assert not alarms.well(picture)
        told = [str(one) for one in alarms.of(picture)]
        assert any(f"Stage {stage.name} receives nothing since" in one for one in told)
        found = health.look("default")
        assert found["ordered"] == {"waiting": 2, "held_keys": 0, "full_stages": 1}
        assert found["status"] == "degraded"
        InboxMessage.objects.update(waits_since=Now() - timedelta(hours=1))
        StageState.objects.update(full_since=None)
        found = health.look("default")
        assert found["ordered"] == {"waiting": 2, "held_keys": 1, "full_stages": 0}
        assert found["status"] in ("late", "degraded")  # nobody runs the stage
        gauges: dict[str, Any] = {
            one.name: {of.labels["stage"]: of.value for of in one.samples}
            for one in metrics.Collector().collect()
            if one.name.startswith("txmsg_stage_")
        }
        assert gauges["txmsg_stage_blocked"][stage.name] == 2
        assert gauges["txmsg_stage_blocked_bytes"][stage.name] == place.line.size
        assert gauges["txmsg_stage_held_keys"][stage.name] == 1
        assert gauges["txmsg_stage_blocked_oldest_age_seconds"][stage.name] > 3000
        assert gauges["txmsg_stage_full"][stage.name] == 0
