"""An ordered stage processes the messages of one key one after the other, in the order
in which they were sent."""

from __future__ import annotations

import io
import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_txmsg import RedeliveryPolicy, Refuse, stages
from django_txmsg.checks import stages as stage_checks
from django_txmsg.consuming import ordering
from django_txmsg.dead_letters import bulk, burial, resolution
from django_txmsg.envelope.failure import Failure
from django_txmsg.envelope.message import Message
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    KeyTail,
    OutboxMessage,
    StageState,
    inbox_order,
)
from django_txmsg.models.bulk_operation import BulkKind
from django_txmsg.models.queue import QueueMessage, QueueSubscription
from django_txmsg.sending.outbox import send_message, send_messages
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import (
    committing,
    declared,
    put,
    running,
    ship,
    step,
    thread_of,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

ANY = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))


def refusing(*bodies: object) -> Any:
    def handler(message: Message) -> None:
        effect(message)
        if message.body in bodies:
            raise Refuse("not this one")

    return handler


def effects() -> list[str]:
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


def send_chain(
    destination: str, bodies: Sequence[object], key: str = "k"
) -> list[Message]:
    """Store messages of one key, and dispatch them to the queue."""
    with transaction.atomic():
        sent = send_messages(
            {"destination": destination, "body": body, "key": key} for body in bodies
        )
    ship()
    return sent


def taken(destination: str) -> list[tuple[bytes, dict[str, str]]]:
    """Remove the messages from a queue and return them in order. Tests then deliver
    them in another order."""
    rows = list(QueueMessage.objects.filter(queue=destination).order_by("id"))
    QueueMessage.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return [(bytes(row.body), dict(row.headers)) for row in rows]


def deliver(destination: str, *messages: tuple[bytes, dict[str, str]]) -> None:
    for body, headers in messages:
        put(destination, body, headers)


def settle(stage: stages.Stage, wanted: int) -> None:
    """Run two consumer threads until there are `wanted` effects."""
    with running(stage, concurrency=2):
        wait_until(lambda: Effect.objects.count() >= wanted, deadline=60)


def waiting(stage: stages.Stage) -> int:
    return InboxMessage.objects.filter(
        stage=stage.name, waits_for__isnull=False
    ).count()


def test_a_relay_hangs_each_message_of_a_key_on_the_one_before() -> None:
    first = send_chain("tests.linked", [0, 1])
    second = send_chain("tests.linked", [2])
    send_chain("tests.linked", [3], key="other")
    send_chain("tests.elsewhere", [4])
    with transaction.atomic():
        send_message("tests.linked", 5)
    ship()
    found = dict(taken("tests.linked") + taken("tests.elsewhere"))
    assert "txmsg-after" not in found[b"0"]
    assert found[b"1"]["txmsg-after"].startswith(f"{first[0].id};at=")
    assert found[b"2"]["txmsg-after"].startswith(f"{first[1].id};at=")
    for unlinked in (b"3", b"4", b"5"):
        assert "txmsg-after" not in found[unlinked]
    places = [found[one]["txmsg-after"].partition(";at=")[2] for one in (b"1", b"2")]
    assert places == sorted(places)
    assert places[0] < places[1]
    assert KeyTail.objects.get(destination="tests.linked", key="k").last_id == (
        second[0].id
    )
    assert KeyTail.objects.count() == 3


def test_a_resend_has_the_same_link() -> None:
    send_chain("tests.resent", [0, 1, 2])
    before = taken("tests.resent")
    OutboxMessage.objects.update(dispatched_at=None)
    ship()
    assert taken("tests.resent") == before


def test_links_can_be_switched_off() -> None:
    with txmsg(RELAY={"LINK_KEYS": False}):
        send_chain("tests.unlinked", [0, 1])
    assert all("txmsg-after" not in headers for _, headers in taken("tests.unlinked"))
    assert not KeyTail.objects.exists()


def test_message_expired_at_first_claim_is_no_predecessor() -> None:
    with transaction.atomic():
        first = send_message("tests.expired", 0, key="k")
        send_message("tests.expired", 1, key="k", expires=timedelta(hours=1))
        send_message("tests.expired", 2, key="k")
    OutboxMessage.objects.filter(expires_at__isnull=False).update(
        expires_at=Now() - timedelta(seconds=1)
    )
    ship()
    (_, _), (body, headers) = taken("tests.expired")
    assert body == b"2"
    assert headers["txmsg-after"].startswith(str(first.id))
    assert DeadLetter.objects.get().reason == "expired"


