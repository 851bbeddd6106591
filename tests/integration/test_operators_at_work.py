"""Operators act on rows that workers are processing."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.models.functions import Now

from django_txmsg.consuming import decoding, inbox
from django_txmsg.consuming.arrival import Duplicate
from django_txmsg.consuming.stage_thread import NO_SESSION
from django_txmsg.dead_letters import bulk, burial
from django_txmsg.dead_letters.burial import bury_unread
from django_txmsg.envelope.failure import Failure
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.models import (
    BulkOperation,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    inbox_order,
)
from django_txmsg.relaying.lane import Lane
from django_txmsg.sending.outbox import send_message
from django_txmsg.sending.pending import cancel_message, reschedule_message
from tests import factories as make
from tests.faults import wait_until
from tests.integration.test_ordered import (
    deliver,
    effect,
    effects,
    send_chain,
    settle,
    taken,
)
from tests.running import committing, declared, put, step, thread_of

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

T = TypeVar("T")


def meanwhile(worker: Callable[[], object], operator: Callable[[], T]) -> T:
    """Start an operator's action while a worker's transaction is open, and return its
    result.

    The worker commits as soon as the action waits for a lock or has ended.
    """

    def act() -> T:
        with closing(connections["default"]):
            return operator()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            worker()
            acting = pool.submit(act)
            wait_until(lambda: acting.done() or held_up())
        return acting.result(60)


def held_up() -> bool:
    """Return whether a database session waits for a lock."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0])


def first_of_three(destination: str) -> InboxMessage:
    """Deliver all messages of a key except the first, so that they are blocked. Return
    the row of the second message."""
    send_chain(destination, [0, 1, 2, 3])
    deliver(destination, *taken(destination)[1:])
    with declared(effect, destination, ordered="block") as stage:
        step(stage, times=3)
    return InboxMessage.objects.earliest("after_at")


def let_go(row: InboxMessage) -> int:
    return InboxMessage.order.let_go(row.stage, row.key, link="txmsg-after")


@pytest.mark.postgresql
def test_let_go_releases_the_first_message_while_a_worker_rechecks_it() -> None:
    first = first_of_three("tests.asked")

    went = meanwhile(
        lambda: InboxMessage.objects.select_for_update().get(pk=first.pk),
        lambda: let_go(first),
    )

    assert went == 1
    first.refresh_from_db()
    assert first.waits_for is None
    with declared(effect, first.stage, ordered="block") as stage:
        settle(stage, 3)
    assert effects() == ["1", "2", "3"]


@pytest.mark.postgresql
def test_let_go_changes_nothing_if_the_first_message_was_released() -> None:
    first = first_of_three("tests.by-itself")
    assert first.waits_for is not None
    before = [first.waits_for]

    # As the transaction of the one before it does.
    went = meanwhile(
        lambda: InboxMessage.order.wake(first.stage, before), lambda: let_go(first)
    )

    assert went == 0
    assert InboxMessage.objects.filter(waits_for__isnull=False).count() == 2


def test_let_go_releases_a_message_that_a_worker_is_parking() -> None:
    first = first_of_three("tests.put-back")
    InboxMessage.objects.filter(pk=first.pk).update(due_at=Now())
    with declared(effect, first.stage, ordered="block") as stage:
        thread = thread_of(stage)
        thread.parked_due.set()
        parked = thread._parking.claim()
        assert parked is not None
        assert parked.record.id == first.pk
        delivery = decoding.from_parked(parked)

        assert let_go(first) == 1
        # The worker no longer has the message, so it did not park it again.
        assert isinstance(
            inbox.process(thread._arrival(NO_SESSION, delivery, parked)), Duplicate
        )
        settle(stage, 3)
    assert effects() == ["1", "2", "3"]


@pytest.mark.postgresql
def test_let_go_does_not_wait_long_for_a_running_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = first_of_three("tests.runs")
    monkeypatch.setattr(inbox_order, "PATIENCE", 0.2)
    words = ["order", "let_go", "--stage", first.stage, "--key", "k"]

    def refused() -> str:
        with closing(connections["default"]), pytest.raises(CommandError) as error:
            call_command(*words)
        return str(error.value)

    with transaction.atomic(), ThreadPoolExecutor(1) as pool:
        InboxMessage.objects.select_for_update().get(pk=first.pk)
        assert "a worker is running the first message" in pool.submit(refused).result(
            60
        )
    assert InboxMessage.objects.filter(waits_for__isnull=False).count() == 3


