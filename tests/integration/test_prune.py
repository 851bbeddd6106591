"""`prune_messages` deletes only old, settled rows, in short transactions."""

from __future__ import annotations

import io
import itertools
import os
import threading
import uuid
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.models import Model
from django.db.models.signals import post_delete
from django.test.utils import CaptureQueriesContext

from django_txmsg.dead_letters import bulk
from django_txmsg.models import (
    Attempt,
    DeadLetter,
    IdempotencyKey,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    SessionRecord,
    Worker,
)
from django_txmsg.monitoring import retention
from tests import factories as make
from tests.factories import ago
from tests.faults import wait_until
from tests.running import txmsg

pytestmark = pytest.mark.django_db(databases=["default", "other"])


@pytest.fixture(autouse=True)
def _kept_for_a_week() -> Any:
    keep = {"OUTBOX": 7, "INBOX": 7, "DEAD_LETTERS": None, "IDEMPOTENCY": 1}
    with txmsg(RETENTION=keep):
        yield


def prune(*arguments: str) -> str:
    out = io.StringIO()
    call_command("prune_messages", *arguments, stdout=out)
    return out.getvalue()


def left(model: type[Model]) -> set[Any]:
    return set(model._default_manager.values_list("pk", flat=True))


def aged(model: type[Model], row: Any, **instants: Any) -> Any:
    model._default_manager.filter(pk=row.pk).update(**instants)
    return row


def test_dispatched_messages_are_deleted_after_their_retention() -> None:
    old = make.OutboxMessageFactory(dispatched=True, created_at=ago(days=8))
    young = make.OutboxMessageFactory(dispatched=True, created_at=ago(days=6))
    late = make.OutboxMessageFactory(created_at=ago(days=9), dispatched_at=ago(days=1))

    output = prune()

    assert "outbox messages: 1 deleted." in output
    assert left(OutboxMessage) == {young.pk, late.pk}
    assert old.pk not in left(OutboxMessage)


