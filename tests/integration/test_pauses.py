"""A full destination is paused and no attempt is counted. Other destinations are not
affected.

The broker here is the embedded one, with queues of limited length. `test_refusals.py`
uses real servers.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from django_txmsg import tasks
from django_txmsg.consuming import subscription
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    Worker,
    claiming,
)
from django_txmsg.monitoring.presence import Presence
from django_txmsg.relaying import lane as lanes
from django_txmsg.relaying import limits
from django_txmsg.relaying.dispatcher import dispatch_inline
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime import breaker
from django_txmsg.sending.outbox import send_message, send_messages
from tests.faults import wait_until
from tests.running import (
    IMPATIENT,
    at_work,
    committing,
    declared,
    put,
    running,
    txmsg,
)
from tests.sampling import sample
from tests.short_queues import ROOM, TRIED

pytestmark = committing

BROKER = {"BACKEND": "tests.short_queues.ShortQueues", "URL": "database://"}
FULL, OK = "tests.full", "tests.ok"


@pytest.fixture(autouse=True)
def _short_queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.05)
    ROOM.clear()
    TRIED.clear()
    with txmsg(BROKERS={"default": BROKER}, RELAY=relaying()):
        yield


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make pauses so long that no trial batch is sent during the test."""
    monkeypatch.setattr(limits, "FIRST_PAUSE", 60.0)
    with txmsg(
        BROKERS={"default": BROKER},
        RELAY=relaying(BREAKER_MAX_PAUSE=60.0, BATCH_SIZE=10),
    ):
        yield


def relaying(**more: Any) -> dict[str, Any]:
    return {
        **IMPATIENT["RELAY"], "BREAKER_MAX_PAUSE": 0.2, "MAX_ATTEMPTS": 1, **more,
    }  # fmt: skip


def store(*messages: tuple[str, str | None]) -> None:
    """Store messages, each given by its destination and key. The bodies are consecutive
    numbers."""
    begin = OutboxMessage.objects.count()
    with transaction.atomic():
        send_messages(
            {"destination": destination, "body": n, "key": key}
            for n, (destination, key) in enumerate(messages, begin)
        )


def queued(destination: str) -> list[int]:
    rows = QueueMessage.objects.filter(queue=destination).order_by("id")
    return [int(bytes(one.body)) for one in rows]


def nothing_is_lost_or_blamed() -> None:
    assert not DeadLetter.objects.exists()
    assert not OutboxMessage.objects.exclude(attempts=0).exists()


def test_a_full_destination_waits_and_the_other_one_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "django_txmsg.breaker")
    ROOM[FULL] = 3
    store(*[(FULL, f"k{n % 4}") for n in range(40)], *[(OK, None)] * 200)
    with at_work(Relay(["default"], ["default"])):
        wait_until(lambda: len(queued(OK)) == 200)
        # Tried again and again, and with growing pauses: nothing is blamed.
        wait_until(lambda: TRIED[FULL] > 60)
        assert len(queued(FULL)) == 3
        rows = OutboxMessage.objects.filter(destination=FULL, dispatched_at=None)
        assert "is full: 0 places left" in {row.last_error[11:34] for row in rows} or (
            rows.filter(last_error__contains="is full").exists()
        )
        (outage,) = breaker.outages()
        assert (outage.kind, outage.name) == ("destination", f"{FULL} on default")
        del ROOM[FULL]
        wait_until(lambda: len(queued(FULL)) == 40)
    nothing_is_lost_or_blamed()
    for key in range(4):
        assert [n for n in queued(FULL) if n % 4 == key] == list(range(key, 40, 4))
    said = [one.getMessage() for one in caplog.records if one.levelno > logging.INFO]
    assert len(said) == 1, said
    assert f"destination '{FULL} on default' cannot be used" in said[0]


