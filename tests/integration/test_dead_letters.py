"""The contents of dead letters, and the three ways to resolve them."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from django_txmsg import Refuse
from django_txmsg.dead_letters import bulk, resolution
from django_txmsg.envelope.message import Message
from django_txmsg.errors import TxmsgError
from django_txmsg.models import (
    BulkOperation,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
)
from django_txmsg.models.queue import QueueMessage
from django_txmsg.models.worker import silent_after
from django_txmsg.sending.outbox import send_message
from tests import factories as make
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, declared, put, running, send, ship, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


class Stubborn:
    """A handler that fails until the test repairs it."""

    def __init__(self) -> None:
        self.mended = False
        self.seen: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.seen.append(message)
        Effect.objects.create(name="done", message_id=str(message.id))
        send_message("tests.next", None)
        if not self.mended:
            raise ValueError("out of stock")


def resolve(kind: str, **options: Any) -> BulkOperation:
    """Apply an action to all dead letters, as the admin and the command do."""
    return bulk.finish(bulk.start(kind, {}, **options))


def test_redelivered_with_its_id_and_processed_once() -> None:
    handler = Stubborn()
    with declared(handler) as stage:
        hour = dt.timedelta(hours=1)
        sent = send(
            stage.destination, {"n": 1}, headers={"a": "b"}, key="k", expires=hour
        )
        step(stage, times=3)
        handler.mended = True
        operation = resolve("redeliver", by="anna")
        assert (operation.done, operation.skipped) == (1, 0)
        assert ship() == 0
        step(stage)
        # And once more, as a duplicate of the redelivery would come.
        put(stage.destination, message_id=sent.id)
        step(stage)
    first, again = handler.seen[0], handler.seen[-1]
    assert (again.created_at, again.service) == (first.created_at, first.service)
    assert (again.id, again.body, again.key) == (sent.id, {"n": 1}, "k")
    assert again.headers["a"] == "b"
    assert again.delivery_attempt == 1
    assert Effect.objects.count() == 1
    letter = DeadLetter.objects.get()
    assert (letter.resolution, letter.resolved_by) == ("redelivered", "anna")
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1


def test_message_that_dies_again_keeps_its_letter_and_counts_a_death() -> None:
    handler = Stubborn()
    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=3)
        for _ in range(2):
            resolve("redeliver")
            ship()
            step(stage, times=3)
    letter = DeadLetter.objects.get()
    assert (letter.deaths, letter.resolution) == (3, "open")
    assert len(handler.seen) == 9


def test_processed_message_is_redelivered_only_by_force() -> None:
    handler = Stubborn()
    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=3)
        handler.mended = True
        resolve("redeliver")
        ship()
        step(stage)
        letter = DeadLetter.objects.get()
        DeadLetter.objects.update(resolution="open", resolved_at=None)
        operation = resolve("redeliver")
        assert operation.done == 0
        assert "has processed" in operation.skipped_why[str(letter.pk)]
        DeadLetter.objects.update(deaths=2)
        assert resolve("redeliver", force=True).done == 1
        ship()
        step(stage)
    assert Effect.objects.count() == 2


def test_a_redelivery_that_rolls_back_changes_nothing() -> None:
    with declared(Stubborn()) as stage:
        send(stage.destination)
        step(stage, times=3)
        with transaction.atomic():
            resolve("redeliver")
            transaction.set_rollback(True)
    assert DeadLetter.objects.get().resolution == "open"
    assert InboxMessage.objects.get().state == "dead"
    assert ship() == 0


def test_discarded_is_closed_and_can_be_restored() -> None:
    with declared(Stubborn()) as stage:
        send(stage.destination)
        step(stage, times=3)
    assert resolve("discard", by="anna").done == 1
    assert resolve("redeliver").done == 0
    assert resolve("restore").done == 1
    assert DeadLetter.objects.get().resolution == "open"


def test_restoring_one_operation_leaves_what_others_discarded() -> None:
    with declared(Stubborn()) as stage:
        discarded = []
        for _ in range(2):
            send(stage.destination)
            step(stage, times=3)
            discarded.append(resolve("discard"))
    mine, others = discarded
    restored = bulk.finish(bulk.start("restore", {"operation": mine.pk}))
    assert restored.done == 1
    letters = DeadLetter.objects.order_by("pk").values_list("resolution", "operation")
    assert list(letters) == [("open", restored.pk), ("discarded", others.pk)]


def test_a_copy_has_a_new_id_and_closes_the_original() -> None:
    handler = Stubborn()
    with declared(handler) as stage:
        sent = send(stage.destination, {"n": 1})
        step(stage, times=3)
        handler.mended = True
        letter = DeadLetter.objects.get()
        copy = resolution.redeliver_copy(letter, headers={}, body=b'{"n":2}')
        ship()
        step(stage)
    assert handler.seen[-1].body == {"n": 2}
    assert handler.seen[-1].id == copy != sent.id
    letter.refresh_from_db()
    assert (letter.resolution, letter.replaced_by) == ("replaced", copy)


@pytest.mark.parametrize("edited", [False, True])
def test_long_key_of_a_foreign_message_is_cut_for_the_outbox(edited: bool) -> None:
    headers = {"txmsg-id": str(uuid.uuid4()), "txmsg-key": "\U0001f600" + "k" * 300}
    with declared(Stubborn()) as stage:
        put(stage.destination, b"1", headers)
        step(stage, times=3)
    if edited:  # the stage is not declared here any more
        resolution.redeliver_copy(DeadLetter.objects.get(), headers={}, body=b"2")
    else:
        assert resolve("redeliver").done == 1
    assert OutboxMessage.objects.get().key == "\ufffd" + "k" * 254


def test_many_of_one_failure_have_one_fingerprint() -> None:
    with declared(Stubborn()) as stage:
        for _ in range(7):
            send(stage.destination)
        step(stage, times=21)
    assert DeadLetter.objects.count() == 7
    (fingerprint,) = DeadLetter.objects.values_list("fingerprint", flat=True).distinct()
    assert fingerprint
    assert resolve("redeliver").done == 7
    assert ship() == 7


@pytest.fixture
def no_table() -> Iterator[Callable[[], None]]:
    """Rename the table of dead letters. The returned function restores the table's
    name."""
    table = DeadLetter._meta.db_table

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    with ExitStack() as stack:
        rename(table, "away")
        stack.callback(rename, "away", table)
        yield stack.close


def test_unburiable_message_is_kept_until_it_can_be_buried(
    no_table: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Message] = []

    def handler(message: Message) -> None:
        seen.append(message)
        raise Refuse

    with declared(handler) as stage:
        sent = put(stage.destination)
        with running(stage):
            wait_until(lambda: "nothing could be decided" in caplog.text)
            assert InboxMessage.objects.get().state == "received"
            assert QueueMessage.objects.exists()
            no_table()
            wait_until(lambda: not QueueMessage.objects.exists())
    assert {one.id for one in seen} == {sent}
    assert len(seen) >= 2
    assert DeadLetter.objects.get().deaths == 1


def test_dead_outbox_row_must_have_an_error() -> None:
    """A constraint of the database refuses a dead row without an error."""
    with transaction.atomic():
        send_message("tests.next", None)
    row = OutboxMessage.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic():
        OutboxMessage.objects.update(dead_at=row.created_at)
    with pytest.raises(IntegrityError), transaction.atomic():
        OutboxMessage.objects.update(
            dead_at=row.created_at, dispatched_at=row.created_at, last_error="x"
        )


TOPIC = "topic:orders.placed"


def test_topics_dead_letter_is_redelivered_to_its_stage_only() -> None:
    """The topic's other subscribers do not get the message again, even if their inboxes
    were pruned."""
    handler, others = Stubborn(), []
    with (
        declared(handler, TOPIC, name="billing") as stage,
        declared(others.append, TOPIC, name="shipping") as other,
    ):
        step(stage)
        step(other)
        send(TOPIC, {"n": 1})
        step(other)
        step(stage, times=3)
        InboxMessage.objects.filter(stage="shipping").delete()
        handler.mended = True
        letter = DeadLetter.objects.get()
        copy = None
        for attempt in (1, 2):
            if attempt == 1:
                assert resolve("redeliver").done == 1
            else:
                DeadLetter.objects.update(resolution="open", resolved_at=None)
                letter.refresh_from_db()
                copy = resolution.redeliver_copy(letter, headers={}, body=b"2")
            ship()
            step(stage)
            step(other)
    assert OutboxMessage.objects.filter(destination=TOPIC).count() == len(others) == 1
    assert [one.body for one in handler.seen[-2:]] == [{"n": 1}, 2]
    assert handler.seen[-1].id == copy
    assert not InboxMessage.objects.filter(processed_at=None).exists()


def test_removed_stages_letter_goes_to_its_queue_but_to_no_topic() -> None:
    """The stages of two dead letters were removed. The letter from a queue returns to
    the queue, which has one consumer. The letter from a topic is skipped, because a
    topic has many consumers."""
    handler = Stubborn()
    with declared(handler, "tests.kept", name="old") as stage:
        send(stage.destination)
        step(stage, times=3)
    with declared(handler, TOPIC, name="gone") as stage:
        step(stage)
        send(TOPIC)
        step(stage, times=3)
    operation = resolve("redeliver")
    assert (operation.done, operation.skipped) == (1, 1)
    letter = DeadLetter.objects.get(resolution="open")
    assert letter.stage == "gone"
    assert "reach every subscriber" in operation.skipped_why[str(letter.pk)]
    with pytest.raises(TxmsgError, match="every subscriber"):
        resolution.redeliver_copy(letter, headers={}, body=b"2")
    handler.mended = True
    with declared(handler, "tests.kept", name="renamed") as stage:
        assert ship() == 1
        step(stage)
    assert Effect.objects.count() == 1
    # No row of the removed stage stays open for ever.
    assert not InboxMessage.objects.filter(processed_at=None, dead_at=None).exists()
    assert resolve("redeliver", force=True).done == 1
    assert OutboxMessage.objects.filter(destination=TOPIC, dispatched_at=None).exists()


def test_letter_of_a_removed_broker_stays_open_unless_a_stage_parks_it() -> None:
    """A relay sends only the messages of the brokers in its settings. What another
    service has stored goes to that service's relay."""
    gone: dict[str, Any] = {"broker": "gone", "destination": "tests.kept"}
    letter = make.DeadLetterFactory(stage="", headers={}, **gone)
    foreign = make.DeadLetterFactory(
        stage="", headers={"txmsg-service": "another"}, **gone
    )
    with declared(print, "tests.kept") as stage:
        parked = make.DeadLetterFactory(stage=stage.name, **gone)
        operation = resolve("redeliver", force=True)
    assert (operation.done, operation.skipped) == (2, 1)
    assert "not in TXMSG" in operation.skipped_why[str(letter.pk)]
    with pytest.raises(TxmsgError, match="not in TXMSG"):
        resolution.redeliver_copy(letter, headers={}, body=b"2")
    assert DeadLetter.objects.get(resolution="open") == letter
    assert OutboxMessage.objects.get().message_id == foreign.message_id
    assert InboxMessage.objects.get().message_id == parked.message_id


