"""The database answers, but refuses a statement of the package.

The reason may be a trigger, a policy, a missing privilege or a time-out. The message's
outcome then stays undecided, and no attempt is counted.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.utils import timezone

from django_txmsg import every, wire
from django_txmsg.consuming import protocol
from django_txmsg.consuming.consumer import IDLE, Consumer
from django_txmsg.consuming.intake import IntakeThread
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.errors import BrokerUnavailable, SwallowedDatabaseError
from django_txmsg.http_outbox.session import outbox_session
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.fields import clock
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime import database_health
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.scheduling.timekeeper import Timekeeper
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect
from tests.faults import wait_until
from tests.forgetting import forget_recurring
from tests.running import at_work, committing, declared, put, running, step, txmsg

pytestmark = committing

INBOX, OUTBOX = "django_txmsg_inboxmessage", "django_txmsg_outboxmessage"
ATTEMPT, LETTER = "django_txmsg_attempt", "django_txmsg_deadletter"

#: Tries that are refused: more than a message has attempts.
MANY = 12
REDELIVERED = RedeliveryPolicy(max_redeliveries=3, initial_delay=0.0, jitter=0.0)

Refusal = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, impatient: None) -> Iterator[None]:
    """Shorten the pauses between tries."""
    monkeypatch.setattr(database_health, "FIRST_PAUSE", 0.005)
    monkeypatch.setattr(database_health, "MAX_PAUSE", 0.02)
    yield
    database_health.breaker("default").worked()


def ask(*statements: str) -> None:
    with connection.cursor() as cursor:
        for sql in statements:
            cursor.execute(sql)


@contextmanager
def trigger(event: str, table: str, code: str = "P0001") -> Iterator[None]:
    """Create a trigger that refuses statements on a table, as a quota would."""
    if connection.vendor != "postgresql":
        sql = f"CREATE TRIGGER refusing BEFORE {event} ON {table}"
        ask(f"{sql} BEGIN SELECT RAISE(ABORT, 'quota exceeded'); END")
    else:
        ask(
            "CREATE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$BEGIN RAISE EXCEPTION 'quota exceeded' USING ERRCODE = '{code}';"
            " END$$",
            f"CREATE TRIGGER refusing BEFORE {event} ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION refused()",
        )
    try:
        yield
    finally:
        if connection.vendor != "postgresql":
            ask("DROP TRIGGER refusing")
        else:
            ask(f"DROP TRIGGER refusing ON {table}", "DROP FUNCTION refused")


@contextmanager
def no_superuser() -> Iterator[None]:
    """Make new connections use a role that has rights on our tables only."""
    ask(
        "CREATE ROLE limited",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO limited",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO limited",
        "ALTER ROLE CURRENT_USER SET role = limited",
    )
    try:
        yield
    finally:
        ask("ALTER ROLE CURRENT_USER RESET role", "DROP OWNED BY limited")
        ask("DROP ROLE limited")


@contextmanager
def privilege(table: str) -> Iterator[None]:
    """Revoke the privilege to insert into a table from all roles."""
    ask(f"REVOKE INSERT ON {table} FROM limited")
    try:
        yield
    finally:
        ask(f"GRANT INSERT ON {table} TO limited")


@contextmanager
def policy(table: str) -> Iterator[None]:
    """Make the database refuse inserts: enable row-level security with a policy that
    permits only reads."""
    ask(
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY reading ON {table} FOR SELECT USING (true)",
    )
    try:
        yield
    finally:
        ask(f"DROP POLICY reading ON {table}")
        ask(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")


@contextmanager
def locked(table: str) -> Iterator[None]:
    """Lock the table from another session, for longer than any time-out."""
    other: Any = connections["default"].copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
        try:
            yield
        finally:
            cursor.execute("ROLLBACK")
            other.close()


@contextmanager
def limits(limit: str) -> Iterator[None]:
    """Set the PostgreSQL time-out `limit` to 20 ms, for new connections."""
    ask(f"ALTER ROLE CURRENT_USER SET {limit} = '20ms'")
    try:
        yield
    finally:
        ask(f"ALTER ROLE CURRENT_USER RESET {limit}")


def handler(message: Message) -> None:
    """Record an effect. The body then decides whether the handler fails never, once or
    always."""
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    first = message.delivery_attempt == 1
    if message.body == "always" or (message.body == "fails" and first):
        raise ValueError("as it was told to")


def refused_often(threads: Any) -> Callable[[], bool]:
    """Return a condition. The condition becomes true when the database has refused MANY
    statements of one thread in a row. MANY is more than the number of attempts after
    which a message is buried."""

    def said() -> bool:
        return any(one._undecided._failures >= MANY for one in threads)

    return said


def put_three(destination: str, body: str) -> None:
    for one in ("first", body, "last"):
        put(destination, f'"{one}"'.encode())


def stays(refusal: Refusal, batch: int, body: str = "sound") -> None:
    """Let a stage process three messages. At first, the database refuses many of its
    statements. Check that no message is buried, and that the same threads process the
    messages afterwards."""
    with (
        declared(handler, batch=batch, redelivery=REDELIVERED) as stage,
        running(stage) as threads,
    ):
        with refusal():
            put_three(stage.destination, body)
            wait_until(refused_often(threads))
            assert not DeadLetter.objects.exists()
        wait_until(lambda: Effect.objects.count() == 3)
        wait_until(lambda: not QueueMessage.objects.exists())
    assert not DeadLetter.objects.exists()
    done = InboxMessage.objects.filter(processed_at__isnull=False)
    counts = set(done.values_list("attempts", "deliveries"))
    tried = {(2, 1)} if body == "fails" else set()
    assert counts == {(1, 1)} | tried


batches = pytest.mark.parametrize("batch", [1, 3])


@batches
@pytest.mark.parametrize("event", ["INSERT", "UPDATE"])
def test_message_waits_while_a_trigger_refuses_the_inbox(
    event: str, batch: int
) -> None:
    """The database refuses to record a message's arrival, or to mark the message as
    processed. The message waits, and is processed as soon as the database accepts the
    statement."""
    stays(lambda: trigger(event, INBOX), batch)


@batches
@pytest.mark.postgresql
def test_message_waits_while_a_trigger_reports_a_constraint(batch: int) -> None:
    stays(lambda: trigger("INSERT", INBOX, "23514"), batch)


@batches
def test_failure_refused_by_the_database_counts_once(batch: int) -> None:
    """The handler fails, and the database refuses to record the failure. The handler
    runs repeatedly until one failure is recorded."""
    stays(lambda: trigger("INSERT", ATTEMPT), batch, "fails")
    assert Attempt.objects.count() == 1


@batches
@pytest.mark.postgresql
@pytest.mark.parametrize("refusal", [privilege, policy])
def test_message_waits_while_its_role_may_not_insert(refusal: Any, batch: int) -> None:
    with no_superuser():
        stays(lambda: refusal(INBOX), batch)


@batches
@pytest.mark.postgresql
@pytest.mark.parametrize("limit", ["lock_timeout", "statement_timeout"])
@pytest.mark.parametrize(("table", "body"), [(INBOX, "sound"), (ATTEMPT, "fails")])
def test_message_waits_while_a_lock_outlasts_its_time_out(
    limit: str, table: str, body: str, batch: int
) -> None:
    with limits(limit):
        stays(lambda: locked(table), batch, body)
    assert Attempt.objects.count() == (body == "fails")


@batches
@pytest.mark.postgresql
def test_a_value_that_is_never_taken_ends_its_message(batch: int) -> None:
    """The database refuses a value, and would always refuse it. So the message is
    buried, and its dead letter shows the database's error."""
    with (
        declared(handler, batch=batch, redelivery=REDELIVERED) as stage,
        trigger("INSERT", ATTEMPT, "22000"),
        running(stage),
    ):
        put_three(stage.destination, "always")
        wait_until(DeadLetter.objects.exists)
        wait_until(lambda: not QueueMessage.objects.exists())
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 4)
    assert "quota exceeded" in letter.exception
    assert Effect.objects.count() == 2