@pytest.mark.usefixtures("long_pauses")
def test_a_paused_backlog_fills_no_batch() -> None:
    """The oldest messages fill several batches, and go to a paused destination. Later
    messages to another destination are sent."""
    ROOM[FULL] = 0
    store(*[(FULL, None)] * 300)
    lane = Lane("default", "default")
    assert lane.dispatch() == 10  # finds out
    store(*[(OK, None)] * 35)
    while lane.dispatch():
        pass
    lane.close()
    assert len(queued(OK)) == 35
    assert TRIED[FULL] == 10


def test_messages_that_follow_paused_ones_by_key_fill_no_batch() -> None:
    ROOM[FULL] = 0
    store(*[(FULL, f"k{n}") for n in range(30)])
    with txmsg(BROKERS={"default": BROKER}, RELAY=relaying(BATCH_SIZE=10)):
        lane = Lane("default", "default")
        lane.dispatch()
        store(*[(OK, f"k{n}") for n in range(30)], (OK, "free"), (OK, None))
        while lane.dispatch():
            pass
        assert queued(OK) == [60, 61]
        del ROOM[FULL]
        wait_until(lambda: lane.dispatch() == 0 and len(queued(OK)) == 32)
        lane.close()
    assert sorted(queued(FULL)) == list(range(30))


def test_a_trial_is_small_and_grows_while_all_of_it_is_stored() -> None:
    ROOM[FULL] = 0
    store(*[(FULL, None)] * 200)
    lane = Lane("default", "default")
    assert lane.dispatch() == 200
    sizes: list[int] = []
    del ROOM[FULL]
    wait_until(lambda: sizes.append(lane.dispatch()) or sum(sizes) == 200)
    lane.close()
    assert [size for size in sizes if size] == [10, 20, 40, 80, 50]


def test_a_larger_body_than_a_lane_s_share_leaves_its_pause_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial message is larger than a lane's share of the byte limit. It is sent
    even while smaller messages keep coming."""
    monkeypatch.setattr(claiming, "MAX_BYTES", 1000)
    monkeypatch.setattr(limits, "IDLE", 0.05)
    ROOM[FULL] = 0
    with transaction.atomic():
        send_message(FULL, b"x" * 5000)
    with at_work(Relay(["default"], ["default"], lanes=4)):
        wait_until(lambda: TRIED[FULL] >= 3)
        del ROOM[FULL]
        for n in range(50):
            with transaction.atomic():
                send_message(OK, b"x" * (150 + n))
        pending = OutboxMessage.objects.filter(dispatched_at=None)
        wait_until(lambda: not pending.exists())
    nothing_is_lost_or_blamed()
    assert QueueMessage.objects.filter(queue=FULL).count() == 1


@pytest.mark.postgresql
def test_messages_of_a_locked_key_do_not_fill_each_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest messages to a paused destination have a key whose place another relay
    has locked. The messages behind them are sent when there is room again."""
    monkeypatch.setattr(lanes, "LINK_WAIT", 0.1)
    monkeypatch.setattr(limits, "FIRST_PAUSE", 2 * lanes.KEY_PAUSE)
    ROOM[FULL] = 0
    with (
        psycopg.connect(**connection.get_connection_params()) as other,
        txmsg(
            BROKERS={"default": BROKER},
            RELAY=relaying(BREAKER_MAX_PAUSE=2 * lanes.KEY_PAUSE),
        ),
    ):
        other.execute(
            "INSERT INTO django_txmsg_keytail (broker, destination, key, last_id,"
            " last_at) VALUES ('default', %s, 'a', gen_random_uuid(), 1)",
            [FULL],
        )
        store(*[(FULL, "a")] * 2 * limits.FIRST_TRIAL, (FULL, None))
        with at_work(Relay(["default"], ["default"], lanes=1)):
            wait_until(lambda: TRIED[FULL] > 0)
            del ROOM[FULL]
            wait_until(lambda: queued(FULL) == [20])
            other.rollback()
            wait_until(lambda: len(queued(FULL)) == 21)
    assert queued(FULL) == [20, *range(20)]


