"""In some cases Django would lose a message without an error. The package raises an
error for each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from django.db.transaction import TransactionManagementError

from django_txmsg.envelope.message import Message
from django_txmsg.errors import (
    BlockLeftOpen,
    DurableInStage,
    StageError,
    SwallowedDatabaseError,
)
from django_txmsg.jms.completion import CompletionFuture
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.running import Handler, committing, declared, put, running, send, step, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

#: What every stage here has to be safe under.
DRAWN: list[dict[str, Any]] = [
    {},
    {"batch": 5},
    {"transaction": "best_effort_1pc"},
]
drawn = pytest.mark.parametrize("options", DRAWN, ids=["outbox", "batch", "1pc"])


def run_twice(handler: Handler, options: dict[str, Any]) -> None:
    """Process a bad and a good message, and then the bad one again."""
    with declared(handler, **options) as stage:
        send(stage.destination, "bad")
        send(stage.destination, "good")
        step(stage, times=4)


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def first_attempt_fails(kind: type[BaseException]) -> None:
    attempt = Attempt.objects.get()
    assert kind.__name__ in attempt.exception
    assert attempt.number == 1
    assert not DeadLetter.objects.exists()


@drawn
def test_a_set_rollback_is_not_lost_in_silence(options: dict[str, Any]) -> None:
    """A handler calls set_rollback(True), and its attempt fails. With `atomic()` alone,
    the work would roll back without an error, and the message would be lost."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            transaction.set_rollback(True)

    run_twice(handler, options)
    first_attempt_fails(SwallowedDatabaseError)
    assert (
        "transaction.set_rollback(True) was called" in Attempt.objects.get().exception
    )
    assert effects() == ["bad", "good"]


@pytest.mark.parametrize("ending", ["commit", "\n ROLLBACK WORK;", "END", "ABORT"])
@drawn
def test_a_statement_that_ends_the_transaction_is_refused(
    options: dict[str, Any], ending: str
) -> None:
    """Otherwise COMMIT would mark the message as processed although its handler fails
    later, and ROLLBACK would lose the work of a message that is acknowledged."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            with connection.cursor() as cursor:
                cursor.execute(ending)

    run_twice(handler, options)
    first_attempt_fails(TransactionManagementError)
    assert effects() == ["bad", "good"]


@drawn
def test_a_savepoint_by_hand_may_be_rolled_back(options: dict[str, Any]) -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        with connection.cursor() as cursor:
            for sql in ("", "WORK ", "TRANSACTION "):
                cursor.execute("SAVEPOINT mine")
                Effect.objects.create(name="inner", message_id=str(message.id))
                if connection.vendor == "postgresql" or sql != "WORK ":
                    cursor.execute(f"ROLLBACK {sql}TO SAVEPOINT mine")
                else:
                    cursor.execute("ROLLBACK TO mine")

    run_twice(handler, options)
    assert not Attempt.objects.exists()
    assert effects() == ["bad", "good"]


@pytest.mark.postgresql
@pytest.mark.parametrize("options", DRAWN[:2], ids=["outbox", "batch"])
def test_a_rollback_by_the_driver_fails_the_attempt(options: dict[str, Any]) -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            connection.connection.rollback()

    run_twice(handler, options)
    first_attempt_fails(StageError)
    assert effects() == ["bad", "good"]


async def charge(message: Message) -> None:
    await sync_to_async(Effect.objects.create)(name="charged", message_id="")


def unwrapped(function: Callable[[Message], Any]) -> Handler:
    """A decorator that forgets functools.wraps."""

    def call(message: Message) -> Any:
        return function(message)

    return call


#: Handlers that only create the object whose code would do the work.
UNRUN: dict[str, Handler] = {
    "a decorator": unwrapped(charge),
    "a lambda": lambda message: charge(message),
    "a generator": lambda message: (
        Effect.objects.create(name="charged", message_id="") for _ in range(2)
    ),
}


@pytest.mark.parametrize("kind", UNRUN)
@pytest.mark.parametrize(
    "options",
    [*DRAWN, {"transaction": "broker_only"}, {"transaction": "none"}],
    ids=["outbox", "batch", "1pc", "broker_only", "none"],
)
def test_code_that_a_handler_has_not_run_fails_the_attempt(
    options: dict[str, Any], kind: str
) -> None:
    """A handler returns a coroutine or a generator. None of the code has run, so the
    message does not count as processed."""
    with declared(UNRUN[kind], **options) as stage:
        send(stage.destination)
        send(stage.destination)
        step(stage, times=2)
    found = Attempt.objects.values_list("exception", flat=True)
    assert found
    assert all("StageError" in one for one in found)
    assert not InboxMessage.objects.filter(processed_at__isnull=False).exists()
    assert effects() == []


@drawn
def test_handler_may_return_a_future(options: dict[str, Any]) -> None:
    """`return producer.submit(…)` returns one, whose work is under way."""

    def handler(message: Message) -> CompletionFuture:
        return CompletionFuture(None)

    with declared(handler, **options) as stage:
        send(stage.destination)
        step(stage)
    assert not Attempt.objects.exists()
    assert not QueueMessage.objects.exists()


@drawn
def test_swallowed_error_of_an_inner_atomic_fails_the_attempt(
    options: dict[str, Any],
) -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            try:
                with transaction.atomic(savepoint=False):
                    raise IntegrityError
            except IntegrityError:
                pass

    run_twice(handler, options)
    first_attempt_fails(SwallowedDatabaseError)
    assert effects() == ["bad", "good"]


@pytest.mark.parametrize("raises", [False, True])
@drawn
def test_block_left_open_ends_with_its_message(
    options: dict[str, Any], raises: bool
) -> None:
    """A handler leaves an `atomic()` block open. The block is closed and the attempt
    fails. Otherwise the work of this message and of all later messages would not be
    committed."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            for _ in range(2):
                transaction.atomic().__enter__()
            Effect.objects.create(name="inner", message_id=str(message.id))
            if raises:
                raise LookupError

    run_twice(handler, options)
    first_attempt_fails(LookupError if raises else BlockLeftOpen)
    assert not connection.in_atomic_block
    assert effects() == ["bad", "good"]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("mode", ["none", "broker_only"])