def call_and_answer(calls: list[int]) -> Callable[[Message], None]:
    """Return the handler of a stage without a transaction, which calls another
    service."""

    def handler(message: Message) -> None:
        calls.append(message.delivery_attempt)
        send_message("tests.next", None)

    return handler


def test_a_call_is_not_repeated_while_its_end_is_refused() -> None:
    """A handler has called another service, and the database refuses to mark the
    message as processed. Only the mark is tried again."""
    calls: list[int] = []
    handler = call_and_answer(calls)
    with (
        declared(handler, transaction="none", redelivery=REDELIVERED) as stage,
        running(stage) as threads,
    ):
        with trigger("UPDATE", INBOX):
            put(stage.destination)
            wait_until(refused_often(threads))
        wait_until(InboxMessage.objects.filter(processed_at__isnull=False).exists)
    assert calls == [1]
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1
    assert not Attempt.objects.exists()


@contextmanager
def lock_outlasting_time_out(table: str) -> Iterator[None]:
    with limits("lock_timeout"), locked(table):
        yield


@pytest.mark.postgresql
@pytest.mark.parametrize("refusal", [privilege, policy, lock_outlasting_time_out])
def test_a_call_is_not_repeated_while_its_messages_are_refused(refusal: Any) -> None:
    """A handler has called another service, and the database does not store the
    handler's messages now. Only the transaction after the handler is tried again."""
    calls: list[int] = []
    handler = call_and_answer(calls)
    with (
        no_superuser(),
        declared(handler, transaction="none", redelivery=REDELIVERED) as stage,
        running(stage) as threads,
    ):
        with refusal(OUTBOX):
            put(stage.destination)
            wait_until(refused_often(threads))
        wait_until(InboxMessage.objects.filter(processed_at__isnull=False).exists)
    assert calls == [1]
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1
    assert not Attempt.objects.exists()


