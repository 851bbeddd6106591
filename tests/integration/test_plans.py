"""PostgreSQL reads few rows for a claim, even if its statistics are outdated."""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_txmsg.admin import changes
from django_txmsg.brokers.database import DatabaseBroker
from django_txmsg.dead_letters import bulk, selection
from django_txmsg.models import (
    BulkOperation,
    DeadLetter,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    Run,
    claiming,
)
from django_txmsg.models.claiming import MAX_BYTES, UNLIMITED, Room
from django_txmsg.models.dead_letter import Resolution
from django_txmsg.models.fields import NEVER, clock
from django_txmsg.models.run import WaitsFor
from django_txmsg.monitoring import periods, retention, waiting
from django_txmsg.relaying.listener import seconds_until_due
from django_txmsg.runtime import notifications
from django_txmsg.sending import undoing
from django_txmsg.sending.outbox import send_messages
from tests.faults import ROOT
from tests.running import committing

pytestmark = [
    committing,
    pytest.mark.postgresql,
    pytest.mark.usefixtures("impatient"),
]

BACKLOG = 3000
ROOM = Room(MAX_BYTES, UNLIMITED)
AS_A_RELAY: dict[str, Any] = {
    "broker": "default",
    "services": ["tests", "tests-before"],
}
#: Messages whose time has not come: much more than what a claim may read.
LATER = 5000


@pytest.fixture(autouse=True)
def backlog(impatient: None) -> list[int]:
    """Run ANALYZE and then store pending rows, so the server's statistics contain none
    of them. Return their ids."""
    with connection.cursor() as cursor:
        # The tests before have left empty pages, and the server plans by their number.
        for model in (OutboxMessage, InboxMessage, QueueMessage):
            cursor.execute(f"TRUNCATE {model._meta.db_table} CASCADE")
    store(200)
    OutboxMessage.objects.update(dispatched_at=Now())
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {OutboxMessage._meta.db_table}")
    store(BACKLOG)
    pending = OutboxMessage.objects.filter(dispatched_at=None).order_by("id")
    return list(pending.values_list("id", flat=True))


def store(count: int) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": n, "key": f"k{n}"} for n in range(count)
        )


def read_for(work: Callable[[], Any], verb: str = "") -> int:
    """Return how many rows the executed statements read, added up over all nodes of
    their plans. If `verb` is given, count only the statements that begin with it."""
    said: list[Any] = []

    def explained(execute: Any, sql: str, params: Any, *rest: Any) -> Any:
        if "SAVEPOINT" in sql or not sql.startswith(verb):
            return execute(sql, params, *rest)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)
            (plan,) = cursor.fetchone()
            said.append(plan if isinstance(plan, list) else json.loads(plan))
            transaction.set_rollback(True)
        return execute(sql, params, *rest)

    with connection.execute_wrapper(explained):
        work()
    assert said
    return sum(
        (step["Actual Rows"] + step.get("Rows Removed by Filter", 0))
        * step["Actual Loops"]
        for (top,) in said
        for step in steps(top["Plan"])
    )


