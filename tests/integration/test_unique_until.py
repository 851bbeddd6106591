"""`unique_until="processed"`: a message keeps its key until it was processed."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.db.models.functions import Now

from django_txmsg import Message, RedeliveryPolicy, Refuse, send_message, send_messages
from django_txmsg.checks import stages
from django_txmsg.errors import AlreadyPending, InvalidMessage
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    outbox,
)
from django_txmsg.models.outbox_claim import Claimed
from django_txmsg.scheduling.timetable import every, recurring
from tests.factories import ago
from tests.faults import wait_until
from tests.forgetting import forget_recurring
from tests.running import (
    committing,
    declared,
    put,
    running,
    ship,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

PLACE = "tests.refresh"
HOUR = dt.timedelta(hours=1)


def nothing(message: Message) -> None:
    """A handler that does nothing."""


def send(body: object = 1, on_conflict: Any = "skip", **options: Any) -> uuid.UUID:
    options = {"unique": "k", "unique_until": "processed"} | options
    with transaction.atomic():
        return send_message(PLACE, body, on_conflict=on_conflict, **options).id


def arrive_early(token: uuid.UUID) -> Claimed:
    """Send a message, which arrives before the relay has marked its row."""
    first = send()
    (row,) = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=1
    )
    headers = {"txmsg-id": str(first), "content-type": "application/json"}
    put(PLACE, b"1", headers)
    return row


@contextmanager
def elsewhere(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Call `work` in another thread, on another connection."""

    def run() -> None:
        try:
            work()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("mode", ["outbox", "none"])
def test_a_second_message_is_skipped_until_the_first_was_processed(mode: Any) -> None:
    with declared(nothing, PLACE, transaction=mode) as stage:
        first = send()
        assert send() == first
        assert ship() == 1
        assert send() == first
        with pytest.raises(AlreadyPending, match="is not processed yet") as caught:
            send(on_conflict="error")
        assert caught.value.message_id == first
        step(stage)
        assert send() != first
    assert OutboxMessage.objects.count() == 2


def test_a_redelivery_holds_the_key_and_a_dead_letter_frees_it() -> None:
    def fails(message: Message) -> None:
        if message.delivery_attempt == 2:
            raise Refuse("no")
        raise ValueError

    with declared(fails, PLACE) as stage:
        first = send()
        ship()
        step(stage)
        assert InboxMessage.objects.get().due_at is not None
        assert send() == first
        step(stage)
        assert DeadLetter.objects.count() == 1
        assert send() != first


def test_a_message_that_expired_on_its_way_frees_its_key() -> None:
    with declared(nothing, PLACE):
        first = send(expires=HOUR)
        ship()
        assert send(expires=HOUR) == first
        OutboxMessage.objects.update(expires_at=ago(minutes=1))
        assert send() != first