def test_a_closed_output_stops_neither_pruning_nor_cancelling() -> None:
    make.OutboxMessageFactory(dispatched=True, created_at=ago(days=8))
    make.InboxMessageFactory(first_received_at=ago(days=8), processed_at=ago(days=8))
    pending = [str(make.OutboxMessageFactory().message_id) for _ in range(2)]
    for command in (["prune_messages"], ["txmsg", "cancel", *pending]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as closed:
            call_command(*command, stdout=closed)
    assert not InboxMessage.objects.exists()
    assert not OutboxMessage.objects.filter(dead_at=None).exists()


def test_pending_rows_are_never_pruned() -> None:
    pending = make.OutboxMessageFactory(created_at=ago(days=900))
    leased = make.OutboxMessageFactory(
        created_at=ago(days=900), lease_until=ago(days=899), lease_token=uuid.uuid4()
    )
    delayed = make.OutboxMessageFactory(created_at=ago(days=900), due_at=ago(days=-1))
    parked = make.InboxMessageFactory(parked=True, first_received_at=ago(days=900))
    received = make.InboxMessageFactory(
        processed_at=None, first_received_at=ago(days=900)
    )

    prune()

    assert left(OutboxMessage) == {pending.pk, leased.pk, delayed.pk}
    assert left(InboxMessage) == {parked.pk, received.pk}


def test_a_dead_message_stays_until_its_dead_letter_is_resolved() -> None:
    row = make.OutboxMessageFactory(dead=True, created_at=ago(days=30))
    letter = make.DeadLetterFactory(
        message_id=row.message_id, stage="", created_at=ago(days=30)
    )

    prune()
    assert left(OutboxMessage) == {row.pk}

    bulk.finish(bulk.start("discard", {"ids": [letter.pk]}))
    prune()
    assert left(OutboxMessage) == set()


def test_dead_letter_of_another_stage_keeps_no_row() -> None:
    row = make.OutboxMessageFactory(dead=True, created_at=ago(days=30))
    make.DeadLetterFactory(message_id=row.message_id, stage="orders.place")

    prune()

    assert left(OutboxMessage) == set()


def test_processed_messages_go_with_their_attempts() -> None:
    old = make.InboxMessageFactory(first_received_at=ago(days=8))
    gone = make.AttemptFactory(message_id=old.message_id, failed_at=ago(days=8))
    other = make.AttemptFactory(message_id=old.message_id, stage="mails.send")
    make.InboxMessageFactory(message_id=old.message_id, stage="mails.send")
    young = make.InboxMessageFactory(first_received_at=ago(days=3))
    kept = make.AttemptFactory(message_id=young.message_id)

    output = prune()

    assert "inbox messages: 1 deleted." in output
    assert old.pk not in left(InboxMessage)
    assert left(Attempt) == {other.pk, kept.pk}
    assert gone.pk not in left(Attempt)


def test_processed_message_goes_with_any_number_of_attempts() -> None:
    """SQLite takes at most 32,766 parameters in a statement."""
    row = make.InboxMessageFactory(first_received_at=ago(days=8))
    Attempt.objects.bulk_create(
        [
            Attempt(message_id=row.message_id, stage=row.stage, number=number)
            for number in range(32_767)
        ]
    )

    prune()

    assert not Attempt.objects.exists()


@pytest.mark.sqlite
def test_attempts_of_pruned_messages_are_found_by_an_index() -> None:
    make.InboxMessageFactory(first_received_at=ago(days=8))
    (kind,) = [kind for kind in retention.kinds() if kind.model is InboxMessage]
    with CaptureQueriesContext(connection) as queries:
        assert sum(retention.prune(kind, "default")) == 1
    read = [one["sql"] for one in queries if "django_txmsg_attempt" in one["sql"]]
    assert read
    with connection.cursor() as cursor:
        for sql in read:
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
            plan = [row[-1] for row in cursor.fetchall()]
            assert not [one for one in plan if one.startswith("SCAN django_txmsg")]


def test_a_message_whose_copies_keep_coming_is_remembered() -> None:
    row = make.InboxMessageFactory(
        first_received_at=ago(days=30), last_received_at=ago(days=1)
    )
    aged(InboxMessage, row, processed_at=ago(days=30))

    prune()

    assert left(InboxMessage) == {row.pk}


def test_a_task_of_celery_s_that_was_terminated_is_forgotten() -> None:
    begun: dict[str, Any] = {"processed_at": None, "attempts": 1, "service": "tests"}
    instants = {"first_received_at": ago(days=30), "last_received_at": ago(days=8)}
    task = make.InboxMessageFactory(**begun, created_at=None)
    young = make.InboxMessageFactory(**begun, created_at=None)
    message = make.InboxMessageFactory(**begun, created_at=ago(days=30))
    foreign = make.InboxMessageFactory(**{**begun, "service": ""}, created_at=None)
    for row in (task, message, foreign):
        aged(InboxMessage, row, **instants)

    prune()

    assert left(InboxMessage) == {young.pk, message.pk, foreign.pk}


def test_a_dead_inbox_row_waits_for_its_own_dead_letter() -> None:
    row = make.InboxMessageFactory(
        dead=True, first_received_at=ago(days=30), dead_at=ago(days=30)
    )
    attempt = make.AttemptFactory(message_id=row.message_id)
    letter = make.DeadLetterFactory(message_id=row.message_id)

    prune()
    assert (left(InboxMessage), left(Attempt)) == ({row.pk}, {attempt.pk})

    bulk.finish(bulk.start("discard", {"ids": [letter.pk]}))
    prune()
    assert (left(InboxMessage), left(Attempt)) == (set(), set())


def test_dead_letters_are_kept_unless_a_setting_says_for_how_long() -> None:
    resolved = make.DeadLetterFactory(discarded=True, created_at=ago(days=400))
    aged(DeadLetter, resolved, resolved_at=ago(days=300))
    recent = make.DeadLetterFactory(discarded=True, created_at=ago(days=400))
    opened = make.DeadLetterFactory(created_at=ago(days=400))

    assert "dead letters: kept for ever." in prune()
    assert left(DeadLetter) == {resolved.pk, recent.pk, opened.pk}

    with txmsg(RETENTION={"DEAD_LETTERS": 90}):
        assert "dead letters: 1 deleted." in prune()
    assert left(DeadLetter) == {recent.pk, opened.pk}


def test_records_of_the_http_outbox_go_too() -> None:
    key = IdempotencyKey.objects.create(caller="a", key="1", fingerprint="f")
    fresh = IdempotencyKey.objects.create(caller="a", key="2", fingerprint="f")
    aged(IdempotencyKey, key, created_at=ago(days=2))
    for number in range(5):
        session = uuid.uuid4()
        SessionRecord.objects.commit(session)
        SessionRecord.objects.filter(pk=session).update(created_at=ago(days=2 * number))

    prune("--batch-size", "1")

    assert left(IdempotencyKey) == {fresh.pk}
    assert SessionRecord.objects.count() == 4


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("session records", lambda: SessionRecord(uuid.uuid4())),
        ("idempotency keys", lambda: IdempotencyKey(caller="a", key=uuid.uuid4())),
    ],
)
def test_rows_of_a_full_second_are_pruned(name: str, row: Any) -> None:
    (kind,) = [one for one in retention.kinds() if one.name == name]
    kind.model._default_manager.bulk_create([row() for _ in range(3)])
    # As the database's clock writes it.
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {kind.model._meta.db_table}"
            " SET created_at = '2020-01-01 00:00:05.000'"
        )

    deleted = list(itertools.islice(retention.prune(kind, "default", batch_size=2), 9))

    assert sum(deleted) == 3
    assert not left(kind.model)
    assert len(deleted) < 9


def test_unreceived_control_messages_are_deleted_after_a_day() -> None:
    queues = {"mine.txmsg.control": 30, "orders.place": 30, "other.txmsg.control": 30}
    mine = [("mine.txmsg.control", 20), ("former.txmsg.control", 30)]
    for queue, hours in [*queues.items(), *mine]:
        row = QueueMessage.objects.create(queue=queue, body=b"")
        aged(QueueMessage, row, enqueued_at=ago(hours=hours))

    with txmsg(SERVICE="mine", FORMER_SERVICES=("former",)):
        assert "stale control messages: 2 deleted." in prune()
    left_in = QueueMessage.objects.values_list("queue", flat=True)
    assert sorted(left_in) == sorted(queues)