@pytest.mark.postgresql
def test_a_trial_waits_once_for_a_relay_that_holds_many_keys() -> None:
    """Another relay has locked the places of 200 keys. A lane's trial soon reaches the
    message behind them, and does not hold up other destinations."""
    keys = [f"k{n}" for n in range(20 * limits.FIRST_TRIAL)]
    ROOM[FULL] = 0
    store((FULL, None))
    with (
        psycopg.connect(**connection.get_connection_params()) as other,
        at_work(Relay(["default"], ["default"], lanes=1)),
    ):
        other.execute(
            "INSERT INTO django_txmsg_keytail (broker, destination, key, last_id,"
            " last_at) SELECT 'default', %s, unnest(%s::text[]), gen_random_uuid(), 1",
            [FULL, keys],
        )
        wait_until(lambda: TRIED[FULL] > 0)
        store(*[(FULL, key) for key in keys], (FULL, None))
        del ROOM[FULL]
        wait_until(lambda: queued(FULL) == [0])
        wait_until(OutboxMessage.objects.filter(lease_until__isnull=False).exists)
        store((OK, None))
        wait_until(
            lambda: queued(OK) and len(queued(FULL)) == 2,
            deadline=15 * lanes.LINK_WAIT,
        )
        other.rollback()


def test_only_one_lane_tries_a_paused_destination() -> None:
    ROOM[FULL] = 0
    store(*[(FULL, None)] * 50)
    first, second = Lane("default", "default"), Lane("default", "default")
    first.dispatch()
    known = limits.pauses("default", "default")
    wait_until(lambda: known.next_trial() == 0)
    trial = known.begin_trial()
    assert trial is not None
    assert known.begin_trial() is None
    assert known.next_trial() is None
    assert second.dispatch() == 0
    known.end_trial(trial, None, 500)
    assert second.dispatch() == 10
    first.close()
    second.close()


def test_a_queue_at_its_limit_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    """A consumer makes space in the full queue now and then, but never for all
    messages. The outage is logged once."""
    caplog.set_level(logging.INFO, "django_txmsg.breaker")
    ROOM[FULL] = 1
    store(*[(FULL, None)] * 100)
    with at_work(Relay(["default"], ["default"])):
        for count in range(2, 40, 2):
            wait_until(lambda: ROOM[FULL] == 0)
            wait_until(lambda count=count: len(queued(FULL)) == count - 1)
            ROOM[FULL] = 2
    nothing_is_lost_or_blamed()
    assert (
        len([one for one in caplog.records if "tests.full" in one.msg % one.args]) == 1
    )


@pytest.mark.parametrize("seed", [*sample([1, 2, 3])])
def test_order_per_key_holds_while_any_destination_is_full(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"tests.d{n}" for n in range(4)]
    given = [(dice.choice(names), f"k{dice.randrange(6)}") for _ in range(250)]
    store(*given)
    ROOM.update(dict.fromkeys(names, 0))
    settings = relaying(BATCH_SIZE=7, BREAKER_MAX_PAUSE=0.05)
    with txmsg(BROKERS={"default": BROKER}, RELAY=settings):
        relays = [Relay(["default"], ["default"], lanes=2) for _ in range(2)]
        with at_work(*relays):
            pending = OutboxMessage.objects.filter(dispatched_at=None)
            end = time.monotonic() + 60
            while pending.exists() and time.monotonic() < end:
                ROOM[dice.choice(names)] = dice.randrange(12)
                threading.Event().wait(0.02)
    nothing_is_lost_or_blamed()
    found: dict[str, list[int]] = defaultdict(list)
    for row in QueueMessage.objects.order_by("id"):
        found[row.headers["txmsg-key"]].append(int(bytes(row.body)))
    assert sum(map(len, found.values())) == 250
    assert all(numbers == sorted(numbers) for numbers in found.values())


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            lambda ids: Lane("default", "default").dispatch(ids=ids), id="ids"
        ),
        pytest.param(
            lambda ids: dispatch_inline("default", "default", ids), id="inline"
        ),
    ],
)
def test_dispatcher_obeys_the_pause(way: Callable[[list[int]], Any]) -> None:
    ROOM[FULL] = 0
    store((FULL, None))
    lane = Lane("default", "default")
    lane.dispatch()
    store((FULL, None), (OK, None))
    way(list(OutboxMessage.objects.order_by("id").values_list("id", flat=True)[1:]))
    assert TRIED[FULL] == 1, "it is paused"
    assert queued(OK) == [2]
    lane.close()
    nothing_is_lost_or_blamed()


