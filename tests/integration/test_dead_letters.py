"""From the grave: what a dead letter keeps, and its three ways out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from django_txmsg import Refuse, bulk, resolution
from django_txmsg.message import Message
from django_txmsg.models import (
    BulkOperation,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
)
from django_txmsg.models.queue import QueueMessage
from django_txmsg.outbox import send_message
from tests.app.models import Effect
from tests.running import committing, declared, put, send, ship, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


class Stubborn:
    """A handler that fails until it is mended."""

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
    """Do that to all dead letters, as the admin and the command do."""
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
        ship()
        step(stage)
        # And once more, as a duplicate of the redelivery would come.
        put(stage.destination, message_id=sent.id)
        step(stage)
    row = OutboxMessage.objects.get(replay_id__startswith="dead-letter")
    assert row.expires_at is None
    again = handler.seen[-1]
    assert (again.id, again.body, again.key) == (sent.id, {"n": 1}, "k")
    assert again.headers["a"] == "b"
    assert again.delivery_attempt == 1
    assert Effect.objects.count() == 1
    letter = DeadLetter.objects.get()
    assert (letter.resolution, letter.resolved_by) == ("redelivered", "anna")
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1


def test_one_that_dies_again_is_the_same_letter_one_death_older() -> None:
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


def test_what_was_processed_meanwhile_is_reported_and_only_forced() -> None:
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
    """The table of dead letters is away, until it is called back."""
    table = DeadLetter._meta.db_table

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    with ExitStack() as stack:
        rename(table, "away")
        stack.callback(rename, "away", table)
        yield stack.close


def test_what_cannot_be_buried_comes_again(no_table: Callable[[], None]) -> None:
    seen: list[Message] = []

    def handler(message: Message) -> None:
        seen.append(message)
        raise Refuse

    with declared(handler) as stage:
        sent = put(stage.destination)
        with pytest.raises(DatabaseError):
            step(stage)
        assert InboxMessage.objects.get().state == "received"
        no_table()
        step(stage)
        assert not QueueMessage.objects.exists()
    assert [one.id for one in seen] == [sent, sent]
    assert DeadLetter.objects.get().deaths == 1


def test_a_dead_outbox_row_says_why() -> None:
    """No silent exit from the state machine: the database itself insists."""
    with transaction.atomic():
        send_message("tests.next", None)
    row = OutboxMessage.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic():
        OutboxMessage.objects.update(dead_at=row.created_at)
    with pytest.raises(IntegrityError), transaction.atomic():
        OutboxMessage.objects.update(
            dead_at=row.created_at, dispatched_at=row.created_at, last_error="x"
        )