@pytest.mark.parametrize("asked", [{}, {wire.TICKET: "1", wire.REPLY_TO: "by.steps"}])
def test_a_call_counts_although_its_message_expires_while_its_end_is_refused(
    asked: dict[str, str],
) -> None:
    """Otherwise the message would be a dead letter, and a flow's request would be
    revoked: the flow would not undo the call."""
    calls: list[int] = []
    until = timezone.now() + dt.timedelta(seconds=2)
    headers = {
        wire.MESSAGE_ID: str(uuid.uuid4()),
        wire.CONTENT_TYPE: "application/json",
        wire.EXPIRES: wire.format_instant(until),
        **asked,
    }
    with (
        declared(call_and_answer(calls), transaction="none") as stage,
        running(stage) as threads,
    ):
        with trigger("UPDATE", INBOX):
            put(stage.destination, headers=headers)
            wait_until(refused_often(threads))
            wait_until(lambda: clock("default") > until)
        wait_until(lambda: not QueueMessage.objects.exists())
    assert calls == [1]
    assert InboxMessage.objects.get().processed_at is not None
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1
    assert not DeadLetter.objects.exists()


def test_a_call_is_repeated_if_a_trigger_refuses_its_messages() -> None:
    """This is a failed attempt, and the next attempt runs the handler again."""
    calls: list[int] = []
    handler = call_and_answer(calls)
    again = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.0, mode="blocking")
    with (
        declared(handler, transaction="none", redelivery=again) as stage,
        trigger("INSERT", OUTBOX),
        running(stage),
    ):
        put(stage.destination)
        wait_until(DeadLetter.objects.exists)
    assert calls == [1, 2, 3]


#: The SQLSTATEs of a trigger's own error, a constraint and a missing privilege.
LASTING = [
    "P0001",
    *(pytest.param(x, marks=pytest.mark.postgresql) for x in ("23514", "42501")),
]