def test_linked_message_leaves_even_if_expired() -> None:
    with transaction.atomic():
        send_message("tests.late", 0, key="k", expires=timedelta(hours=1))
    ship()
    OutboxMessage.objects.update(
        dispatched_at=None, expires_at=Now() - timedelta(seconds=1)
    )
    ship()
    assert len(taken("tests.late")) == 2
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_messages_run_in_order_although_the_broker_reorders(
    ordered: stages.Order,
) -> None:
    with declared(effect, ordered=ordered) as stage:
        send_chain(stage.destination, list(range(12)))
        found = taken(stage.destination)
        random.Random(7).shuffle(found)
        deliver(stage.destination, *found)
        settle(stage, 12)
    assert effects() == [str(n) for n in range(12)]
    assert not InboxMessage.objects.exclude(attempts=1).exists()


def test_waiting_message_has_left_the_broker_and_counts_no_attempt() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        zero, one, two = taken(stage.destination)
        deliver(stage.destination, two, one)
        step(stage, times=2)
        assert not QueueMessage.objects.exists()
        assert waiting(stage) == 2
        assert set(InboxMessage.objects.values_list("attempts", flat=True)) == {0}
        deliver(stage.destination, two, two)  # copies
        step(stage, times=2)
        assert effects() == []
        deliver(stage.destination, zero)
        step(stage, times=3)
    assert effects() == ["0", "1", "2"]
    assert not InboxMessage.objects.exclude(attempts=1).exists()
    assert InboxMessage.objects.filter(deliveries=3).count() == 1


def test_row_behind_a_waiting_row_is_not_rechecked() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        deliver(stage.destination, one, two)
        step(stage, times=2)
        found = InboxMessage.objects.order_by("id").values_list("due_at", flat=True)
        first, second = found
        assert first is not None
        assert second is not None
        assert first.year < 9000 == second.year


def test_a_redelivery_holds_back_its_key_and_no_other() -> None:
    tries: list[object] = []

    def handler(message: Message) -> None:
        tries.append(message.body)
        effect(message)
        if message.body == "a0" and message.delivery_attempt == 1:
            raise ValueError

    policy = RedeliveryPolicy(initial_delay=3600.0, max_delay=7200.0)
    with declared(handler, ordered="block", redelivery=policy) as stage:
        for body in ("a0", "a1", "b0", "b1"):
            send_chain(stage.destination, [body], key=body[0])
        failed = InboxMessage.objects.filter(attempts=1, due_at__isnull=False)
        with running(stage, concurrency=2):
            wait_until(
                lambda: Effect.objects.count() == 2 and failed.exists(), deadline=60
            )
        assert effects() == ["b0", "b1"]
        failed.update(due_at=Now())
        settle(stage, 4)
    assert effects() == ["b0", "b1", "a0", "a1"]


def test_dead_with_block_holds_its_followers_until_it_is_redelivered() -> None:
    bad: list[object] = [1]

    def handler(message: Message) -> None:
        effect(message)
        if message.body in bad:
            raise Refuse("not yet")

    with declared(handler, ordered="block") as stage:
        send_chain(stage.destination, list(range(5)))
        step(stage, times=8)
        assert effects() == ["0"]
        assert waiting(stage) == 3
        letter = DeadLetter.objects.get()
        assert InboxMessage.order.behind(stage.name, "k", 100) == 3
        bad.clear()
        redeliver(letter)
        settle(stage, 5)
    assert effects() == ["0", "1", "2", "3", "4"]


def test_dead_with_block_lets_go_when_it_is_discarded() -> None:
    with declared(refusing(1), ordered="block") as stage:
        send_chain(stage.destination, list(range(4)))
        step(stage, times=6)
        assert effects() == ["0"]
        letter = DeadLetter.objects.get()
        bulk.finish(
            bulk.start(
                BulkKind.DISCARD, {"ids": [letter.pk]}, using="default", by="test"
            )
        )
        settle(stage, 3)
    assert effects() == ["0", "2", "3"]