def test_a_paused_stage_runs_nothing_more_that_is_parked_while_its_broker_is_away() -> (
    None
):
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(str(message.id))
        if len(ran) == 1:
            thread.paused.set()

    with declared(handler) as stage:
        for _ in range(3):
            make.InboxMessageFactory(stage=stage.name, parked=True)
        InboxMessage.objects.update(due_at=Now())
        thread = thread_of(stage)
        thread.parked_due.set()
        thread._subscription.failed(BrokerUnavailable("gone"))
        thread._turn()
        assert len(ran) == 1
        assert InboxMessage.objects.filter(due_at__isnull=False).count() == 2


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("mode", ["outbox", "broker_only"])
def test_a_pause_ends_the_attempts_of_blocking_redelivery(
    mode: Any, parked: bool, resumed: bool
) -> None:
    """The stage is paused during an attempt that fails. The next attempt is made after
    the pause, even if the pause ends before the thread has noticed it."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        if len(attempts) == 1:
            thread.paused.set()
        if len(attempts) < 3:
            raise ValueError

    policy = RedeliveryPolicy(mode="blocking", initial_delay=0.0, max_redeliveries=3)
    with declared(handler, transaction=mode, redelivery=policy) as stage:
        if parked:
            make.InboxMessageFactory(stage=stage.name, parked=True)
            InboxMessage.objects.update(due_at=Now())
        else:
            put(stage.destination)
        thread = thread_of(stage)
        thread.parked_due.set()
        thread._step()
        assert len(attempts) == 1
        if not resumed:
            thread._turn()
        thread.paused.clear()

        def processed() -> bool:
            thread.parked_due.set()
            thread._turn()
            return InboxMessage.objects.filter(processed_at__isnull=False).exists()

        wait_until(processed)
        thread._close()
    assert attempts == ([2, 3, 4] if parked else [1, 2, 3])


@pytest.mark.postgresql
@pytest.mark.parametrize("here", [True, False], ids=["declared", "gone"])
def test_message_in_progress_is_not_redelivered(here: bool) -> None:
    """A stage is processing a copy of the dead message. The operator's redelivery skips
    the dead letter."""
    row = make.InboxMessageFactory(processed_at=None, stage="tests.copy")
    make.DeadLetterFactory(message_id=row.message_id, stage=row.stage)

    def redeliver() -> BulkOperation:
        return bulk.finish(bulk.start("redeliver", {}))

    with declared(effect, name="tests.copy" if here else "tests.other"):
        operation = meanwhile(lambda: InboxMessage.objects.take(row.pk), redeliver)

    assert (operation.done, operation.skipped) == (0, 1)
    row.refresh_from_db()
    assert row.processed_at is not None
    assert not OutboxMessage.objects.exists()


@pytest.mark.postgresql
def test_operation_can_be_paused_while_a_letter_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letter = make.DeadLetterFactory()
    operation = bulk.start("discard", {})
    monkeypatch.setattr(bulk, "PATIENCE", 0.2)

    def work() -> int | None:
        with closing(connections["default"]):
            return bulk.work_batch("default")

    with ThreadPoolExecutor(2) as pool, transaction.atomic():
        DeadLetter.objects.select_for_update().get(pk=letter.pk)
        working = pool.submit(work)
        wait_until(lambda: working.done() or held_up())
        assert pool.submit(pause, operation.pk).result(20)
        assert working.result(60) is None
    letter.refresh_from_db()
    assert letter.resolution == "open"


def pause(operation: int) -> bool:
    with closing(connections["default"]):
        return bool(BulkOperation.objects.pause(operation))


@pytest.mark.postgresql
def test_letter_that_dies_again_while_it_is_pruned_is_kept() -> None:
    letter = make.DeadLetterFactory(resolution="discarded", resolved_at=Now())

    def dies() -> int:
        with transaction.atomic():
            kept = burial.bury(
                using="default",
                message_id=letter.message_id,
                stage=letter.stage,
                broker="default",
                destination=letter.destination,
                headers={},
                body=bytes(letter.body),
                reason="expired",
                failure=Failure.because("expired", "again"),
                attempts=1,
            )
        return int(kept.pk)

    kept = meanwhile(DeadLetter.objects.all().delete, dies)

    assert kept != letter.pk
    assert DeadLetter.objects.get().resolution == "open"


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "change", [cancel_message, partial(reschedule_message, delay=dt.timedelta(hours=1))]
)
def test_a_relay_that_has_lost_its_lease_sends_nothing_that_was_changed_since(
    change: Callable[[uuid.UUID], bool],
) -> None:
    """A relay waits for a lock until its lease has ended. Meanwhile an operator cancels
    or reschedules one of its messages. The relay does not send that message."""
    with transaction.atomic():
        sent, taken_back = send_message("tests.lapsed", 1), send_message("tests.b", 2)
    OutboxMessage.objects.filter(message_id=taken_back.id).update(attempts=1)
    lane = Lane("default", "default", longest_lease=0.5)

    def relay() -> int:
        with closing(connections["default"]):
            return lane.dispatch()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute(f"LOCK TABLE {QueueMessage._meta.db_table}")
            relaying = pool.submit(relay)
            wait_until(held_up)
            rows = OutboxMessage.objects.select_for_update()
            rows.get(message_id=taken_back.id)  # so that the lease is not renewed
            wait_until(lambda: change(taken_back.id))
        assert relaying.result(60) == 2
    lane.close()
    assert [one.queue for one in QueueMessage.objects.all()] == [sent.destination]
    assert lane.counts["lease_lost"] == 1


@pytest.mark.postgresql
def test_message_that_newer_code_is_processing_is_not_buried() -> None:
    """Two messages need newer code, and a worker with that code is processing one of
    them. Only the other message is buried."""
    newer = {"parked": True, "needs_type": "shop.Order", "needs_version": 2}
    running, other = (
        make.InboxMessageFactory(**newer),
        make.InboxMessageFactory(**newer),
    )

    def bury() -> int:
        with closing(connections["default"]):
            return bury_unread("default")

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        assert InboxMessage.objects.select_for_update().get(pk=running.pk)
        assert pool.submit(bury).result(20) == 1
    assert DeadLetter.objects.get().message_id == other.message_id
    assert InboxMessage.objects.get(pk=running.pk).due_at is not None