def steps(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from steps(below)


def claim(**options: Any) -> uuid.UUID:
    token = uuid.uuid4()
    claimed = OutboxMessage.objects.claim(
        **AS_A_RELAY, token=token, lease=60, limit=100, **options
    )
    assert claimed
    return token


def test_claiming_named_rows_reads_no_others(backlog: list[int]) -> None:
    few = backlog[-10:]
    assert read_for(lambda: claim(ids=few)) < 200


def test_finding_held_back_rows_reads_no_others(backlog: list[int]) -> None:
    few = backlog[-10:]
    claims = {"broker": "default", "services": ["", "tests"]}
    assert read_for(lambda: OutboxMessage.objects.held_back(few, 100, **claims)) < 200


def test_rows_behind_a_delayed_row_of_their_key_are_not_all_read() -> None:
    OutboxMessage.objects.update(dispatched_at=Now())
    copies(OutboxMessage, message_id="gen_random_uuid()", dispatched_at="NULL")
    rows = OutboxMessage.objects.filter(dispatched_at=None).order_by("id")
    first, last = rows[0], rows.latest("id")
    rows.filter(pk=first.pk).update(due_at=Now() + dt.timedelta(hours=1))
    found: list[int] = []

    def look() -> None:
        found[:] = OutboxMessage.objects.held_back(
            [last.pk], 100, broker="default", services=["tests"]
        )

    assert read_for(look) < 1000
    assert (found[0], len(found)) == (first.pk, 100)


def test_settling_walks_over_nothing_else(backlog: list[int]) -> None:
    few = backlog[-10:]
    token = claim(ids=few)
    settle = OutboxMessage.objects.mark_dispatched
    assert read_for(lambda: settle(few, token)) < 200


def test_a_key_is_looked_up(backlog: list[int]) -> None:
    # A hundred rows, and for each of them: is an earlier one of its key pending?
    assert read_for(claim) < 2000


def test_held_unique_keys_are_looked_up() -> None:
    hour = dt.timedelta(hours=1)
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": n, "unique": f"u{n}", "expires": hour}
            for n in range(3)
        )
    wanted = {"u0": 7200.0, "u1": None, "free": 7200.0}

    with transaction.atomic():
        assert read_for(lambda: OutboxMessage.objects.hold(wanted)) < 50


def test_the_heads_of_keys_are_looked_up(backlog: list[int]) -> None:
    assert read_for(partial(claim, heads=True)) < 2000


def copies(model: Any, **columns: str) -> None:
    """Copy a table's first row many times. `columns` maps a column's name to an SQL
    expression for its value in the copies."""
    filled = {
        field.column: columns.get(field.column, field.column)
        for field in model._meta.concrete_fields
        if not field.primary_key
    }
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {model._meta.db_table} ({', '.join(filled)})"
            f" SELECT {', '.join(filled.values())} FROM (SELECT * FROM"
            f" {model._meta.db_table} ORDER BY id LIMIT 1) AS one,"
            f" generate_series(1, {LATER}) AS n"
        )


def nothing_due() -> None:
    claimed = OutboxMessage.objects.claim(
        **AS_A_RELAY, token=uuid.uuid4(), lease=60, limit=100
    )
    assert claimed == []


def test_delayed_messages_are_not_read_before_their_time() -> None:
    OutboxMessage.objects.update(dispatched_at=Now())
    copies(
        OutboxMessage,
        message_id="gen_random_uuid()",
        key="''",
        dispatched_at="NULL",
        due_at="now() + interval '30 days'",
    )
    assert read_for(nothing_due) < 100


def test_the_backlog_of_another_broker_is_not_read() -> None:
    OutboxMessage.objects.update(dispatched_at=Now())
    copies(
        OutboxMessage,
        message_id="gen_random_uuid()",
        key="''",
        dispatched_at="NULL",
        broker="'down'",
    )
    assert read_for(nothing_due) < 100
    topic = notifications.outbox("default")
    assert not seconds_until_due("default", [topic], ["tests"])
    assert read_for(lambda: seconds_until_due("default", [topic], ["tests"])) < 100


def park_for_later() -> None:
    """Park messages that are due in an hour."""
    InboxMessage.objects.create(
        stage="tests.q", message_id=uuid.uuid4(), destination="tests.q"
    )
    copies(
        InboxMessage,
        message_id="gen_random_uuid()",
        due_at="now() + interval '1 hour'",
        headers="'{}'",
        body="'x'",
        last_error="'failed'",
    )


def test_parked_messages_are_not_read_before_their_time() -> None:
    park_for_later()
    inbox = InboxMessage.objects

    def none_of_them() -> None:
        assert inbox.claim_parked("tests.q", uuid.uuid4(), 60) is None

    assert read_for(none_of_them) < 100
    assert read_for(lambda: inbox.due_stages({"tests.q": None, "tests.r": None})) < 100