def test_a_copy_of_a_dead_message_releases_its_followers() -> None:
    with declared(refusing("bad"), ordered="block") as stage:
        send_chain(stage.destination, ["bad", 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, zero, one)
        step(stage, times=3)
        resolution.redeliver_copy(DeadLetter.objects.get(), headers={}, body=b'"bad"')
        step(stage, times=3)
        again = DeadLetter.objects.get(resolution="open")
        resolution.redeliver_copy(again, headers={}, body=b'"good"')
        settle(stage, 2)
        # One that comes only now finds it out by the copies of its predecessor.
        InboxMessage.objects.get(message_id=one[1]["txmsg-id"]).delete()
        deliver(stage.destination, one)
        settle(stage, 3)
    assert effects() == ["good", "1", "1"]


def test_message_waits_for_a_dead_copy_after_the_original_letter_is_old() -> None:
    retention = {"DEAD_LETTERS": 1, "INBOX": 14}
    with declared(refusing("bad"), ordered="block") as stage:
        send_chain(stage.destination, ["bad", 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, zero)
        step(stage, times=3)
        resolution.redeliver_copy(DeadLetter.objects.get(), headers={}, body=b'"bad"')
        step(stage, times=3)
        replaced = DeadLetter.objects.filter(resolution="replaced")
        assert replaced.update(resolved_at=Now() - timedelta(days=2)) == 1
        with txmsg(RETENTION=retention):
            call_command("prune_messages", stdout=io.StringIO())
        deliver(stage.destination, one)
        step(stage, times=2)
        assert effects() == []

        again = DeadLetter.objects.get(resolution="open")
        resolution.redeliver_copy(again, headers={}, body=b'"good"')
        settle(stage, 2)
        assert effects() == ["good", "1"]
        replaced.update(resolved_at=Now() - timedelta(days=2))
        with txmsg(RETENTION=retention):
            call_command("prune_messages", stdout=io.StringIO())
            call_command("prune_messages", stdout=io.StringIO())
        assert not DeadLetter.objects.exists()


def test_dead_message_with_skip_blocks_none_and_runs_late() -> None:
    bad: list[object] = [1]

    def handler(message: Message) -> None:
        effect(message)
        if message.body in bad:
            raise Refuse("not yet")

    with declared(handler, ordered="skip") as stage:
        send_chain(stage.destination, list(range(4)))
        settle(stage, 3)
        assert effects() == ["0", "2", "3"]
        bad.clear()
        redeliver(DeadLetter.objects.get())
        settle(stage, 4)
    assert effects() == ["0", "2", "3", "1"]


@pytest.mark.parametrize("batch", [1, 10])
def test_skip_continues_at_once_after_a_dead_message_of_the_batch(batch: int) -> None:
    """In mode "skip", the followers of a dead message are due immediately, so drain()
    processes them without waiting."""
    handler = refusing(1, 3)
    with declared(handler, ordered="skip", batch=batch) as stage:
        with transaction.atomic():
            for body in range(7):
                send_message(stage.destination, body, key="order-17")
        drained = drain(stage.name)
    assert effects() == ["0", "2", "4", "5", "6"]
    assert (drained.processed, drained.dead) == (5, 2)
    assert not InboxMessage.objects.filter(due_at__isnull=False).exists()


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_expired_message_is_buried_in_its_turn_and_passed(
    ordered: stages.Order,
) -> None:
    with declared(effect, ordered=ordered) as stage:
        with transaction.atomic():
            send_message(stage.destination, 0, key="k")
            send_message(stage.destination, 1, key="k", expires=timedelta(hours=1))
            send_message(stage.destination, 2, key="k")
        ship()
        zero, (body, headers), two = taken(stage.destination)
        headers["txmsg-expires"] = "2020-01-01T00:00:00+00:00"
        deliver(stage.destination, (body, headers), two)
        step(stage, times=2)
        assert not DeadLetter.objects.exists()
        deliver(stage.destination, zero)
        settle(stage, 2)
    assert effects() == ["0", "2"]
    assert DeadLetter.objects.get().reason == "expired"


@pytest.mark.parametrize(("ordered", "after"), [("block", ["0"]), ("skip", ["0", "2"])])
def test_unreadable_message_is_buried_in_its_turn(
    ordered: stages.Order, after: list[str]
) -> None:
    with declared(effect, ordered=ordered) as stage:
        send_chain(stage.destination, [0, 1, 2])
        zero, (_, headers), two = taken(stage.destination)
        deliver(stage.destination, (b"{broken", headers), two)
        step(stage, times=2)
        assert not DeadLetter.objects.exists()
        deliver(stage.destination, zero)
        with running(stage):
            wait_until(
                lambda: (
                    Effect.objects.count() == len(after) and DeadLetter.objects.exists()
                ),
                deadline=60,
            )
    assert effects() == after


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_runs_the_members_of_a_chain_in_its_order(batch: int) -> None:
    with declared(effect, ordered="block", batch=batch) as stage:
        for key in "ab":
            send_chain(stage.destination, [f"{key}{n}" for n in range(10)], key=key)
        found = taken(stage.destination)
        random.Random(3).shuffle(found)
        deliver(stage.destination, *found)
        settle(stage, 20)
    for key in "ab":
        of_key = [one for one in effects() if one.startswith(key)]
        assert of_key == [f"{key}{n}" for n in range(10)]


def test_follower_of_a_failed_batch_member_waits() -> None:
    def handler(message: Message) -> None:
        effect(message)
        if message.body == 1 and message.delivery_attempt == 1:
            raise ValueError

    policy = RedeliveryPolicy(initial_delay=3600.0, max_delay=7200.0)
    with declared(handler, ordered="block", batch=10, redelivery=policy) as stage:
        send_chain(stage.destination, [0, 1, 2, 3])
        step(stage)
        assert effects() == ["0"]
        assert waiting(stage) == 2
        InboxMessage.objects.filter(attempts=1, processed_at=None).update(due_at=Now())
        settle(stage, 4)
    assert effects() == ["0", "1", "2", "3"]


def test_two_subscribers_of_a_topic_each_keep_the_order() -> None:
    seen: dict[str, list[object]] = {"one": [], "two": []}
    with (
        declared(
            lambda m: seen["one"].append(m.body),
            "topic:tests.ordered", name="tests.one", ordered="block",
        ) as one,
        declared(
            lambda m: seen["two"].append(m.body),
            "topic:tests.ordered", name="tests.two", ordered="skip",
        ) as two,
        running(one),
        running(two),
    ):  # fmt: skip
        wait_until(lambda: all_subscribed(2), deadline=60)
        send_chain("topic:tests.ordered", list(range(6)))
        wait_until(lambda: min(map(len, seen.values())) == 6, deadline=60)
    assert seen["one"] == seen["two"] == list(range(6))


def all_subscribed(number: int) -> bool:
    return QueueSubscription.objects.count() >= number


def test_a_follower_runs_when_its_rejected_predecessor_is_redelivered() -> None:
    """The broker has rejected the predecessor, and its follower is blocked. The
    redelivered predecessor keeps its place in the order, and the follower is processed
    after it."""
    with declared(effect, ordered="block") as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, one, two = taken(stage.destination)
        deliver(stage.destination, zero, two)
        step(stage, times=2)
        with transaction.atomic():
            letter = burial.bury(
                using="default", message_id=sent[1].id, stage="", broker="default",
                destination=stage.destination, headers=one[1], body=one[0],
                reason="rejected", failure=Failure.because("rejected", "no"),
                attempts=7,
            )  # fmt: skip
        redeliver(letter)
        ship()
        ((_, headers),) = taken(stage.destination)
        assert headers["txmsg-after"] == one[1]["txmsg-after"]
        deliver(stage.destination, (one[0], headers))
        settle(stage, 3)
    assert effects() == ["0", "1", "2"]


def test_with_skip_waiting_for_a_lost_predecessor_ends() -> None:
    with declared(effect, ordered="skip") as stage:
        send_chain(stage.destination, [0, 1, 2, 3])
        _zero, _one, two, three = taken(stage.destination)
        deliver(stage.destination, three, two)
        with txmsg(ORDER_PATIENCE=3600.0):
            step(stage, times=2)
            due_now()
            ordering.ask(stage)
            assert effects() == []
            assert waiting(stage) == 2
        with txmsg(ORDER_PATIENCE=0.0):
            due_now()
            settle(stage, 2)
    assert effects() == ["2", "3"]


def test_with_block_a_follower_waits_for_a_lost_predecessor() -> None:
    with declared(effect, ordered="block") as stage:
        StageState.objects.ordered(stage.name)
        StageState.objects.update(ordered_since=Now() - timedelta(days=1))
        send_chain(stage.destination, [0, 1])
        _, one = taken(stage.destination)
        deliver(stage.destination, one)
        step(stage)
        InboxMessage.objects.update(waits_since=Now() - timedelta(days=1))
        with txmsg(ORDER_PATIENCE=0.0):
            due_now()
            ordering.ask(stage)
            assert waiting(stage) == 1
            assert InboxMessage.order.let_go(stage.name, "k", link="txmsg-after") == 1
            settle(stage, 1)
    assert effects() == ["1"]


@pytest.mark.parametrize("because", ["stage", "retention", "again", "unnoticed"])
def test_block_does_not_wait_for_an_unseen_predecessor(
    because: str,
) -> None:
    """The predecessor was sent before the stage became an ordered stage, or so long ago
    that pruning may have deleted its inbox row. So the stage cannot know whether the
    predecessor was processed. In mode "block", the stage waits only a short time for
    such a predecessor."""
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        StageState.objects.ordered(stage.name)
        if because != "stage":
            StageState.objects.update(ordered_since=Now() - timedelta(days=100))
        if because in ("again", "unnoticed"):
            # A process in which the stage is not ordered.
            ordering.begin([replace(stage, ordered=None)])
        if because == "again":
            ordering.begin([stage])
        if because == "retention":
            for _, headers in (one, two):
                before = headers["txmsg-after"].partition(";at=")[0]
                year = "2020" if headers is one[1] else "2021"
                headers["txmsg-after"] = f"{before};at={year}-01-01T00:00:00+00:00"
        deliver(stage.destination, two, one)
        step(stage, times=2)
        due_now()
        ordering.ask(stage)
        assert waiting(stage) == 2
        InboxMessage.objects.update(waits_since=Now() - timedelta(minutes=3))
        with txmsg(ORDER_PATIENCE=1.0):  # else its queue is read for two minutes first
            due_now()
            settle(stage, 2)
    assert effects() == ["1", "2"]


@pytest.mark.parametrize("mode", ["non_blocking", "broker"])
def test_nothing_passes_one_of_its_key_that_is_open_here(mode: Any) -> None:
    """The first message of a key waits for its redelivery, the second is lost, and the
    third is blocked. The third message is not processed before the first."""

    def handler(message: Message) -> None:
        effect(message)
        if message.body == 0 and message.delivery_attempt == 1:
            raise ValueError

    policy = RedeliveryPolicy(initial_delay=3600.0, max_delay=7200.0, mode=mode)
    with declared(handler, ordered="skip", redelivery=policy) as stage:
        send_chain(stage.destination, [0, 1, 2])
        zero, _lost, two = taken(stage.destination)
        deliver(stage.destination, zero, two)
        with txmsg(ORDER_PATIENCE=0.0):
            step(stage, times=2)
            InboxMessage.objects.filter(waits_for__isnull=False).update(due_at=Now())
            step(stage, times=2)
            assert effects() == []
            InboxMessage.objects.filter(waits_for=None).update(due_at=Now())
            step(stage)
            due_now()
            settle(stage, 2)
    assert effects() == ["0", "2"]


def test_message_between_two_attempts_of_blocking_redelivery_holds_its_key() -> None:
    stop = threading.Event()

    def handler(message: Message) -> None:
        stop.set()
        raise ValueError

    policy = RedeliveryPolicy(mode="blocking")
    with declared(handler, ordered="skip", redelivery=policy) as stage:
        send_chain(stage.destination, [0])
        thread = thread_of(stage, stop)
        thread._step()
        thread._close()
    assert InboxMessage.objects.get(processed_at=None).key == "k"


def test_a_stage_no_longer_ordered_releases_its_messages() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        deliver(stage.destination, one, two)
        step(stage, times=2)
        name, destination = stage.name, stage.destination
    with declared(effect, destination, name=name) as stage:
        ordering.begin([stage])
        settle(stage, 2)
    assert sorted(effects()) == ["1", "2"]


def test_without_a_key_nothing_waits() -> None:
    with declared(effect, ordered="block") as stage:
        with transaction.atomic():
            for body in range(3):
                send_message(stage.destination, body)
        ship()
        found = taken(stage.destination)
        deliver(stage.destination, *reversed(found))
        settle(stage, 3)
    assert not InboxMessage.objects.exclude(key="").exists()


@pytest.mark.parametrize(
    "after",
    ["", "nonsense", f"{ANY}", f"{ANY};at=never", "x;at=2020-01-01",
     f"{ANY};at=0001-01-01T00:00:00+14:00"],
)  # fmt: skip
def test_an_unreadable_link_counts_as_none(after: str) -> None:
    with declared(effect, ordered="block") as stage:
        headers = {
            "txmsg-id": str(uuid.uuid4()),
            "content-type": "application/json",
            "txmsg-key": "k",
            "txmsg-after": after,
        }
        put(stage.destination, b"1", headers)
        settle(stage, 1)


def redeliver(letter: DeadLetter) -> None:
    bulk.finish(
        bulk.start(BulkKind.REDELIVER, {"ids": [letter.pk]}, using="default", by="test")
    )


def due_now() -> None:
    InboxMessage.objects.filter(waits_for__isnull=False, due_at__year__lt=8999).update(
        due_at=Now()
    )


def test_waiting_messages_that_are_due_again_are_not_rechecked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statements = 0

    def between() -> None:
        nonlocal statements
        statements += 1
        assert statements < 100

    with three_blocked_keys() as stage:
        for name, value in (("FIRST_PAUSE", 0.0), ("SHORT_PAUSE", 0.0), ("ASKED", 2)):
            monkeypatch.setattr(inbox_order, name, value)
        monkeypatch.setattr(ordering, "ASKED", 2)
        ordering.ask(stage, received=False, between=between)
        assert statements >= 1
        assert waiting(stage) == 3


def test_a_consumer_that_stops_rechecks_no_more_waiting_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (inbox_order, ordering):
        monkeypatch.setattr(module, "ASKED", 2)
    with three_blocked_keys() as stage:
        ordering.ask(stage, between=lambda: True)
        assert InboxMessage.objects.filter(due_at__lte=Now()).count() == 1


@contextmanager
def three_blocked_keys() -> Iterator[stages.Stage]:
    """Each key has an open dead letter, and one message that waits behind it."""
    with declared(refusing(0), ordered="block") as stage:
        for key in "abc":
            send_chain(stage.destination, [0, 1], key)
        step(stage, times=6)
        assert DeadLetter.objects.count() == waiting(stage) == 3
        due_now()
        yield stage


def printed(name: str, *arguments: str) -> str:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_an_operator_lets_a_key_go() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        deliver(stage.destination, two, one)
        step(stage, times=2)
        assert "which has not arrived" in printed("order", "list")
        with pytest.raises(CommandError, match="waits at stage"):
            call_command("order", "let_go", "--stage", stage.name, "--key", "other")
        printed("order", "let_go", "--stage", stage.name, "--key", "k")
        settle(stage, 2)
    assert effects() == ["1", "2"]


def test_second_let_go_does_not_break_the_order() -> None:
    with declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        deliver(stage.destination, one, two)
        step(stage, times=2)
        went = [
            InboxMessage.order.let_go(stage.name, "k", link="txmsg-after")
            for _ in range(2)
        ]
        assert went == [1, 0]
        assert waiting(stage) == 1
        settle(stage, 2)
    assert effects() == ["1", "2"]


def test_tails_are_pruned_as_long_after_as_the_inbox_remembers() -> None:
    send_chain("tests.pruned", [0], key="old")
    send_chain("tests.pruned", [0], key="young")
    day = 86_400_000_000
    KeyTail.objects.filter(key="old").update(last_at=F("last_at") - 15 * day)
    KeyTail.objects.filter(key="young").update(last_at=F("last_at") - 13 * day)
    printed("prune_messages")
    assert KeyTail.objects.get().key == "young"


def test_unorderable_stage_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of block, skip"):
        stages.stage("tests.wrong", ordered="sometimes")  # type: ignore[call-overload]
    with (
        declared(effect, "tests.shared", name="tests.one", ordered="block"),
        declared(effect, "tests.shared", name="tests.two"),
        declared(
            effect, "topic:tests.shared", name="tests.three",
            ordered="skip", transaction="broker_only",
        ),
        declared(effect, "topic:tests.shared", name="tests.four"),
    ):  # fmt: skip
        found = {one.id for one in stage_checks.check()}
    assert {"txmsg.E060", "txmsg.E061"} == {
        one for one in found if one and "E06" in one
    }


def test_ordered_destination_on_two_brokers_is_a_warning() -> None:
    with (
        declared(effect, "tests.moves", name="tests.old", ordered="block"),
        declared(effect, "tests.moves", name="tests.new", broker="apart"),
        declared(effect, "topic:tests.moves", name="tests.a", ordered="block"),
        declared(effect, "topic:tests.moves", name="tests.b", broker="apart"),
    ):
        (found,) = stage_checks.check()
    assert found.id == "txmsg.W017"
    assert "'tests.old' is ordered, and 'tests.new'" in found.msg


def test_a_stage_that_is_not_ordered_looks_for_no_turn() -> None:
    counted = []
    orders: list[stages.Order | None] = [None, "block"]
    for ordered in orders:
        with declared(effect, ordered=ordered) as stage:
            send_chain(stage.destination, [0])
            with CaptureQueriesContext(connection) as queries:
                step(stage)
            statements = [one["sql"] for one in queries.captured_queries]
            wakes = [one for one in statements if "SET due_at = " in one]
            counted.append(len(wakes))
    assert counted[0] == 0
    assert counted[1] > 0