def test_block_left_open_outside_a_transaction_fails_the_attempt(
    mode: Any, raises: bool
) -> None:
    """Otherwise the mark of the message and the stage's messages would be rolled back
    with the block, and the delivery would be acknowledged."""

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            transaction.atomic().__enter__()
            Effect.objects.create(name="inner", message_id=str(message.id))
            if raises:
                raise LookupError
        send_message("tests.after", message.delivery_attempt)

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage, times=2)
    first_attempt_fails(LookupError if raises else BlockLeftOpen)
    assert not Effect.objects.exists()
    stored = OutboxMessage.objects.filter(destination="tests.after")
    assert stored.count() + QueueMessage.objects.filter(queue="tests.after").count()


def work_by_hand(message: Message) -> None:
    transaction.set_autocommit(False)
    Effect.objects.create(name="committed", message_id=str(message.id))
    transaction.commit()


def begin_by_hand(message: Message) -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
    Effect.objects.create(name="left", message_id=str(message.id))


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("begin", [work_by_hand, begin_by_hand])
@pytest.mark.parametrize("mode", ["none", "broker_only"])
def test_transaction_begun_by_hand_and_left_open_fails_the_attempt(
    mode: Any, begin: Handler, raises: bool
) -> None:
    """Otherwise the mark of the message, its failure and the stage's messages would be
    stored in that transaction and rolled back, and the delivery acknowledged."""

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            begin(message)
            if raises:
                raise LookupError
        send_message("tests.after", message.delivery_attempt)

    with (
        txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}),
        declared(handler, transaction=mode) as stage,
    ):
        put(stage.destination)
        step(stage, times=2)
    first_attempt_fails(LookupError if raises else BlockLeftOpen)
    assert effects() == (["committed"] if begin is work_by_hand else [])
    assert InboxMessage.objects.get().state == "processed"
    queued = QueueMessage.objects.using("other")
    assert not queued.filter(queue=stage.destination).exists()
    stored = OutboxMessage.objects.filter(destination="tests.after")
    assert stored.count() + queued.filter(queue="tests.after").count() == 1


@pytest.mark.parametrize("mode", ["none", "broker_only"])
def test_durable_is_refused_only_in_the_handlers_own_block(mode: Any) -> None:
    """The stage has no transaction, so the error is Django's."""

    def handler(message: Message) -> None:
        with transaction.atomic(durable=True):
            Effect.objects.create(name="once", message_id=str(message.id))
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic():
            transaction.atomic(durable=True).__enter__()
        if message.delivery_attempt == 1:
            with transaction.atomic(), transaction.atomic(durable=True):
                pass

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage)
    first_attempt_fails(RuntimeError)
    assert "surrounds it" not in Attempt.objects.get().exception
    assert effects() == ["once"]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mode", ["outbox", "none", "coroutine"])
def test_transaction_left_open_elsewhere_fails_the_attempt(
    mode: Any, by_hand: bool
) -> None:
    """Otherwise its work would be rolled back, and the message acknowledged."""
    found: list[bool] = []

    def handler(message: Message) -> None:
        other = connections["other"]
        other.ensure_connection()
        found.append(other.in_atomic_block or not other.get_autocommit())
        block = transaction.atomic("other")
        if by_hand:
            other.set_autocommit(False)
        else:
            block.__enter__()
        Effect.objects.using("other").create(name="left", message_id="")
        if message.delivery_attempt == 2:
            if by_hand:
                other.commit()
                other.set_autocommit(True)
            else:
                block.__exit__(None, None, None)

    async def coroutine(message: Message) -> None:
        await sync_to_async(handler)(message)

    given: Any = handler
    if mode == "coroutine":
        given, mode = coroutine, "none"
    with declared(given, transaction=mode) as stage:
        send(stage.destination)
        step(stage, times=2)
    first_attempt_fails(BlockLeftOpen)
    assert found == [False, False]
    assert Effect.objects.using("other").count() == 1