@pytest.mark.parametrize("code", LASTING)
@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_commit_counts_as_an_attempt_if_the_broker_may_refuse_it_for_ever(
    mode: Any, code: str
) -> None:
    """Each try runs the handler again."""
    calls: list[int] = []
    with declared(call_and_answer(calls), transaction=mode) as stage:
        put(stage.destination)
        with trigger("INSERT", QueueMessage._meta.db_table, code):
            # The first delivery has no row in the inbox, so only redeliveries count.
            for _ in range(stage.policy.max_begun + 2):
                with contextlib.suppress(BrokerUnavailable):
                    step(stage)
        assert not QueueMessage.objects.exists()
    assert DeadLetter.objects.get().reason == "worker_lost"
    assert len(calls) == stage.policy.max_begun + 1


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "change",
    [
        "SET LOCAL ROLE powerless",
        "SET LOCAL search_path TO nowhere",
        "SET TRANSACTION READ ONLY",
    ],
)
def test_a_handler_that_changes_its_role_or_path_fails(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long handler, the database refuses the package's statement because of
    what the handler has set. This counts as the handler's failure: another try would
    not help."""
    monkeypatch.setattr(protocol, "MARK_AGAIN_AFTER", -1.0)

    def changing(message: Message) -> None:
        handler(message)
        ask(change)

    ask("CREATE ROLE powerless")
    try:
        with declared(changing, redelivery=REDELIVERED) as stage, running(stage):
            put(stage.destination)
            wait_until(DeadLetter.objects.exists)
    finally:
        ask("DROP ROLE powerless")
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 4)
    assert not Effect.objects.exists()


@pytest.mark.postgresql
@pytest.mark.parametrize("queues", ["default", "other"])
def test_connection_that_a_handler_has_spoiled_is_replaced(
    queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler leaves a session with another search_path, in which no statement of the
    package finds its table. The next message gets a new connection."""
    monkeypatch.setitem(connections.databases["default"], "CONN_MAX_AGE", None)

    def spoiling(message: Message) -> None:
        handler(message)
        if message.body == "first":
            transaction.on_commit(lambda: ask("SET search_path TO nowhere"))

    with (
        txmsg(BROKERS={"default": {"URL": f"database://{queues}?poll=0.01"}}),
        declared(spoiling, redelivery=REDELIVERED) as stage,
    ):
        put_three(stage.destination, "sound")
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 3)
            queue = QueueMessage.objects.using(queues)
            wait_until(lambda: not queue.exists())
    assert not Attempt.objects.exists()
    assert not DeadLetter.objects.exists()


def test_dying_message_waits_until_its_dead_letter_is_stored() -> None:
    """The database refuses the dead letter of a failed message. Once it accepts the
    dead letter, the message is buried, and the recorded reason is the handler's
    error."""

    def failing(message: Message) -> None:
        raise ValueError("always")

    once = RedeliveryPolicy(max_redeliveries=0)
    with declared(failing, redelivery=once) as stage, running(stage) as threads:
        with trigger("INSERT", LETTER):
            put(stage.destination)
            wait_until(refused_often(threads))
        wait_until(DeadLetter.objects.exists)
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 1)


def test_a_parked_message_is_refused_as_often_as_a_delivered_one() -> None:
    """A parked message has failed once. The second attempt succeeds, but the database
    often refuses to finish it. The refusals do not count as attempts, and the second
    attempt is repeated until the database accepts it."""
    with declared(handler, redelivery=REDELIVERED) as stage, ExitStack() as stack:
        with ends_refused():
            put(stage.destination, b'"fails"')
            threads = stack.enter_context(running(stage))
            wait_until(refused_often(threads))
        wait_until(lambda: Effect.objects.count() == 1)
        wait_until(
            lambda: InboxMessage.objects.filter(processed_at__isnull=False).exists()
        )
    assert not DeadLetter.objects.exists()
    assert InboxMessage.objects.get().attempts == 2


def test_once_does_not_end_while_a_parked_message_is_tried_again() -> None:
    """With `--once`, a consumer ends after a short time without work. It does not end
    while the database refuses to finish a parked message, even if the pauses between
    two tries are longer than this time."""
    # By then, the stage has looked for messages and found none.
    later = RedeliveryPolicy(initial_delay=0.5, jitter=0)
    with declared(handler, redelivery=later) as stage:
        consumer = Consumer([stage])

        def run() -> None:
            try:
                consumer.run(once=True)
            finally:
                connections.close_all()

        running_once = threading.Thread(target=run)
        with ends_refused():
            put(stage.destination, b'"fails"')
            running_once.start()
            try:
                wait_until(refused_often(consumer.threads))
                wait_until(lambda: consumer._activity.idle > 2 * IDLE)
            except BaseException:
                consumer.stop()
                running_once.join()
                raise
        running_once.join()
    assert Effect.objects.count() == 1
    assert InboxMessage.objects.get().processed_at is not None


