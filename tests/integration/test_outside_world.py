"""`transaction="none"`: handlers, also async ones, that call other services."""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from django_txmsg import Message, Refuse, send_message, stage, wire
from django_txmsg.consuming import deadline
from django_txmsg.errors import ConfigurationError, StageTimedOut
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import (
    IMPATIENT,
    committing,
    copies_dropped,
    declared,
    put,
    running,
    send,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

_who: ContextVar[str] = ContextVar("who", default="")


def processed() -> int:
    return InboxMessage.objects.exclude(processed_at=None).count()


def test_nothing_is_open_while_the_handler_runs_and_its_answer_enters_once() -> None:
    seen: list[tuple[bool, int]] = []

    def handler(message: Message) -> None:
        send_message("tests.answer", message.body)
        seen.append((connection.in_atomic_block, OutboxMessage.objects.count()))

    with declared(handler, transaction="none") as declared_stage:
        sent = put(declared_stage.destination, b'"x"')
        step(declared_stage)
        put(declared_stage.destination, b'"x"', message_id=sent)
        step(declared_stage)

    assert seen == [(False, 0)]  # and the copy was dropped
    assert OutboxMessage.objects.get().destination == "tests.answer"
    assert processed() == 1


def test_two_concurrent_copies_both_run_and_one_is_marked() -> None:
    both = threading.Barrier(2)

    def handler(message: Message) -> None:
        both.wait(60)
        Effect.objects.create(name="called", message_id=message.id)
        send_message("tests.answer", 1)

    with declared(handler, transaction="none", concurrency=2) as declared_stage:
        sent = put(declared_stage.destination)
        put(declared_stage.destination, message_id=sent)
        with copies_dropped() as dropped, running(declared_stage, concurrency=2):
            wait_until(lambda: processed() == 1)
            wait_until(lambda: Effect.objects.count() == 2)
            wait_until(lambda: dropped == [sent])
    assert OutboxMessage.objects.count() == 1


def test_messages_of_a_failed_attempt_are_dropped() -> None:
    attempts: list[int] = []

    def handler(message: Message) -> None:
        send_message("tests.answer", len(attempts))
        attempts.append(message.delivery_attempt)
        if len(attempts) == 1:
            raise ConnectionError("the provider is away")
        if message.body == "refused":
            raise Refuse("no such card")

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination, b'"good"')
        step(declared_stage, times=2)
        put(declared_stage.destination, b'"refused"')
        step(declared_stage)

    assert attempts == [1, 2, 1]
    assert OutboxMessage.objects.get().body == b"1"
    assert DeadLetter.objects.get().reason == "refused"


def write(name: str, body: Any, *, again: bool = True) -> None:
    """Write a row and send a message, in one transaction of the handler."""
    with transaction.atomic():
        made = Effect.objects.get_or_create(name=name, message_id="1")[1]
        if made or again:
            send_message("tests.answer", body)