@pytest.mark.usefixtures("long_pauses")
def test_the_control_threads_dispatch_obeys_pauses() -> None:
    ROOM[FULL] = 0
    store((FULL, None), (OK, None))
    session = uuid.uuid4()
    OutboxMessage.objects.update(session_id=session)
    lane = Lane("default", "default")
    while lane.dispatch(session_id=session):
        pass
    lane.close()
    assert TRIED[FULL] == 1
    assert queued(OK) == [1]
    nothing_is_lost_or_blamed()


def test_relay_once_reports_refused_messages() -> None:
    ROOM[FULL] = 0
    store((FULL, None), (OK, None))
    with pytest.raises(CommandError, match="is full: 0 places left"):
        call_command("relay", "--once", verbosity=0)
    assert queued(OK) == [1]
    assert f"{FULL} on default" in tasks.relay_outbox()["unavailable"]


def test_a_message_that_is_cancelled_ends_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only message to a paused destination is cancelled, so no trial batch can
    prove that the destination works again. The pause ends."""
    monkeypatch.setattr(limits, "SETTLED", 0.0)
    ROOM[FULL] = 0
    store((FULL, None))
    with at_work(Relay(["default"], ["default"], lanes=2)):
        wait_until(breaker.outages)
        wait_until(
            lambda: OutboxMessage.objects.filter(lease_until=None).delete()[0] == 1
        )
        wait_until(lambda: not breaker.outages())


def test_heartbeat_reports_the_paused_destination() -> None:
    ROOM[FULL] = 0
    store((FULL, None))
    lane = Lane("default", "default")
    lane.dispatch()
    presence = Presence("relay", "default")
    presence.beat(0)
    (known,) = Worker.objects.get().outages
    assert known.pop("seconds") < 60
    assert known == {
        "kind": "destination",
        "name": "tests.full on default",
        "error": "tests.full is full: 0 places left",
    }
    presence.leave()
    lane.close()


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_a_stage_that_sends_to_a_full_destination_waits_at_no_attempt(
    mode: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "AFTER_REFUSAL", 0.05)
    ROOM[FULL] = 0

    def handler(message: Message) -> None:
        send_message(FULL, message.body)

    policy = RedeliveryPolicy(max_redeliveries=0)
    with declared(handler, transaction=mode, redelivery=policy) as stage:
        put(stage.destination, b"7")
        with running(stage):
            wait_until(lambda: TRIED[FULL] >= 4)
            (outage,) = breaker.outages()
            assert outage.kind == "the sending of stage"
            del ROOM[FULL]
            wait_until(lambda: queued(FULL) == [7])
            wait_until(lambda: not breaker.outages())
    assert not DeadLetter.objects.exists()
    said = [one for one in caplog.records if one.levelno > logging.INFO]
    assert len(said) == 1, [one.getMessage() for one in said]


def test_a_redelivery_that_its_full_queue_does_not_take_waits_in_the_inbox() -> None:
    tries: list[int] = []

    def handler(message: Message) -> None:
        tries.append(message.delivery_attempt)
        if len(tries) < 3:
            raise ValueError

    policy = RedeliveryPolicy(mode="broker", initial_delay=0.0, max_delay=0.0)
    with declared(handler, redelivery=policy) as stage:
        put(stage.destination, b"7")
        ROOM[stage.destination] = 0
        with running(stage):
            wait_until(lambda: InboxMessage.objects.filter(processed_at__isnull=False))
    assert tries == [1, 2, 3]
    assert not DeadLetter.objects.exists()