def test_claim_of_a_parked_message_reads_one_row() -> None:
    InboxMessage.objects.create(
        stage="tests.q", message_id=uuid.uuid4(), destination="tests.q"
    )
    copies(
        InboxMessage,
        message_id="gen_random_uuid()",
        due_at="now() - n * interval '1 second'",
        headers="'{}'",
        body="'x'",
        last_error="'failed'",
    )
    inbox = InboxMessage.objects
    assert read_for(lambda: inbox.claim_parked("tests.q", uuid.uuid4(), 60)) < 100


def test_queued_messages_are_not_read_before_their_time() -> None:
    QueueMessage.objects.create(queue="tests.r", body=b"x")
    copies(QueueMessage, available_at="now() + interval '1 hour'")

    def claim_one() -> None:
        rows = QueueMessage.objects.claim(
            "tests.r", uuid.uuid4(), limit=10, lease=60, room=ROOM
        )
        assert len(rows) == 1

    assert read_for(claim_one) < 100


def test_session_with_bodies_does_not_search_the_queue_for_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch has used most of its session's bytes. All bodies in the queue are larger
    than what is left."""
    monkeypatch.setattr(claiming, "MAX_BYTES", 1000)
    claiming._claims.clear()  # sessions that another test has not closed
    QueueMessage.objects.create(queue="tests.r", body=b"x" * 700)
    with DatabaseBroker("default", "database://?poll=0.01").open() as session:
        session.subscribe("tests.r", prefetch=50)
        held = session.receive(0)
        assert held is not None
        copies(QueueMessage, available_at="now()", body="repeat('x', 400)::bytea")
        assert read_for(lambda: session.receive(0)) < 200
        session.ack([held])
        assert session.receive(0) is not None


def test_a_claim_takes_no_more_than_its_limit_whatever_the_plan() -> None:
    """A claim with the limit 1 gets one row, even if the server uses a nested loop. In
    a nested loop, the server could search for a free row several times, and find a
    different one each time."""
    QueueMessage.objects.bulk_create(
        QueueMessage(queue="tests.q", body=b"x") for _ in range(50)
    )
    with transaction.atomic(), connection.cursor() as cursor:
        for way in ("hashjoin", "mergejoin", "hashagg", "sort", "material"):
            cursor.execute(f"SET LOCAL enable_{way} = off")
        rows = QueueMessage.objects.claim(
            "tests.q", uuid.uuid4(), limit=1, lease=60, room=ROOM
        )
        parked = QueueMessage.objects.filter(deliveries=1).count()
    assert (len(rows), parked) == (1, 1)


def test_tasks_are_found_by_priority_and_not_sorted() -> None:
    queue = "tests.tasks.default"
    QueueMessage.objects.create(queue=queue, body=b"x")
    copies(QueueMessage)
    for priority in (-5, 5):
        QueueMessage.objects.create(queue=queue, body=b"x", priority=priority)
    claimed: list[Any] = []

    def work() -> None:
        claimed.extend(
            QueueMessage.objects.claim_by_priority(
                queue, uuid.uuid4(), limit=10, lease=60, room=ROOM
            )
        )

    assert read_for(work) < 200
    assert len(claimed) == 10


@pytest.mark.parametrize("model", [OutboxMessage, InboxMessage])
def test_pruning_finds_its_rows_by_their_primary_keys_alone(model: Any) -> None:
    """Pruning a large table uses only the index of the primary key. With a second
    index, the server would read that index for the whole table in each batch."""
    OutboxMessage.objects.all().delete()
    store(1)
    InboxMessage.objects.create(
        stage="tests.q", message_id=uuid.uuid4(), destination="tests.q"
    )
    (kind,) = [kind for kind in retention.kinds() if kind.model is model]
    assert kind.days is not None
    instant = f"now() - interval '{kind.days + 1} days' * (1 - n / {LATER}.0)"
    named = "created_at first_received_at last_received_at dispatched_at processed_at"
    copies(
        model,
        message_id="gen_random_uuid()",
        **dict.fromkeys(named.split(), instant),
    )
    model.objects.earliest("pk").delete()
    pruned: list[int] = []

    def one_batch() -> None:
        pruned.append(next(retention.prune(kind, "default", batch_size=100)))

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {model._meta.db_table}")
        # As if the table were many times larger.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_indexscan = off")
        cursor.execute("SET LOCAL cpu_tuple_cost = 100")
        assert read_for(one_batch, "DELETE") < 1000
    assert pruned == [100]
    assert 0 < retention.count(kind, "default") < LATER / 2


def test_pruning_compares_no_row_with_each_edited_copy_that_may_be_undone() -> None:
    """The server looks each row up in a hash table, although it expects many more
    copies than there are."""
    run = Run(run_id=uuid.uuid4(), first_run=uuid.uuid4(), version=1)
    run.turn = uuid.uuid4()
    run.save()
    request, copy = "md5('request' || n)::uuid", "md5('copy' || n)::uuid"
    FlowUndo.objects.create(run=run, number=0, destination="tests.undo", body=b"")
    copies(FlowUndo, number="n", request_id=request)
    resolved = {"resolution": Resolution.REPLACED, "resolved_at": Now()}
    DeadLetter.objects.create(message_id=uuid.uuid4(), **resolved)
    copies(DeadLetter, message_id=request, replaced_by=copy)
    ended = Now() - dt.timedelta(days=99)
    dates = "first_received_at last_received_at processed_at"
    InboxMessage.objects.create(
        message_id=uuid.uuid4(), **dict.fromkeys(dates.split(), ended)
    )
    copies(InboxMessage, message_id=f"CASE n % 2 WHEN 0 THEN {copy} ELSE {request} END")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    (kind,) = [one for one in retention.kinds() if one.model is InboxMessage]

    assert read_for(lambda: next(retention.prune(kind, "default")), "DELETE") < 100_000
    assert retention.count(kind, "default") == 0


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("outboxmessage", "lease_until|lease_token"),
        ("inboxmessage", "processed_at|started_at|attempts|lease_until|lease_token"),
    ],
)
def test_columns_that_every_message_changes_are_in_no_index(
    table: str, columns: str
) -> None:
    """No index contains a column that every message changes. Otherwise each claim and
    each settlement would write to all indexes."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index"
            " WHERE indrelid = %s::regclass",
            [f"django_txmsg_{table}"],
        )
        indexes = [definition for (definition,) in cursor.fetchall()]
    assert indexes
    assert not [one for one in indexes if re.search(rf"\b({columns})\b", one)]


