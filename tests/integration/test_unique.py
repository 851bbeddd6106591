"""At most one pending message has a given unique key, even if several transactions
request the key at the same time."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections, transaction

from django_txmsg import (
    Destination,
    cancel_message,
    reschedule_message,
    send_message,
    send_messages,
    signals,
)
from django_txmsg.errors import AlreadyPending, DuplicateMessage, InvalidMessage
from django_txmsg.models import OutboxMessage
from django_txmsg.models.fields import clock
from django_txmsg.testing import drain
from tests.faults import wait_until
from tests.running import committing, declared, ship, txmsg

PLACE = "tests.unique"
HOUR, SECOND = dt.timedelta(hours=1), dt.timedelta(seconds=1)


@pytest.fixture(autouse=True)
def _nothing_leaves_by_itself() -> Iterator[None]:
    with txmsg():
        yield


def send(body: object = 1, unique: str = "k", **options: Any) -> Any:
    options.setdefault("on_conflict", "skip")
    return send_message(PLACE, body, unique=unique, **options)


def bodies() -> list[str]:
    rows = OutboxMessage.objects.order_by("id")
    return [bytes(row.body).decode() for row in rows]


@pytest.mark.django_db
def test_a_second_message_is_skipped_until_the_first_has_left() -> None:
    first = send({"a": 1}, headers={"h": "x"})
    again = send({"a": 2})

    assert (again.id, again.body, again.headers) == (first.id, {"a": 1}, {"h": "x"})
    assert send(unique="other").id != first.id
    assert ship() == 2
    assert send({"a": 3}).id != first.id
    assert bodies() == ['{"a":1}', "1", '{"a":3}']


@pytest.mark.django_db
def test_on_conflict_error_raises_and_the_transaction_goes_on() -> None:
    first = send()
    for options in ({}, {"on_conflict": "error"}):
        with pytest.raises(AlreadyPending, match="unique key 'k'") as caught:
            send_message(PLACE, 2, unique="k", **options)
        assert caught.value.message_id == first.id
    assert isinstance(caught.value, DuplicateMessage)
    send_message(PLACE, 3)

    assert bodies() == ["1", "3"]


@pytest.mark.django_db
@pytest.mark.parametrize("end", ["dispatched", "dead", "cancelled"])
def test_settled_message_frees_its_unique_key(end: str) -> None:
    expires = dt.timedelta(0) if end == "dead" else None
    first = send(expires=expires)
    if end == "cancelled":
        assert cancel_message(first.id)
    ship()

    assert OutboxMessage.objects.get().state == end
    assert send().id != first.id


@committing
@pytest.mark.postgresql
def test_reused_message_leaves_after_the_reusing_commit() -> None:
    """A transaction reuses a pending message. The message is sent only after this
    transaction commits, so that its receiver sees the transaction's changes."""
    with transaction.atomic():
        first = send(1)
    done: list[int] = []
    woken: list[list[int]] = []

    def elsewhere(work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                done.append(int(work() or 0))
            finally:
                connections.close_all()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)

    def second() -> None:
        with transaction.atomic():
            assert send(3).id == first.id

    def wake(ids: list[int], **_: object) -> None:
        woken.append(ids)

    signals.messages_committed.connect(wake)
    try:
        with transaction.atomic():
            assert send(2).id == first.id
            elsewhere(ship)
            assert done == [0]
            elsewhere(second)  # does not wait for us, nor we for it
            assert len(done) == 2
            elsewhere(ship)
            assert done[2] == 0
        assert woken == [[OutboxMessage.objects.get().pk]] * 2
    finally:
        signals.messages_committed.disconnect(wake)
    assert ship() == 1
    assert bodies() == ["1"]