@pytest.mark.postgresql
@drawn
def test_swallowed_error_of_a_query_fails_the_attempt(options: dict[str, Any]) -> None:
    """A handler catches the error of its query. The attempt fails, because PostgreSQL
    has aborted the transaction and COMMIT would roll back."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad" and message.delivery_attempt == 1:
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
            except Exception:
                logging.getLogger("tests").info("swallowed")

    run_twice(handler, options)
    first_attempt_fails(SwallowedDatabaseError)
    assert effects() == ["bad", "good"]


@drawn
def test_an_error_caught_outside_its_atomic_harms_nothing(
    options: dict[str, Any],
) -> None:
    def handler(message: Message) -> None:
        Order.objects.get_or_create(number="1")
        try:
            with transaction.atomic():
                Order.objects.create(number="1")
        except IntegrityError:
            Effect.objects.create(name=message.body, message_id=str(message.id))

    run_twice(handler, options)
    assert effects() == ["bad", "good"]
    assert not Attempt.objects.exists()


@drawn
def test_a_raising_commit_hook_is_reported_and_processes_nothing_again(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("the mail server is down")

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad":
            transaction.on_commit(broken)

    run_twice(handler, options)
    assert effects() == ["bad", "good"]
    assert not Attempt.objects.exists()
    assert not QueueMessage.objects.exists()
    assert "the mail server is down" in caplog.text


@drawn
def test_durable_inside_a_stage_is_refused_by_name(options: dict[str, Any]) -> None:
    def handler(message: Message) -> None:
        if message.body == "bad" and message.delivery_attempt == 1:
            with transaction.atomic(durable=True):
                pass
        Effect.objects.create(name=message.body, message_id=str(message.id))

    run_twice(handler, options)
    first_attempt_fails(DurableInStage)
    assert effects() == ["bad", "good"]


@pytest.fixture
def deferred_key() -> Any:
    """A constraint that is checked at the commit, like foreign keys."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "ALTER TABLE app_effect ADD CONSTRAINT late UNIQUE (name)"
                " DEFERRABLE INITIALLY DEFERRED"
            )
        else:
            cursor.execute(
                "CREATE TABLE late (effect bigint REFERENCES app_order (id)"
                " DEFERRABLE INITIALLY DEFERRED)"
            )
    yield
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("ALTER TABLE app_effect DROP CONSTRAINT late")
        else:
            cursor.execute("DROP TABLE late")


def fail_at_commit() -> None:
    if connection.vendor == "postgresql":
        Effect.objects.create(name="bad", message_id="late")
    else:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO late VALUES (4711)")


@drawn
@pytest.mark.usefixtures("deferred_key")
def test_a_commit_that_fails_is_a_failed_attempt(options: dict[str, Any]) -> None:
    """The commit of a message's transaction fails. The dead letter shows the commit's
    error. Other messages are not affected."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        if message.body == "bad":
            fail_at_commit()
        send_message("tests.next", message.body)

    with declared(handler, **options) as stage:
        send(stage.destination, "bad")
        send(stage.destination, "good")
        step(stage, times=6)
    assert effects() == ["good"]
    letter = DeadLetter.objects.get()
    assert letter.reason == "attempts_exhausted"
    assert "IntegrityError" in letter.exception
    assert [one.number for one in Attempt.objects.order_by("number")] == [1, 2, 3]
    if stage.transaction == "outbox":
        outgoing = OutboxMessage.objects.get(destination="tests.next")
        assert bytes(outgoing.body) == b'"good"'
    else:
        assert QueueMessage.objects.filter(queue="tests.next").count() == 1


@pytest.mark.postgresql
@drawn
def test_a_connection_that_died_between_messages_is_replaced(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the connection between two messages. The stage notices this
    before the handler runs, so no attempt is counted."""
    monkeypatch.setitem(connections.databases["default"], "CONN_MAX_AGE", None)
    backends: list[int] = []

    def handler(message: Message) -> None:
        Effect.objects.create(name=message.body, message_id=str(message.id))
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backends.append(cursor.fetchone()[0])

    # The broker's tables are elsewhere, or it would be the first to notice.
    with (
        txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}),
        declared(handler, **options) as stage,
        running(stage),
    ):
        send(stage.destination, "one")
        wait_until(lambda: not QueueMessage.objects.using("other").exists())
        with connection.cursor() as cursor:
            # Waits until it has ended: only then can anybody see it.
            cursor.execute("SELECT pg_terminate_backend(%s, 30000)", [backends[0]])
            assert cursor.fetchone()[0]
        send(stage.destination, "two")
        wait_until(lambda: effects() == ["one", "two"])
        wait_until(lambda: not QueueMessage.objects.using("other").exists())
    assert len(set(backends)) == 2
    assert not Attempt.objects.exists()