def test_the_backlog_that_scales_pods_is_read_by_its_indexes() -> None:
    """The query in the docs for Kubernetes reads no more rows than it counts."""
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    found = re.search(r"query: >-\n((?: {10}.+\n)+)", page)
    assert found is not None
    sql = " ".join(found[1].split()).replace("'mails.confirm'", "'tests.q'")
    OutboxMessage.objects.update(dispatched_at=Now())
    QueueMessage.objects.create(queue="tests.later", body=b"x")
    copies(QueueMessage)
    QueueMessage.objects.create(queue="tests.q", body=b"x")
    park_for_later()
    store(3)
    counted: list[int] = []

    def count() -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            counted.extend(cursor.fetchone())

    # As autovacuum does: it may come between these lines, or not.
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    assert read_for(count) < 100
    assert counted == [4]  # three in the outbox, one in its queue


def test_a_flood_at_one_place_is_not_read_to_find_the_other_places() -> None:
    """The health view reads only the first row of each destination, however many rows a
    destination has."""
    row = OutboxMessage.objects.filter(dispatched_at=None).latest("id")
    columns = [
        f'"{field.column}"'
        for field in row._meta.concrete_fields
        if field.column not in ("id", "message_id")
    ]
    copied = ", ".join(columns)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {row._meta.db_table} (message_id, {copied})"
            f" SELECT gen_random_uuid(), {copied} FROM {row._meta.db_table},"
            " generate_series(1, 50000) WHERE id = %s",
            [row.pk],
        )
    last = OutboxMessage.objects.latest("id")
    OutboxMessage.objects.filter(pk=last.pk).update(
        destination="zzz", due_at=Now() - dt.timedelta(seconds=1)
    )

    def look() -> set[str]:
        return {one.name for one in waiting.in_outbox("default", most=0)}

    assert look() == {"tests.q", "zzz"}
    assert read_for(look) < 100