@committing
@pytest.mark.postgresql
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("change", ["cancel", "reschedule"])
def test_cancelling_a_reused_message_waits_for_the_transaction(
    change: str, commits: bool
) -> None:
    """An operator cancels or reschedules a message that an open transaction reuses. The
    change waits for that transaction. Otherwise the transaction might commit its
    changes without a message about them."""
    with transaction.atomic():
        first = send(1)
    changed: list[bool] = []

    def other() -> None:
        try:
            if change == "cancel":
                changed.append(cancel_message(first.id))
            else:
                changed.append(reschedule_message(first.id, delay=HOUR))
        finally:
            connections.close_all()

    thread = threading.Thread(target=other)
    with suppress(KeyError), transaction.atomic():
        assert send(2).id == first.id
        thread.start()
        wait_until(lambda: waiting() == 1)
        assert OutboxMessage.objects.get().state == "pending"
        assert changed == []
        if not commits:
            raise KeyError
    thread.join(60)

    assert changed == [True]


def waiting() -> int:
    """Return how many database sessions wait for a lock at present."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return int(cursor.fetchone()[0])


@committing
@pytest.mark.parametrize("expires", [None, HOUR])
def test_reused_message_expires_no_sooner_than_the_new_one(
    expires: dt.timedelta | None,
) -> None:
    with transaction.atomic():
        first = send(1, expires=2 * SECOND)
    with transaction.atomic():
        assert send(2, expires=expires).id == first.id
        row = OutboxMessage.objects.get()
        wait_until(lambda: clock("default") > row.created_at + 2 * SECOND)
    ship()

    assert OutboxMessage.objects.get().state == "dispatched"


@pytest.mark.django_db
@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "last"),
    [(1, 2, 2), (2, 1, 2), (1, None, None), (None, 1, None), (1, 1, 1)],
)
def test_the_later_expiry_holds(
    first: int | None, second: int | None, last: int | None, one_call: bool
) -> None:
    given = [
        {"destination": PLACE, "body": hours, "unique": "k", "on_conflict": "skip"}
        | ({"expires": hours * HOUR} if hours else {})
        for hours in (first, second)
    ]
    if one_call:
        send_messages(given)
    else:
        for one in given:
            send_messages([one])

    row = OutboxMessage.objects.get()
    assert (row.expires_at is None) == (last is None)
    if row.expires_at is not None:
        assert abs(row.expires_at - row.created_at - (last or 0) * HOUR) < 60 * SECOND


@pytest.mark.django_db
def test_refused_send_does_not_change_the_expiry() -> None:
    send(1, expires=HOUR)
    before = OutboxMessage.objects.get().expires_at
    with pytest.raises(AlreadyPending):
        send(2, on_conflict="error")

    assert OutboxMessage.objects.get().expires_at == before


@pytest.mark.django_db
@pytest.mark.parametrize("given_back", [False, True])
def test_claimed_message_frees_its_unique_key(
    given_back: bool,
) -> None:
    first, token = send(1), uuid.uuid4()
    (row,) = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=1
    )
    if given_back:
        assert OutboxMessage.objects.release([row.id], token) == 1
    second = send(2)

    assert second.id != first.id
    assert send(3).id == second.id
    assert bodies() == ["1", "2"]


@pytest.mark.django_db
def test_expired_message_frees_its_unique_key() -> None:
    first = send(1, expires=dt.timedelta(0))
    second = send(2, expires=dt.timedelta(hours=1))
    assert second.id != first.id
    with pytest.raises(AlreadyPending):
        send(3, on_conflict="error")
    ship()

    states = [row.state for row in OutboxMessage.objects.order_by("id")]
    assert states == ["dead", "dispatched"]


@pytest.mark.django_db
def test_a_pending_message_stands_for_later_ones_of_its_unique_key() -> None:
    for number in range(5):
        send(number, delay=dt.timedelta(minutes=1))

    assert bodies() == ["0"]


@pytest.mark.django_db
def test_the_index_keeps_others_out_too() -> None:
    send()
    row = OutboxMessage.objects.get()
    row.pk, row.message_id = None, uuid.uuid4()
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save(force_insert=True)


@committing
def test_a_transaction_that_rolls_back_frees_its_key() -> None:
    with suppress(KeyError), transaction.atomic():
        send(1)
        raise KeyError
    with transaction.atomic():
        with suppress(KeyError), transaction.atomic():
            send(2)
            raise KeyError
        send(3)
        send(4)

    assert bodies() == ["3"]


@committing
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.postgresql
def test_send_waits_for_the_transaction_holding_the_key(commits: bool) -> None:
    found: list[Any] = []
    asked = threading.Event()

    def other() -> None:
        try:
            with transaction.atomic():
                connection.ensure_connection()
                asked.set()
                found.append(send(2))
        finally:
            connections.close_all()

    thread = threading.Thread(target=other)
    with suppress(KeyError), transaction.atomic():
        first = send(1)
        thread.start()
        assert asked.wait(60)
        thread.join(0.3)  # it waits for our end
        assert found == []
        if not commits:
            raise KeyError
    thread.join(60)

    assert bodies() == (["1"] if commits else ["2"])
    assert (found[0].id == first.id) is commits


@committing
def test_concurrent_sends_with_one_unique_key_store_one() -> None:
    start, found, refused = threading.Barrier(6), set[uuid.UUID](), []

    def race(number: int) -> None:
        start.wait(30)
        try:
            for turn in range(5):
                with suppress(KeyError), transaction.atomic():
                    try:
                        on_conflict = "skip" if number % 2 else "error"
                        one = send(number, on_conflict=on_conflict)
                    except AlreadyPending:
                        refused.append(number)
                    else:
                        if (number + turn) % 3 == 0:
                            raise KeyError  # rolled back
                        found.add(one.id)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=race, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(bodies()) == 1
    assert found == {OutboxMessage.objects.get().message_id}


@committing
def test_a_key_that_is_freed_and_taken_all_the_time_is_held_by_one_at_a_time() -> None:
    """Three senders and a relay work at the same time. Each sender stores a message,
    unless another pending message has the key. In the end, every message was sent."""
    done = threading.Event()

    def relay() -> None:
        try:
            while not done.is_set():
                ship()
        finally:
            connections.close_all()

    def sender() -> None:
        try:
            for _ in range(30):
                with transaction.atomic():
                    send()
        finally:
            connections.close_all()

    senders = [threading.Thread(target=sender) for _ in range(3)]
    helper = threading.Thread(target=relay)
    for thread in [helper, *senders]:
        thread.start()
    for thread in senders:
        thread.join(100)
    done.set()
    helper.join(60)
    ship()

    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert len(bodies()) >= 1


@pytest.mark.django_db
def test_a_message_replaces_the_pending_one() -> None:
    first = send(1)
    second = send(2, on_conflict="replace")
    assert second.id != first.id
    replaced = OutboxMessage.objects.get(message_id=first.id)
    assert replaced.cancelled_at is not None
    assert replaced.last_error == f"cancelled: replaced by {second.id}"
    assert send(3).id == second.id
    assert ship() == 1
    third = send(4, on_conflict="replace")  # the second one has left
    assert OutboxMessage.objects.get(message_id=third.id).cancelled_at is None
    assert OutboxMessage.objects.exclude(cancelled_at=None).count() == 1


@committing
def test_a_replacement_that_rolls_back_cancels_nothing() -> None:
    with transaction.atomic():
        first = send(1)
    with suppress(KeyError), transaction.atomic():
        send(2, on_conflict="replace")
        raise KeyError
    assert bodies() == ["1"]
    assert OutboxMessage.objects.get(message_id=first.id).cancelled_at is None


@pytest.mark.django_db
def test_in_bulk_the_last_replacement_of_a_key_is_stored() -> None:
    held = send(0)
    words = ["skip", "replace", "skip", "replace"]
    found = send_messages(
        {"destination": PLACE, "body": body, "unique": "k", "on_conflict": word}
        for body, word in enumerate(words, 1)
    )
    assert {one.body for one in found} == {4}
    assert bodies() == ["0", "4"]
    assert OutboxMessage.objects.get(message_id=held.id).cancelled_at is not None


@committing
def test_of_concurrent_replacements_one_is_pending() -> None:
    """Several transactions replace a key's pending message at the same time. Each waits
    for the previous transaction to commit, and then cancels that transaction's message.
    No deadlock occurs."""
    start, failed = threading.Barrier(4), list[BaseException]()

    def race(number: int) -> None:
        try:
            start.wait(30)
            for _ in range(5):
                with transaction.atomic():
                    send(number, on_conflict="replace")
        except BaseException as error:
            failed.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=race, args=(one,)) for one in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failed == []
    assert OutboxMessage.objects.count() == 20
    assert OutboxMessage.objects.filter(cancelled_at=None).count() == 1


@pytest.mark.django_db
def test_in_bulk_each_message_has_its_own_key_and_conflict_rule() -> None:
    def of(body: int, unique: str | None = None, word: str = "skip") -> dict[str, Any]:
        one: dict[str, Any] = {"destination": PLACE, "body": body}
        return one | ({"unique": unique, "on_conflict": word} if unique else {})

    held = send(0, "a")
    many = [of(1), of(2, "a"), of(3, "b"), of(4, "b"), *(of(9) for _ in range(10))]
    found = send_messages(many)

    assert [one.body for one in found[:4]] == [1, 0, 3, 3]
    assert found[1].id == held.id
    assert found[2].id == found[3].id
    assert bodies() == ["0", "1", "3", *["9"] * 10]

    for wrong in (
        [of(5), of(6, "b", "error")],
        [of(5, "c"), of(6, "c", "error")],
        [of(5, "d"), {**of(6), "message_id": held.id}],
    ):
        with pytest.raises(DuplicateMessage):
            send_messages(wrong)
    assert len(bodies()) == 13


@pytest.mark.django_db
def test_a_message_id_that_is_there_is_an_error_in_any_case() -> None:
    first = send()
    ship()
    with pytest.raises(DuplicateMessage) as caught:
        send(message_id=first.id)
    assert not isinstance(caught.value, AlreadyPending)


@pytest.mark.django_db
def test_a_stage_that_runs_again_finds_its_own_message() -> None:
    seen: list[uuid.UUID] = []

    def handler(message: Any) -> None:
        seen.append(send(unique="next", delay=dt.timedelta(hours=1)).id)
        send_message("tests.other", 1)
        if len(seen) < 2:
            raise ValueError

    with declared(handler, "tests.first"):
        send_message("tests.first", 1)
        drain("tests.first", ahead=dt.timedelta(minutes=30), raises=False)

    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert OutboxMessage.objects.filter(unique_key="next").count() == 1


@pytest.mark.django_db
def test_without_an_outbox_there_is_no_key() -> None:
    def handler(message: Any) -> None:
        send()

    with declared(handler, "tests.first", transaction="best_effort_1pc"):
        send_message("tests.first", 1)
        with pytest.raises(InvalidMessage, match="must be stored at once"):
            drain("tests.first")


@pytest.mark.django_db
def test_a_destination_takes_it_too() -> None:
    place = Destination(PLACE, dict)
    first = place.send({}, unique="k")

    assert place.send({}, unique="k", on_conflict="skip").id == first.id
    assert send_message(PLACE, 1, unique=None).id != first.id


@pytest.mark.django_db
@pytest.mark.parametrize(
    "options",
    [
        {"unique": ""},
        {"unique": 5},
        {"unique": "x" * 256},
        {"unique": "a\0b"},
        {"unique": "k", "on_conflict": "ignore"},
    ],
)
def test_invalid_unique_key_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        send_message(PLACE, 1, **options)