def test_a_message_that_the_inbox_has_forgotten_frees_its_key() -> None:
    def fails_once(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError

    keeps = txmsg(RETENTION={"OUTBOX": None, "INBOX": 14})
    with keeps, declared(fails_once, PLACE) as stage:
        first = send()
        ship()
        OutboxMessage.objects.update(dispatched_at=ago(days=15))
        step(stage)
        assert send() == first  # it waits for its redelivery
        step(stage)
        then = ago(days=15)
        InboxMessage.objects.update(
            processed_at=then, first_received_at=then, last_received_at=then
        )
        call_command("prune_messages", stdout=StringIO())
        assert not InboxMessage.objects.exists()
        assert send() != first


@pytest.mark.parametrize("lost", [True, False])
def test_a_message_that_the_broker_has_lost_frees_its_key(lost: bool) -> None:
    """The broker loses the copy that waits for the next attempt."""

    def fails(message: Message) -> None:
        raise ValueError

    in_broker = RedeliveryPolicy(mode="broker")
    with declared(fails, PLACE, redelivery=in_broker) as stage:
        first = send()
        ship()
        step(stage)
        (row,) = InboxMessage.objects.all()
        assert (row.attempts, row.due_at, row.processed_at) == (1, None, None)
        QueueMessage.objects.all().delete()
        OutboxMessage.objects.update(dispatched_at=ago(days=15))
        assert send() == first
        received = ago(days=15 if lost else 13)
        InboxMessage.objects.update(last_received_at=received)
        assert (send() != first) is lost


def test_a_message_that_waits_in_the_inbox_keeps_its_key_after_pruning() -> None:
    def fails_once(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(fails_once, PLACE) as stage:
        first = send()
        ship()
        step(stage)
        OutboxMessage.objects.update(created_at=ago(days=8), dispatched_at=ago(days=8))
        call_command("prune_messages", stdout=StringIO())
        assert send() == first
        step(stage)
        call_command("prune_messages", stdout=StringIO())
        assert not OutboxMessage.objects.exists()


def test_a_key_of_a_message_that_left_keeps_ordinary_ones_out_too() -> None:
    with declared(nothing, PLACE) as stage:
        first = send()
        ship()
        assert send(unique_until="left") == first
        step(stage)
        second = send(unique_until="left")
        ship()
        assert send() != second


def test_only_a_message_that_has_not_left_is_replaced() -> None:
    with declared(nothing, PLACE) as stage:
        send(1)
        second = send(2, on_conflict="replace")
        assert OutboxMessage.objects.exclude(cancelled_at=None).count() == 1
        ship()
        with pytest.raises(AlreadyPending, match="is not processed yet"):
            send(3, on_conflict="replace")
        step(stage)
        assert send(4, on_conflict="replace") != second


def test_a_message_that_a_relay_has_claimed_is_not_replaced() -> None:
    with declared(nothing, PLACE):
        first = send(1)
        OutboxMessage.objects.update(linked_at=Now())
        with pytest.raises(AlreadyPending) as caught:
            send(2, on_conflict="replace")
    assert caught.value.message_id == first
    assert str(caught.value).endswith('Use on_conflict="skip" to go on with that one.')


def test_a_handler_without_a_transaction_that_fails_has_a_successor() -> None:
    sent: list[uuid.UUID] = []

    def fails(message: Message) -> None:
        sent.append(send())
        raise ValueError

    with declared(fails, PLACE, transaction="none") as stage:
        first = send()
        ship()
        step(stage, times=2)
    assert first != sent[0] == sent[1]
    assert InboxMessage.objects.get().due_at is not None
    assert OutboxMessage.objects.get(message_id=sent[0]).dispatched_at is None


@pytest.mark.parametrize("batch", [1, 2])
def test_a_handler_stores_its_own_successor(batch: int) -> None:
    """Inside a handler's transaction, the handler's message counts as processed. So the
    handler can send the next message with the same key. A rollback undoes both."""
    sent: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        with transaction.atomic():
            sent.append(send(delay=HOUR))
        if len(sent) == 1:
            raise ValueError

    with declared(handler, PLACE, batch=batch) as stage:
        first = send()
        ship()
        step(stage)
        assert send() == first
        step(stage)
        assert first not in sent
        assert OutboxMessage.objects.filter(pk__gt=1, dead_at=None).count() >= 1
        assert send() == sent[-1]
    assert OutboxMessage.objects.count() == 2


def test_unique_until_processed_needs_a_stage_that_records() -> None:
    with pytest.raises(InvalidMessage, match="no stage here that records"):
        send()
    modes: list[Any] = ["broker_only", "best_effort_1pc"]
    for mode in modes:
        with (
            declared(nothing, PLACE, transaction=mode),
            pytest.raises(InvalidMessage, match="no stage here that records"),
        ):
            send()
    with (
        declared(nothing, PLACE, using="other"),
        pytest.raises(InvalidMessage, match="database 'default'"),
    ):
        send()
    with pytest.raises(InvalidMessage, match="is a topic"), transaction.atomic():
        send_message("topic:t", 1, unique="k", unique_until="processed")
    with pytest.raises(InvalidMessage, match="needs a unique= key"):
        send(unique=None)
    with pytest.raises(InvalidMessage, match="none of left, processed"):
        send(unique_until="ever")


def test_in_bulk_each_message_has_its_own_unique_until() -> None:
    with declared(nothing, PLACE) as stage, transaction.atomic():
        given = [
            {"destination": PLACE, "body": n, "unique": f"k{n}", "on_conflict": "skip"}
            for n in range(2)
        ]
        given[0]["unique_until"] = "processed"
        first = [one.id for one in send_messages(given)]
        ship()
        second = [one.id for one in send_messages(given)]
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert stage


def test_senders_relay_and_stage_race_and_one_message_is_under_way() -> None:
    """Senders, a relay and a stage work at the same time. No second message is stored
    before the first was processed, and the key is freed in the end."""
    done = threading.Event()
    failed: list[BaseException] = []
    inside = threading.Semaphore(1)
    handled: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        if not inside.acquire(blocking=False):
            failed.append(AssertionError("two run at the same time"))
        handled.append(message.id)
        inside.release()

    def again(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not done.wait(0.02):
                    with suppress(OperationalError):  # SQLite is locked
                        work()
            except BaseException as error:
                failed.append(error)

        return run

    with declared(handler, PLACE) as stage, running(stage, 2):
        with elsewhere(again(send)), elsewhere(again(send)), elsewhere(again(ship)):
            try:
                wait_until(lambda: len(handled) > 4 or bool(failed), deadline=120)
            finally:
                done.set()
        ship()
        wait_until(lambda: len(handled) == OutboxMessage.objects.count(), deadline=60)
    assert failed == []
    assert not DeadLetter.objects.exists()
    ends = dict(InboxMessage.objects.values_list("message_id", "processed_at"))
    rows = OutboxMessage.objects.order_by("created_at")
    for before, after in itertools.pairwise(rows):
        assert after.created_at > ends[before.message_id]


@pytest.mark.postgresql
@pytest.mark.parametrize("commits", [True, False])
def test_senders_that_free_a_key_at_once_store_one_message(commits: bool) -> None:
    found: list[uuid.UUID] = []
    with declared(nothing, PLACE) as stage:
        first = send()
        ship()
        step(stage)
        with suppress(KeyError), transaction.atomic():
            mine = send_message(
                PLACE, 2, unique="k", unique_until="processed", on_conflict="skip"
            ).id
            other = threading.Thread(target=lambda: found.append(_closing(send)))
            other.start()
            other.join(0.3)  # it waits for our end
            assert found == []
            if not commits:
                raise KeyError
        other.join(60)
    assert (found[0] == mine) is commits
    assert first not in (mine, *found)
    assert OutboxMessage.objects.count() == 2


def _closing(work: Callable[[], uuid.UUID]) -> uuid.UUID:
    try:
        return work()
    finally:
        connections.close_all()


@pytest.mark.postgresql
@pytest.mark.parametrize("fails", [True, False])
def test_a_sender_does_not_wait_for_a_handler(fails: bool) -> None:
    """A sender uses the key of a message whose handler is still running. The message
    counts as unprocessed until the handler's transaction commits, so the sender need
    not wait."""
    began, go_on = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        OutboxMessage.objects.count()  # its transaction has begun
        began.set()
        assert go_on.wait(60)
        if fails and message.delivery_attempt == 1:
            raise ValueError

    with declared(handler, PLACE) as stage:
        first = send()
        ship()
        with elsewhere(lambda: step(stage)):
            assert began.wait(60)
            assert send() == first
            go_on.set()
        assert (send() == first) is fails


@pytest.mark.postgresql
def test_a_relay_does_not_wait_for_a_sender_that_reuses_its_message() -> None:
    token = uuid.uuid4()
    marked: list[int] = []
    with declared(nothing, PLACE):
        first = send()
        (row,) = OutboxMessage.objects.claim(
            broker="default", token=token, lease=60, limit=1
        )
        with transaction.atomic():
            again = send_message(
                PLACE, 2, unique="k", unique_until="processed", on_conflict="skip"
            )
            assert again.id == first
            with elsewhere(
                lambda: marked.append(
                    OutboxMessage.objects.mark_dispatched([row.id], token)
                )
            ) as thread:
                thread.join(30)
                assert marked == [1]
        assert send() == first


@pytest.mark.postgresql
def test_a_relay_does_not_wait_for_a_handler_that_stores_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler runs before the relay has marked its message. While the relay does
    so, the handler's transaction is still open."""
    monkeypatch.setattr(outbox, "SETTLING", 60.0)
    token = uuid.uuid4()
    stored, marked, seen = threading.Event(), list[int](), list[int]()

    def look(execute: Any, sql: str, *rest: Any) -> Any:
        found = execute(sql, *rest)
        if sql.startswith("SELECT 1 FROM django_txmsg_outboxmessage"):
            stored.set()  # the handler waits for the relay
        return found

    def mark() -> None:
        assert stored.wait(60)
        marked.append(OutboxMessage.objects.mark_dispatched([row.id], token))

    def handler(message: Message) -> None:
        with connections["default"].execute_wrapper(look):
            successors.append(send())
        stored.set()
        relay.join(5)
        seen.extend(marked)

    successors: list[uuid.UUID] = []
    with declared(handler, PLACE) as stage:
        row = arrive_early(token)
        with elsewhere(mark) as relay:
            step(stage)
    assert seen == [1]
    assert row.message_id not in map(str, successors)
    assert OutboxMessage.objects.get(unique_key="k").message_id == successors[-1]


@pytest.mark.postgresql
def test_a_handler_stores_its_successor_while_a_relay_sends_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler waits for a while, and then goes on. The relay can mark its message
    when the handler has ended."""
    monkeypatch.setattr(outbox, "SETTLING", 0.1)
    token = uuid.uuid4()
    sent, took = list[uuid.UUID](), list[float]()

    def handler(message: Message) -> None:
        began = time.monotonic()
        sent.append(send())
        took.append(time.monotonic() - began)

    with declared(handler, PLACE) as stage:
        row = arrive_early(token)
        step(stage)
    assert len(sent) == 1
    assert took[0] >= 0.1
    assert row.message_id != str(sent[0])
    assert OutboxMessage.objects.mark_dispatched([row.id], token) == 1


@pytest.mark.postgresql
def test_above_read_committed_a_handler_waits_for_no_relay() -> None:
    """The handler's snapshot shows the row as claimed, however long it waits. If the
    relay marked the row meanwhile, the handler's UPDATE would fail."""
    token, sent, attempts = uuid.uuid4(), list[uuid.UUID](), list[int]()

    def mark() -> None:
        OutboxMessage.objects.mark_dispatched([row.id], token)

    def look(execute: Any, sql: str, *rest: Any) -> Any:
        found = execute(sql, *rest)
        waits = sql.startswith("SELECT 1 FROM django_txmsg_outboxmessage")
        if waits and rest[-1]["cursor"].rowcount:
            with elsewhere(mark):
                pass
        return found

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        with connections["default"].execute_wrapper(look):
            sent.append(send())

    with declared(handler, PLACE, isolation="repeatable read") as stage:
        row = arrive_early(token)
        step(stage)
    assert attempts == [1]
    assert row.message_id != str(sent[0])
    assert OutboxMessage.objects.mark_dispatched([row.id], token) == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"unique": "k"}, False),
        ({"unique": "k", "unique_until": "processed"}, True),
        ({"unique_until": "processed"}, True),
        ({"unique": "k", "unique_until": "ever"}, True),
        ({"unique": ""}, True),
    ],
)
def test_a_recurring_message_that_cannot_hold_its_key_is_an_error(
    options: Any, fault: bool
) -> None:
    every("* * * * *", "tests.nowhere", **options)
    try:
        assert [one.id for one in stages.check_schedule()] == ["txmsg.E050"] * fault
    finally:
        forget_recurring("tests.nowhere")


def test_unique_until_can_be_given_in_the_settings() -> None:
    given = {"EVERY": "* * * * *", "DESTINATION": PLACE, "UNIQUE": "k"}
    with (
        declared(nothing, PLACE),
        txmsg(SCHEDULE={"r": {**given, "UNIQUE_UNTIL": "processed"}}),
    ):
        assert not list(stages.check_schedule())
        (one,) = [one for one in recurring() if one.name == "r"]
        found = one.arguments(dt.datetime.now(dt.timezone.utc))
    assert (found["unique"], found["unique_until"]) == ("k", "processed")