def read_as_if_large(work: Callable[[], Any]) -> int:
    """Return how many rows are read as if the inbox were many times larger."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {InboxMessage._meta.db_table}")
        for way in ("seqscan", "hashjoin", "mergejoin"):
            cursor.execute(f"SET LOCAL enable_{way} = off")
        return read_for(work)


def park(**columns: Any) -> InboxMessage:
    return InboxMessage.objects.create(
        message_id=uuid.uuid4(),
        destination="tests.q",
        due_at=Now(),
        body=b"x",
        headers={},
        **columns,
    )


def test_health_reads_no_messages_that_wait_behind_a_dead_letter() -> None:
    park(stage="tests.a", waits_for=uuid.uuid4())
    copies(InboxMessage, message_id="gen_random_uuid()", due_at=f"'{NEVER}+00'")
    InboxMessage.objects.update(due_at=NEVER + "+00")
    park(stage="tests.b")
    found: list[waiting.Waiting] = []

    def look() -> None:
        found[:] = waiting.in_inbox("default", most=0)

    assert read_as_if_large(look) < 50
    assert [(one.name, one.count) for one in found] == [("tests.b", 1)]


def test_messages_for_newer_code_are_read_to_a_limit() -> None:
    park(stage="tests.a", needs_version=2, needs_type="orders.Order")
    copies(InboxMessage, message_id="gen_random_uuid()")
    found: dict[str, waiting.NeedsNewerCode] = {}

    def look() -> None:
        found.update(waiting.for_newer_code("default", most=9))

    assert read_as_if_large(look) < 50
    assert list(found) == ["tests.a"]
    newer = found["tests.a"]
    assert (newer.count, newer.type, newer.version) == (10, "orders.Order", 2)
    assert newer.since == InboxMessage.objects.earliest("pk").first_received_at


def test_the_last_activity_of_places_is_read_without_their_messages() -> None:
    OutboxMessage.objects.update(dispatched_at=Now())
    InboxMessage.objects.create(
        stage="tests.q", message_id=uuid.uuid4(), destination="tests.q"
    )
    copies(InboxMessage, message_id="gen_random_uuid()", processed_at="now()")
    now = clock("default")
    assert read_for(lambda: periods.last_active("default", now)) < 100


def test_the_first_dead_letter_of_an_error_is_found_by_an_index() -> None:
    """Most dead letters have the same error. The first dead letter of each error is
    found without reading all of them."""
    DeadLetter.objects.all().delete()
    DeadLetter.objects.create(
        message_id=uuid.uuid4(), destination="q", fingerprint="f", exception="Old: x"
    )
    for _ in range(2):  # as wide as real ones: reading them all is not the cheapest
        copies(
            DeadLetter, message_id="gen_random_uuid()", traceback="repeat('x', 1900)"
        )
    DeadLetter.objects.create(
        message_id=uuid.uuid4(), destination="q", fingerprint="g", exception="New: x"
    )
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {DeadLetter._meta.db_table}")
    found: list[changes.Change] = []

    def look() -> None:
        found[:] = changes.read("default", [changes.ERROR])

    assert read_for(look, "WITH") < 50
    assert [one.what for one in found] == ["First death: New: x", "First death: Old: x"]


@pytest.mark.parametrize("analyzed", [True, False])
def test_a_search_of_dead_letters_reads_no_others(*, analyzed: bool) -> None:
    """A search reads only the dead letters that match. This also holds if none match,
    and if the server's statistics are outdated."""
    DeadLetter.objects.all().delete()
    DeadLetter.objects.create(
        message_id=uuid.uuid4(), destination="q", fingerprint="f", correlation_id="c"
    )
    copies(
        DeadLetter,
        message_id="gen_random_uuid()",
        headers="jsonb_build_object('txmsg-key', 'k' || n)",
        fingerprint="'f' || n",
        correlation_id="'c' || n",
    )
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {DeadLetter._meta.db_table}")
    found: list[int] = []

    def search(text: str) -> None:
        letters = DeadLetter.objects.filter(selection.searched(text)).order_by("-id")
        found.append(len(letters.defer("body")[:51]))

    for text, number in (("k17", 1), ("f17", 1), ("c17", 1), ("none", 0)):
        found.clear()
        assert read_for(partial(search, text)) < 50, text
        assert found[-1] == number, text


