"""Bulk operations handle each message exactly once, even if workers are killed. They
can be limited, paused and cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_txmsg.dead_letters import bulk, selection
from django_txmsg.errors import TxmsgError
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage
from tests import factories
from tests.faults import ManageProcess, wait_until


def each_once(count: int) -> None:
    """Check that the outbox contains the message of every dead letter once, that these
    are `count` messages, and that every dead letter is marked as redelivered."""
    stored = OutboxMessage.objects.values_list("message_id", flat=True)
    assert len(stored) == count
    assert set(stored) == set(DeadLetter.objects.values_list("message_id", flat=True))
    assert not DeadLetter.objects.exclude(resolution="redelivered").exists()


@pytest.mark.django_db
def test_batches_grow_while_they_are_fast() -> None:
    factories.DeadLetterFactory.create_batch(750)
    operation = bulk.start("redeliver", {})
    sizes = []

    while (handled := bulk.work_batch("default")) is not None:
        sizes.append(handled)

    assert sizes == [100, 200, 400, 50, 0]
    operation.refresh_from_db()
    assert (operation.state, operation.done, operation.skipped) == ("done", 750, 0)
    each_once(750)


@pytest.mark.django_db(transaction=True)
def test_a_killed_consumer_loses_and_doubles_nothing(
    manage: Callable[..., ManageProcess],
) -> None:
    factories.DeadLetterFactory.create_batch(1000)
    operation = bulk.start("redeliver", {})
    consumer = manage(
        "consume",
        hook="tests.admin.hooks.hang_after_the_work_of_the_third_batch",
        txmsg={"DISPATCH_ON_COMMIT": "off"},
    )
    consumer.wait_for_line("third batch redelivered, not committed")

    consumer.kill()

    operation.refresh_from_db()
    assert (operation.done, operation.state) == (300, "running")
    assert OutboxMessage.objects.count() == 300
    manage("consume", txmsg={"DISPATCH_ON_COMMIT": "off"})
    wait_until(
        lambda: BulkOperation.objects.get().state == "done",
        deadline=60,
        message="the bulk operation done by another consumer",
    )
    each_once(1000)


@pytest.mark.django_db(transaction=True)
def test_once_ends_with_the_operation_and_leaves_a_paused_one(
    manage: Callable[..., ManageProcess],
) -> None:
    factories.DeadLetterFactory.create_batch(90)
    # Longer than the idle time after which there would be no more to wait for.
    slow = bulk.start("discard", {}, rate=30)
    paused = bulk.start("redeliver", {})
    assert BulkOperation.objects.pause(paused.pk)

    manage("consume", "--once").succeed()

    slow.refresh_from_db()
    paused.refresh_from_db()
    assert (slow.state, slow.done) == ("done", 90)
    assert (paused.state, paused.done) == ("paused", 0)


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_two_workers_share_an_operation_and_double_nothing(settings: Any) -> None:
    settings.TXMSG = {**settings.TXMSG, "DISPATCH_ON_COMMIT": "off"}
    factories.DeadLetterFactory.create_batch(900)
    for number in range(3):
        bulk.start("redeliver", {"ids": list(ids_of(number))})
    stop = threading.Event()

    def work() -> None:
        try:
            while BulkOperation.objects.filter(state="running").exists():
                bulk.work_off("default", stop)
        finally:
            connections.close_all()

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert sum(one.done for one in BulkOperation.objects.all()) == 900
    each_once(900)


def ids_of(number: int) -> list[int]:
    """Return one of three overlapping parts of all ids."""
    ids = list(DeadLetter.objects.order_by("pk").values_list("pk", flat=True))
    return ids[number * 250 : number * 250 + 400]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kind", "meanwhile"),
    [("redeliver", "restore"), ("discard", "restore"), ("restore", "discard")],
)
def test_letter_that_matches_after_the_request_is_untouched(
    kind: str, meanwhile: str
) -> None:
    restores = kind == "restore"
    other = factories.DeadLetterFactory(discarded=not restores)
    factories.DeadLetterFactory(discarded=restores)
    operation = bulk.start(kind, {})
    bulk.finish(bulk.start(meanwhile, {"ids": [other.pk]}))

    assert bulk.finish(operation).done == operation.total == 1

    other.refresh_from_db()
    assert other.resolution == ("discarded" if restores else "open")


@pytest.mark.django_db
@pytest.mark.parametrize(("filters", "size"), [({}, 1), ({}, 100), ({"no": 1}, 1)])
def test_operation_cancelled_after_its_batch_failed_stays_cancelled(
    filters: dict[str, Any], size: int
) -> None:
    factories.DeadLetterFactory()
    running = bulk.start("redeliver", {})
    running.batch_size, running.filter = size, filters
    BulkOperation.objects.cancel(running.pk)
    before = BulkOperation.objects.values().get()

    assert bulk._smaller(running, "default", ValueError("refused")) == 0

    assert BulkOperation.objects.values().get() == before


@pytest.mark.django_db
def test_reasons_of_messages_that_fail_alone_are_limited() -> None:
    letters = factories.DeadLetterFactory.create_batch(bulk.REMEMBERED + 2)
    operation = bulk.start("redeliver", {})
    for _ in letters:
        operation.batch_size = 1
        assert bulk._smaller(operation, "default", ValueError("refused")) == 1
        operation.refresh_from_db()

    assert operation.skipped == bulk.REMEMBERED + 2
    assert len(operation.skipped_why) == bulk.REMEMBERED


@pytest.mark.django_db
def test_message_that_cannot_be_redelivered_does_not_stop_the_others() -> None:
    letters = factories.DeadLetterFactory.create_batch(250)
    spoilt = letters[130]
    # Somebody has stored just that redelivery already.
    factories.OutboxMessageFactory(
        message_id=spoilt.message_id, replay_id=f"dead-letter-{spoilt.pk}-1"
    )

    operation = bulk.finish(bulk.start("redeliver", {}))

    assert (operation.state, operation.done, operation.skipped) == ("done", 249, 1)
    assert list(operation.skipped_why) == [str(spoilt.pk)]
    assert operation.last_error
    spoilt.refresh_from_db()
    assert spoilt.resolution == "open"


@pytest.fixture
def slow_inserts() -> Iterator[None]:
    """Storing more than ten messages in one statement takes longer than the database
    allows."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            CREATE FUNCTION slow_insert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF (SELECT count(*) FROM stored) > 10 THEN PERFORM pg_sleep(60); END IF;
                RETURN NULL;
            END $$;
            CREATE TRIGGER slow_insert AFTER INSERT ON django_txmsg_outboxmessage
                REFERENCING NEW TABLE AS stored
                FOR EACH STATEMENT EXECUTE FUNCTION slow_insert();
            SET statement_timeout = '500ms'
            """
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = 0; DROP FUNCTION slow_insert() CASCADE")


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_batch_that_times_out_becomes_smaller_and_blocks_no_other_operation(
    slow_inserts: None,
) -> None:
    slow = factories.DeadLetterFactory.create_batch(25, reason="refused")
    factories.DeadLetterFactory.create_batch(3, reason="expired")
    bulk.start("redeliver", {"reason": "refused"})
    bulk.start("discard", {"reason": "expired"})

    bulk.work_off("default", threading.Event())

    ends = BulkOperation.objects.order_by("pk").values_list("state", "done", "skipped")
    assert list(ends) == [("done", 25, 0), ("done", 3, 0)]
    assert OutboxMessage.objects.count() == len(slow)


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_operation_waits_for_a_locked_message_although_statements_time_out() -> None:
    letters = factories.DeadLetterFactory.create_batch(5)
    operation = bulk.start("discard", {})
    locked, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            DeadLetter.objects.select_for_update().get(pk=letters[2].pk)
            locked.set()
            leave.wait(60)
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert locked.wait(30)
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = '500ms'")
        for _ in range(3):
            assert bulk.work_off("default", threading.Event()) == 0
        operation.refresh_from_db()
        assert (operation.state, operation.batch_size) == ("running", 100)
    finally:
        leave.set()
        thread.join()
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = 0")
    assert bulk.work_off("default", threading.Event()) == 5


@pytest.mark.django_db
def test_operation_whose_filter_is_unknown_is_paused_and_blocks_no_other() -> None:
    factories.DeadLetterFactory.create_batch(3)
    newer, other = bulk.start("redeliver", {}), bulk.start("discard", {})
    BulkOperation.objects.filter(pk=newer.pk).update(filter={"newer": "x"})

    bulk.work_off("default", threading.Event())

    newer.refresh_from_db()
    assert newer.state == "paused"
    assert "newer" in newer.last_error
    other.refresh_from_db()
    assert (other.state, other.done) == ("done", 3)


@pytest.mark.django_db
def test_pausing_stops_after_the_batch_and_resuming_goes_on() -> None:
    factories.DeadLetterFactory.create_batch(300)
    operation = bulk.start("redeliver", {})
    bulk.work_batch("default")

    assert BulkOperation.objects.pause(operation.pk)
    assert bulk.work_off("default", threading.Event()) == 0
    assert OutboxMessage.objects.count() == 100

    assert BulkOperation.objects.resume(operation.pk)
    assert bulk.work_off("default", threading.Event()) == 200
    each_once(300)


@pytest.mark.django_db
def test_cancelled_operation_keeps_its_finished_messages() -> None:
    factories.DeadLetterFactory.create_batch(300)
    operation = bulk.start("redeliver", {})
    bulk.work_batch("default")

    assert BulkOperation.objects.cancel(operation.pk)

    assert bulk.work_batch("default") is None
    assert not BulkOperation.objects.resume(operation.pk)
    assert DeadLetter.objects.filter(resolution="open").count() == 200


@pytest.mark.django_db
def test_the_rate_makes_the_next_batch_wait() -> None:
    factories.DeadLetterFactory.create_batch(40)
    operation = bulk.start("redeliver", {}, rate=10)

    assert bulk.work_batch("default") == 10
    assert bulk.work_batch("default") is None  # not within this second

    BulkOperation.objects.update(due_at=factories.ago(seconds=1))
    assert bulk.work_batch("default") == 10
    with pytest.raises(TxmsgError, match="greater than zero"):
        bulk.start("redeliver", {}, rate=0)
    operation.refresh_from_db()
    assert operation.done == 20


@pytest.mark.django_db
def test_operation_excludes_letters_that_die_later() -> None:
    first = factories.DeadLetterFactory.create_batch(2)
    operation = bulk.start("discard", {})
    later = factories.DeadLetterFactory(created_at=factories.ago(seconds=-60))
    again = first[1]
    DeadLetter.objects.filter(pk=again.pk).update(created_at=factories.ago(seconds=-60))

    bulk.finish(operation)

    for letter, resolution in (
        (first[0], "discarded"),
        (later, "open"),
        (again, "open"),
    ):
        letter.refresh_from_db()
        assert letter.resolution == resolution


@pytest.mark.django_db
def test_each_filter_narrows() -> None:
    letter = factories.DeadLetterFactory(
        stage="mail.send",
        destination="mail.out",
        reason="refused",
        fingerprint="b" * 16,
        deaths=2,
        created_at=factories.ago(days=3),
        correlation_id="flow-1",
        operation=7,
    )
    factories.DeadLetterFactory.create_batch(2)

    for filters in (
        {"ids": [letter.pk]},
        {"stage": "mail.send"},
        {"destination": "mail.out"},
        {"reason": "refused"},
        {"fingerprint": "b" * 16},
        {"again": True},
        {"before": factories.ago(days=2).isoformat()},
        {"since": factories.ago(days=4).isoformat(), "older": str(letter.pk + 1)},
        {"operation": "7"},
        {"search": "flow-1"},
    ):
        found = selection.matching("redeliver", filters, using="default")
        assert [one.pk for one in found] == [letter.pk], filters
    with pytest.raises(TxmsgError, match="cannot be filtered by stages"):
        selection.matching("redeliver", {"stages": "mail.send"}, using="default")


@pytest.mark.django_db
def test_a_redelivered_message_carries_its_own_headers_and_key() -> None:
    letter = factories.DeadLetterFactory(correlation_id="flow-1")
    letter.headers |= {
        "tenant": "north",
        "txmsg-key": "customer-7",
        "correlation-id": "flow-1",
        "x-death": "broker's own",
    }
    letter.save()

    bulk.finish(bulk.start("redeliver", {}))

    stored = OutboxMessage.objects.get()
    assert stored.headers == {"tenant": "north"}
    assert (stored.key, stored.correlation_id) == ("customer-7", "flow-1")
    assert stored.content_type == "application/json"
    assert bytes(stored.body) == bytes(letter.body)
    assert stored.due_at == stored.created_at or connection.vendor == "postgresql"


@pytest.mark.django_db
def test_message_that_dies_again_is_the_same_letter_and_can_be_redelivered() -> None:
    letter = factories.DeadLetterFactory()
    bulk.finish(bulk.start("redeliver", {}))
    DeadLetter.objects.filter(pk=letter.pk).update(
        resolution="open", deaths=2, resolved_at=None
    )

    bulk.finish(bulk.start("redeliver", {}))

    replays = OutboxMessage.objects.order_by("pk").values_list("replay_id", flat=True)
    assert list(replays) == [
        f"dead-letter-{letter.pk}-1",
        f"dead-letter-{letter.pk}-2",
    ]
    assert bulk.finish(bulk.start("redeliver", {})).done == 0