@pytest.mark.parametrize("reason", ["broker", "rejected"])
def test_copy_of_a_topics_letter_that_has_no_stage(reason: str) -> None:
    """If the broker has dead-lettered the message, its other subscribers have it. If
    the broker has rejected the message, no subscriber has it."""
    letter = make.DeadLetterFactory(stage="", destination=TOPIC, reason=reason)
    if reason == "broker":
        with pytest.raises(TxmsgError, match="every subscriber"):
            resolution.redeliver_copy(letter, headers={}, body=b"2")
    else:
        resolution.redeliver_copy(letter, headers={}, body=b"2")
    letter.refresh_from_db()
    assert (letter.resolution == "open") == (reason == "broker")
    assert OutboxMessage.objects.exists() == (reason == "rejected")


@pytest.mark.parametrize("copies", ["queued before", "queued after"])
def test_redelivered_letter_of_a_stage_that_returns_is_processed_once(
    copies: str,
) -> None:
    """The stage is declared again after its letter was sent to its queue, or a worker
    with older code still runs the stage. A duplicate of the message is in the queue,
    too."""
    handler = Stubborn()
    with declared(handler, "tests.kept", name="returns") as stage:
        sent = send(stage.destination)
        step(stage, times=3)
    handler.mended = True
    if copies == "queued before":
        put("tests.kept", message_id=sent.id)
    assert resolve("redeliver").done == 1
    assert ship() == 1
    if copies == "queued after":
        put("tests.kept", message_id=sent.id)
    with declared(handler, "tests.kept", name="returns") as stage:
        step(stage, times=2)
    assert not QueueMessage.objects.exists()
    assert Effect.objects.count() == 1
    assert InboxMessage.objects.get().state == "processed"