@pytest.mark.parametrize("again", [True, False])
def test_a_message_commits_with_the_rows_of_the_handlers_own_block(again: bool) -> None:
    """The first attempt fails after its block has committed. The second attempt may
    send the message again, or may see that the block has committed. In both cases, the
    message is stored once."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        send_message("tests.after", len(attempts))
        write("paid", "paid", again=again)
        attempts.append(OutboxMessage.objects.count())
        if len(attempts) == 1:
            raise ConnectionError("the provider is away")

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination)
        step(declared_stage, times=2)

    assert attempts == [1, 1]
    stored = OutboxMessage.objects.order_by("id").values_list("destination", "body")
    assert [(where, bytes(body)) for where, body in stored] == [
        ("tests.answer", b'"paid"'), ("tests.after", b"1"),
    ]  # fmt: skip


def test_a_message_is_rolled_back_with_the_handlers_own_block() -> None:
    def handler(message: Message) -> None:
        with transaction.atomic():
            send_message("tests.answer", "undone")
            transaction.set_rollback(True)
        with transaction.atomic():
            send_message("tests.answer", "kept", unique="kept")
            savepoint = connection.savepoint()
            send_message("tests.answer", "undone by hand")
            connection.savepoint_rollback(savepoint)
        with transaction.atomic(using="other"):
            send_message("tests.answer", "elsewhere", using="other")

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination)
        step(declared_stage)

    assert processed() == 1
    assert OutboxMessage.objects.get().body == b'"kept"'
    assert OutboxMessage.objects.using("other").get().body == b'"elsewhere"'


def test_a_coroutine_may_send_in_a_block_of_its_own() -> None:
    async def handler(message: Message) -> None:
        await sync_to_async(write)("paid", 1)
        send_message("tests.after", 2)
        if message.delivery_attempt == 1:
            raise ConnectionError("the provider is away")

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination)
        step(declared_stage)
        assert OutboxMessage.objects.get().destination == "tests.answer"
        step(declared_stage)

    assert OutboxMessage.objects.count() == 2


def test_a_block_of_a_test_is_not_a_block_of_the_handler() -> None:
    def handler(message: Message) -> None:
        send_message("tests.answer", 1)
        assert not OutboxMessage.objects.filter(destination="tests.answer").exists()
        write("paid", 2)
        assert OutboxMessage.objects.filter(destination="tests.answer").exists()

    with declared(handler, transaction="none") as declared_stage, transaction.atomic():
        send_message(declared_stage.destination, 1)
        drain(declared_stage.destination)
        assert OutboxMessage.objects.filter(destination="tests.answer").count() == 2
        transaction.set_rollback(True)


def test_coroutines_of_a_stage_are_in_flight_together_in_one_loop() -> None:
    count = 20
    flying: list[Message] = []
    loops: set[int] = set()

    async def handler(message: Message) -> None:
        flying.append(message)
        loops.add(id(asyncio.get_running_loop()))
        while len(flying) < count:  # each waits for all others
            await asyncio.sleep(0.01)
        await Effect.objects.acreate(name="called", message_id=message.id)
        send_message("tests.answer", message.body)

    with declared(handler, transaction="none", concurrency=count) as declared_stage:
        for number in range(count):
            put(declared_stage.destination, str(number).encode())
        with running(declared_stage, concurrency=count):
            wait_until(lambda: processed() == count, deadline=120)

    assert len(loops) == 1
    assert Effect.objects.count() == count
    answers = OutboxMessage.objects.values_list("body", flat=True)
    assert {int(bytes(body)) for body in answers} == set(range(count))
    causes = OutboxMessage.objects.values_list("correlation_id", flat=True)
    assert {str(message.id) for message in flying} == set(causes)


def test_the_connection_that_a_coroutine_opens_ends_with_it() -> None:
    used: list[Any] = []

    async def handler(message: Message) -> None:
        await Effect.objects.acreate(name="called", message_id=message.id)
        await sync_to_async(lambda: used.append(connections["default"]))()
        assert used[0].connection is not None

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination)
        step(declared_stage)

    assert processed() == 1
    assert used[0] is not connections["default"]
    assert used[0].connection is None


def test_a_coroutine_past_its_timeout_is_cancelled() -> None:
    cancelled = threading.Event()

    async def handler(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with declared(handler, transaction="none", timeout=0.2) as declared_stage:
        put(declared_stage.destination)
        step(declared_stage)

    assert cancelled.is_set()
    row = InboxMessage.objects.get()
    assert row.processed_at is None
    assert StageTimedOut.__name__ in row.last_error


def test_a_coroutine_that_is_stopped_is_cancelled_and_ends_in_order() -> None:
    began, ended = threading.Event(), threading.Event()

    async def handler(message: Message) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert message.cancelled()
            await Effect.objects.acreate(name="ended", message_id=message.id)
            ended.set()

    with (
        declared(handler, transaction="none", timeout=60.0) as declared_stage,
        running(declared_stage),
    ):
        sent = put(declared_stage.destination)
        assert began.wait(60)
        assert deadline.stop(declared_stage.name, sent, "wrong card")
        wait_until(lambda: DeadLetter.objects.exists(), deadline=30)
    assert ended.is_set()
    assert Effect.objects.count() == 1
    assert DeadLetter.objects.get().exception.endswith(": wrong card")


@pytest.mark.parametrize("how", ["exit", "stop", "cancel"])
def test_a_coroutine_that_ends_its_event_loop_disturbs_no_other(how: str) -> None:
    async def leave() -> None:
        sys.exit(3)

    async def handler(message: Message) -> None:
        if message.body == "good":
            return
        if how == "exit":
            await asyncio.create_task(leave())
        elif how == "cancel":
            raise asyncio.CancelledError
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination, b'"bad"')
        step(declared_stage)
        put(declared_stage.destination, b'"good"')
        step(declared_stage, parked=False)
    assert processed() == (2 if how == "stop" else 1)


def test_a_coroutine_that_blocks_the_loop_is_named_with_its_stack() -> None:
    inside, go_on = threading.Event(), threading.Event()

    async def blocks_the_loop(message: Message) -> None:
        inside.set()
        go_on.wait(30)

    with (
        declared(blocks_the_loop, transaction="none") as declared_stage,
        running(declared_stage) as (thread,),
    ):
        put(declared_stage.destination)
        assert inside.wait(30)
        stack = thread.stuck(0.0)
        go_on.set()
        assert stack is not None
        assert "in blocks_the_loop" in stack


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("no"), SystemExit(3)])
def test_exception_of_a_coroutine_fails_only_its_message(
    error: BaseException,
) -> None:
    async def handler(message: Message) -> None:
        if message.body == "bad":
            raise error

    with declared(handler, transaction="none") as declared_stage:
        put(declared_stage.destination, b'"bad"')
        step(declared_stage)
        put(declared_stage.destination, b'"good"')
        step(declared_stage, parked=False)

    assert processed() == 1
    assert (
        type(error).__name__ in InboxMessage.objects.get(processed_at=None).last_error
    )


def test_a_coroutine_has_the_context_of_its_attempt() -> None:
    found: list[str] = []

    async def handler(message: Message) -> None:
        await asyncio.sleep(0)
        found.append(_who.get())
        _who.set("another")

    with declared(handler, transaction="none") as declared_stage:
        _who.set("the caller")
        for _ in range(2):
            put(declared_stage.destination)
            step(declared_stage)
    assert found == ["the caller", "the caller"]


def test_what_a_coroutine_returns_is_the_answer() -> None:
    async def handler(message: Message) -> dict[str, Any]:
        return {"paid": message.body}

    with declared(handler, transaction="none") as declared_stage:
        asked = {
            wire.MESSAGE_ID: str(uuid.uuid4()),
            "content-type": "application/json",
            wire.REPLY_TO: "tests.answers",
            wire.TICKET: "t1",
        }
        put(declared_stage.destination, b"7", headers=asked)
        step(declared_stage)

    assert processed() == 1
    assert OutboxMessage.objects.get().body == b'{"paid":7}'


def test_a_test_may_drain_a_coroutine_within_its_own_transaction() -> None:
    async def handler(message: Message) -> None:
        order = await Effect.objects.aget(name="before")
        await Effect.objects.acreate(name="after", message_id=order.message_id)

    with declared(handler, transaction="none") as declared_stage, transaction.atomic():
        Effect.objects.create(name="before", message_id="1")
        send_message(declared_stage.destination, 1)
        drain()
        assert Effect.objects.filter(name="after").count() == 1
        transaction.set_rollback(True)


@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc", "broker_only"])
def test_a_coroutine_with_a_transaction_is_refused_with_a_reason(mode: Any) -> None:
    async def handler(message: Message) -> None: ...

    with pytest.raises(ConfigurationError, match='transaction="none"'):
        stage("tests.refused", transaction=mode)(handler)


def declare() -> None:
    """Declare a stage. The next test runs this function in the worker process that it
    stops."""

    @stage("tests.outside", transaction="none")
    async def handler(message: Message) -> None:
        print("it has called", flush=True)  # noqa: T201 - the test reads it
        await asyncio.sleep(1.5)
        send_message("tests.answer", 1)


def test_sigterm_lets_a_coroutine_finish(manage: Callable[..., ManageProcess]) -> None:
    process = manage(
        "consume",
        txmsg=IMPATIENT,
        hook="tests.integration.test_outside_world.declare",
    )
    with txmsg():
        send("tests.outside", 1)
    process.wait_for_line("it has called")
    process.terminate()
    process.succeed()
    assert processed() == 1
    assert OutboxMessage.objects.filter(destination="tests.answer").count() == 1