def test_a_worker_that_was_killed_is_forgotten_after_a_day() -> None:
    make.WorkerFactory(heartbeat_at=ago(hours=25))
    recent = make.WorkerFactory(heartbeat_at=ago(hours=23))

    assert "silent workers: 1 deleted." in prune()
    assert left(Worker) == {recent.pk}


def test_a_dry_run_counts_and_deletes_nothing() -> None:
    make.OutboxMessageFactory.create_batch(3, dispatched=True, created_at=ago(days=9))

    assert "outbox messages: 3 would be deleted." in prune("--dry-run")
    assert OutboxMessage.objects.count() == 3


def test_each_pruning_transaction_reads_a_bounded_page() -> None:
    for number in range(23):
        make.OutboxMessageFactory(
            created_at=ago(days=9), dispatched_at=ago(days=9) if number % 2 else None
        )
    young = [make.OutboxMessageFactory(dispatched=True) for _ in range(7)]
    kind = retention.kinds()[0]

    with CaptureQueriesContext(connection) as queries:
        batches = list(retention.prune(kind, "default", batch_size=5))

    assert sum(batches) == 11
    assert max(batches) <= 5
    # 23 old rows and 2 of the young ones on the last page; then it looks no further.
    assert sum("DELETE" in one["sql"] for one in queries) == 5
    assert left(OutboxMessage) >= {row.pk for row in young}


def test_a_lake_leaves_the_message_log_to_the_archive() -> None:
    make.OutboxMessageFactory(dispatched=True, created_at=ago(days=90))
    make.InboxMessageFactory(first_received_at=ago(days=90))
    make.DeadLetterFactory(discarded=True, created_at=ago(days=90))
    key = IdempotencyKey.objects.create(caller="a", key="1", fingerprint="f")
    aged(IdempotencyKey, key, created_at=ago(days=90))

    with txmsg(LAKE="file:///var/lake", RETENTION={"DEAD_LETTERS": 1}):
        output = prune()
        brokers = {"default": {"URL": "database://"}}
        with txmsg(LAKE="file:///var/lake", BROKERS=brokers):
            elsewhere = prune("--database", "other")

    assert output.count("left to `manage.py pipeline archive`") == 4
    assert "left to `manage.py pipeline --database other archive`" in elsewhere
    assert OutboxMessage.objects.count() == InboxMessage.objects.count() == 1
    assert DeadLetter.objects.count() == 1
    assert IdempotencyKey.objects.count() == 0


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(CommandError, match="--batch-size: must be 1 or more"):
        prune("--batch-size", "0")


def test_another_database_is_pruned_by_name(transactional_db: None) -> None:
    with pytest.raises(Exception, match="archive"):
        prune("--database", "archive")


@pytest.mark.django_db(databases=["default", "other"])
def test_a_database_of_queues_is_pruned_of_this_services_messages_only() -> None:
    """They are also those that it stored under a former name."""
    long_ago = {"dispatched_at": ago(days=90), "created_at": ago(days=90)}
    for service in ("tests", "before", "another"):
        row = make.OutboxMessageFactory.build(service=service, **long_ago)
        row.save(using="other")
    brokers = {"default": {"URL": "database://other"}}
    with txmsg(BROKERS=brokers, FORMER_SERVICES=["before"]):
        prune("--database", "other")
    rows = OutboxMessage.objects.using("other")
    assert list(rows.values_list("service", flat=True)) == ["another"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.postgresql
@pytest.mark.parametrize("heard", [False, True])
def test_a_message_redelivered_meanwhile_is_not_deleted(heard: bool) -> None:
    """A message that is redelivered during a prune stays, even if the project has a
    receiver of `post_delete`."""
    deleted: list[Any] = []

    def hear(instance: Any, **_: Any) -> None:
        deleted.append(instance)

    if heard:
        post_delete.connect(hear)
    try:
        sent_round_again_while_it_is_pruned()
    finally:
        post_delete.disconnect(hear)
    assert not deleted


def sent_round_again_while_it_is_pruned() -> None:
    row = make.InboxMessageFactory(
        dead=True, first_received_at=ago(days=30), dead_at=ago(days=30)
    )
    attempt = make.AttemptFactory(message_id=row.message_id)

    def blocked() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    def in_a_thread() -> None:
        prune()
        connections.close_all()

    thread = threading.Thread(target=in_a_thread)
    with transaction.atomic():
        InboxMessage.objects.filter(pk=row.pk).update(dead_at=None, attempts=0)
        thread.start()
        wait_until(blocked, message="the DELETE waits for the row's lock")
    thread.join(30)

    assert not thread.is_alive()
    assert (left(InboxMessage), left(Attempt)) == ({row.pk}, {attempt.pk})