@pytest.mark.parametrize("own", [True, False])
def test_a_redelivery_one_first_reads_only_its_letters_that_died_again(
    *, own: bool
) -> None:
    """An operation counts the messages that it has redelivered and that have died
    again. Many other messages have not died again since, or another operation has
    redelivered them. With statistics of other rows, PostgreSQL may read the whole
    table."""
    DeadLetter.objects.all().delete()
    operation = BulkOperation.objects.create(kind="redeliver", tolerates=0)
    first = DeadLetter.objects.create(
        message_id=uuid.uuid4(), destination="q", deaths=2, operation=operation.pk
    )
    others = {"operation": "NULL"}
    if own:
        others = {"resolution": "'redelivered'", "resolved_at": "now()"}
    copies(DeadLetter, message_id="gen_random_uuid()", **others)
    operation.cursor = first.pk + 10 * LATER
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {DeadLetter._meta.db_table}")
    found: list[int] = []

    def count() -> None:
        found.append(bulk.died_again(operation, "default"))

    assert read_for(count) < 50
    assert found == [1]


@pytest.mark.parametrize("waits_for", [WaitsFor.ANSWER, WaitsFor.JOIN])
def test_a_run_whose_wait_is_over_reads_only_its_own_dead_letters(
    waits_for: WaitsFor,
) -> None:
    DeadLetter.objects.all().delete()
    DeadLetter.objects.create(
        message_id=uuid.uuid4(), destination="q", correlation_id="c"
    )
    copies(DeadLetter, message_id="gen_random_uuid()", correlation_id="'c' || n")
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {DeadLetter._meta.db_table}")
    run = Run(run_id=uuid.uuid4(), correlation_id="c17", waits_for=waits_for)

    def end() -> None:
        with transaction.atomic():
            undoing.overtaken(run, uuid.uuid4(), "default")

    assert read_for(end) < 50


def test_due_runs_of_a_removed_flow_are_not_read() -> None:
    """A process that does not know a flow leaves its deadlines to others."""
    run = Run(service="tests", flow="gone", run_id=uuid.uuid4(), first_run=uuid.uuid4())
    run.version, run.turn, run.due_at = 1, uuid.uuid4(), Now() - dt.timedelta(hours=1)
    run.save()
    copies(Run, run_id="gen_random_uuid()", turn="gen_random_uuid()")
    runs = Run.objects
    found: list[Any] = []

    def look() -> None:
        found[:] = [runs.next_due(["tests", "tests-before"], ["known", "other"])]

    def fire() -> None:
        with transaction.atomic():
            found[:] = runs.claim_due(["tests", "tests-before"], ["known", "other"], 9)

    assert read_for(look) < 500
    assert found == [None]
    assert read_for(fire) < 500
    assert found == []
    runs.filter(pk=run.pk).update(flow="known")
    assert read_for(look) < 500
    assert found[0] < -3000
    assert read_for(fire) < 1000
    assert found == [run]