@contextmanager
def ends_refused() -> Iterator[None]:
    """Make the database refuse to mark a parked message as processed."""
    condition = "NEW.processed_at IS NOT NULL AND OLD.due_at IS NOT NULL"
    if connection.vendor != "postgresql":
        ask(
            f"CREATE TRIGGER refusing BEFORE UPDATE ON {INBOX} WHEN {condition}"
            " BEGIN SELECT RAISE(ABORT, 'quota exceeded'); END"
        )
        try:
            yield
        finally:
            ask("DROP TRIGGER refusing")
        return
    ask(
        "CREATE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE EXCEPTION 'quota exceeded'; END$$",
        f"CREATE TRIGGER refusing BEFORE UPDATE ON {INBOX} FOR EACH ROW"
        f" WHEN ({condition}) EXECUTE FUNCTION refused()",
    )
    try:
        yield
    finally:
        ask(f"DROP TRIGGER refusing ON {INBOX}", "DROP FUNCTION refused")


def too_large(message: Message) -> None:
    """Run a query that needs more disk space for sorting than the server has."""
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    if message.body == "large" and Effect.room:  # type: ignore[attr-defined]
        Effect.room -= 1  # type: ignore[attr-defined]
        ask("SET LOCAL temp_file_limit = '64kB'", "SET LOCAL work_mem = '64kB'")
        ask(
            "SELECT count(*) FROM (SELECT n FROM generate_series(1, 99999) n"
            " ORDER BY -n OFFSET 0) s"
        )


@batches
@pytest.mark.postgresql
def test_a_handler_without_room_for_its_work_has_not_failed(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Effect, "room", 7, raising=False)
    with declared(too_large, batch=batch, redelivery=REDELIVERED) as stage:
        put_three(stage.destination, "large")
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 3)
            wait_until(lambda: not QueueMessage.objects.exists())
    assert not Attempt.objects.exists()
    assert set(InboxMessage.objects.values_list("attempts", flat=True)) == {1}


@batches
@pytest.mark.postgresql
def test_message_without_room_fails_and_blocks_no_other(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Effect, "room", 10_000, raising=False)
    twice = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    with declared(too_large, batch=batch, redelivery=twice) as stage:
        put_three(stage.destination, "large")
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 2)
            wait_until(DeadLetter.objects.exists)
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 2)
    assert "temp_file_limit" in letter.exception


# The other loops.


def test_a_relay_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "django_txmsg.outage")
    relay = Relay(["default"], ["default"])
    with transaction.atomic():
        send_messages({"destination": "tests.q", "body": n} for n in range(20))
    with contextlib.ExitStack() as refusing:
        # Before the relay starts, which may need less time than the trigger does.
        refusing.enter_context(trigger("UPDATE", OUTBOX))
        with at_work(relay):
            # Few: one lane may have them all, and its pauses grow.
            wait_until(lambda: caplog.text.count("cannot be dispatched") >= 5)
            refusing.close()
            wait_until(lambda: not OutboxMessage.objects.filter(dispatched_at=None))
    assert set(OutboxMessage.objects.values_list("attempts", flat=True)) == {0}


def test_a_timekeeper_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_txmsg.scheduling.timekeeper.AFTER_FAILURE", 0.02)
    one = every("* * * * *", "tests.tick", tz="UTC")
    timekeeper = Timekeeper(["default"])
    group = ThreadGroup(timekeeper.stop)
    try:
        timekeeper.tick()
        ask("UPDATE django_txmsg_schedule SET last_tick = '2026-01-01 00:00:00+00'")
        with trigger("INSERT", OUTBOX):
            timekeeper.add_to(group)
            group.start()
            wait_until(lambda: caplog.text.count("could not be stored after") >= 2)
        wait_until(OutboxMessage.objects.exists)
    finally:
        timekeeper.stop()
        group.join()
        forget_recurring(one.name)


def test_an_intake_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "django_txmsg.outage")
    stop = threading.Event()
    intake = IntakeThread("default", "tests.dlq", stop, Activity())
    group = ThreadGroup(stop.set)
    group.add("intake", intake.run)
    with trigger("INSERT", LETTER):
        put("tests.dlq", b"1")
        group.start()
        wait_until(lambda: caplog.text.count("cannot be taken in") >= MANY)
    try:
        wait_until(DeadLetter.objects.exists)
    finally:
        stop.set()
        group.join()
    assert DeadLetter.objects.count() == 1