@pytest.mark.parametrize(
    ("age", "heartbeat", "lives"),
    [(0, 5, True), (40, 5, False), (120, 60, True), (200, 60, False), (-400, 5, False)],
)
def test_a_letter_is_parked_for_a_stage_that_a_living_worker_runs(
    age: int, heartbeat: int, lives: bool
) -> None:
    """A dead letter is redelivered to its stage if a live worker runs the stage. A
    worker counts as live until three heartbeat intervals and 15 seconds after its last
    heartbeat. A heartbeat in the future is from before the clock was set back."""
    handler = Stubborn()
    with declared(handler, TOPIC, name="shipping.a") as stage:
        step(stage)
        send(TOPIC)
        step(stage, times=3)
    make.WorkerFactory(
        service="shipping",
        stages=["shipping.a"],
        heartbeat_at=make.ago(seconds=age),
        silent_after=silent_after(heartbeat),
    )
    with declared(print, TOPIC, name="billing.b"):
        operation = resolve("redeliver")
    assert (operation.done, operation.skipped) == (lives, not lives)


def test_a_worker_of_another_service_redelivers_as_the_stages_own_would() -> None:
    """Two services share a database, so each executes the bulk operations of both. The
    worker of one service parks the dead letter for the other service's stage."""
    handler = Stubborn()
    with declared(handler, TOPIC, name="shipping.a") as stage:
        step(stage)
        send(TOPIC)
        step(stage, times=3)
    make.WorkerFactory(service="shipping", stages=["shipping.a"])
    with declared(print, TOPIC, name="billing.b"):
        operation = resolve("redeliver")
    assert (operation.done, operation.skipped) == (1, 0)
    handler.mended = True
    with declared(handler, TOPIC, name="shipping.a") as stage:
        step(stage)
    assert Effect.objects.count() == 1
    assert not OutboxMessage.objects.exclude(replay_id="").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"content-type": "application/json", "txmsg-id": "seven"},
        {"content-type": "application/json", "txmsg-expires": "2001-01-01T00:00:00Z"},
    ],
    ids=["foreign", "malformed id", "expired"],
)
def test_redelivered_unreadable_message_dies_again_unless_fixed(
    headers: dict[str, str],
) -> None:
    """An unreadable message is redelivered. If it is still unreadable, the same dead
    letter is opened again, and the message does not stay parked."""
    got: list[Message] = []
    body = b"1" if "txmsg-expires" in headers else b"{"
    with declared(got.append) as stage:
        put(stage.destination, body, headers)
        step(stage)
        before = DeadLetter.objects.get()
        assert resolve("redeliver").done == 1
        step(stage)
    row = InboxMessage.objects.get()
    assert row.message_id == before.message_id
    if got:
        assert row.state == "processed"
    else:
        assert row.state == "dead"
        assert DeadLetter.objects.get().deaths == 2
        assert DeadLetter.objects.get().resolution == "open"


def test_a_redelivery_is_of_the_letters_own_database() -> None:
    handler = Stubborn()
    with declared(handler, using="other") as stage:
        send(stage.destination)
        step(stage, times=3)
        handler.mended = True
        operation = bulk.finish(bulk.start("redeliver", {}, using="other"))
        assert operation.done == 1
        assert ship("other") == 0
        step(stage)
    row = InboxMessage.objects.using("other").get()
    assert row.state == "processed"
    assert handler.seen[-1].delivery_attempt == 1