def test_refusals_are_logged_at_most_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads of a process together log at most one refusal a second."""
    monkeypatch.setattr(database_health, "SAY_EVERY", 0.3)
    monkeypatch.setattr(database_health._report(), "at", 0.0)

    def said() -> list[str]:
        own = [one for one in caplog.records if one.name == "django_txmsg.outage"]
        times.extend(one.created for one in own[len(times) :])
        return [one.getMessage() for one in own]

    times: list[float] = []
    with declared(handler) as stage, running(stage, concurrency=4) as threads:
        with trigger("INSERT", INBOX):
            for _ in range(8):
                put(stage.destination, b"1")
            wait_until(refused_often(threads))
            wait_until(lambda: len(said()) >= 4)
        wait_until(lambda: Effect.objects.count() == 8)
    first = said()[0]
    assert "database 'default': nothing could be decided about a message" in first
    assert "quota exceeded" in first
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap > 0.25 for gap in gaps), gaps


def insert_by_hand(message: Message) -> None:
    """Insert a row through a cursor. Django notices a failure of the ORM, but not a
    failure of this statement."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Effect._meta.db_table} (name, message_id)"
            " VALUES ('one', %s)",
            [str(message.id)],
        )


def insert(message: Message) -> None:
    Effect.objects.create(name="one", message_id=str(message.id))


@pytest.mark.postgresql
@pytest.mark.parametrize("way", [insert, insert_by_hand])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
def test_no_room_that_a_handler_hides_is_no_failure_of_its_message(
    batch: int, goes_on: bool, way: Callable[[Message], None]
) -> None:
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        with contextlib.suppress(DatabaseError):
            way(message)
        if goes_on:
            Effect.objects.exists()

    with declared(handler, redelivery=REDELIVERED, batch=batch) as stage:
        put(stage.destination)
        with ExitStack() as stack:
            with trigger("INSERT", Effect._meta.db_table, "53100"):
                stack.enter_context(running(stage))
                wait_until(lambda: len(attempts) >= 7)
            wait_until(Effect.objects.exists)
    assert set(attempts) == {1}
    assert not DeadLetter.objects.exists()
    assert not Attempt.objects.exists()


def fill_the_database() -> None:
    """Write more than the database has space for. SQLite then rolls back the whole
    transaction."""
    driver = connection.connection
    (pages,) = driver.execute("PRAGMA page_count").fetchone()
    driver.execute(f"PRAGMA max_page_count = {pages}")
    try:
        with connection.cursor() as cursor:
            for _ in range(10_000):  # there are free pages, too
                body = ["x" * 100_000]
                cursor.execute("INSERT INTO filled (body) VALUES (%s)", body)
    finally:
        driver.execute("PRAGMA max_page_count = 1073741823")


@pytest.fixture
def fillable() -> Iterator[None]:
    ask("CREATE TABLE filled (body text)")
    yield
    ask("DROP TABLE filled")


@pytest.mark.sqlite
@pytest.mark.parametrize("batch", [1, 5])
def test_nothing_is_lost_if_sqlite_rolls_back_and_the_handler_goes_on(
    fillable: None, batch: int
) -> None:
    """SQLite rolls back the transaction, and the handler ignores the error. The attempt
    is repeated. Otherwise the handler's earlier messages would be lost, and its later
    work committed."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        send_message("tests.next", {})
        if len(attempts) == 1:
            with contextlib.suppress(DatabaseError):
                fill_the_database()
        Effect.objects.create(name="one", message_id=str(message.id))

    with declared(handler, redelivery=REDELIVERED, batch=batch) as stage:
        put(stage.destination)
        with running(stage):
            wait_until(Effect.objects.exists)
    assert attempts == [1, 1]
    assert Effect.objects.count() == 1
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1
    assert not DeadLetter.objects.exists()


@pytest.mark.sqlite
@pytest.mark.parametrize("inner", [contextlib.nullcontext, transaction.atomic])
def test_a_session_that_sqlite_has_rolled_back_does_not_commit(
    fillable: None, inner: Callable[[], AbstractContextManager[None]]
) -> None:
    """A statement fails, and SQLite rolls back the whole transaction. The session
    raises an error at its end, even if an atomic() surrounds the failed statement."""

    def run() -> None:
        with outbox_session():
            send_message("tests.next", {})
            with contextlib.suppress(DatabaseError), inner():
                fill_the_database()

    with pytest.raises(SwallowedDatabaseError):
        run()
    assert not OutboxMessage.objects.exists()
