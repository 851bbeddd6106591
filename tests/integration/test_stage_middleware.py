"""STAGE_MIDDLEWARE around handlers: where it runs, and which effects it can have."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from django.core.cache import caches
from django.core.exceptions import MiddlewareNotUsed
from django.db import IntegrityError, OperationalError, connection, transaction
from django.utils import timezone, translation

from django_txmsg import Redeliver, RedeliveryPolicy, Refuse, send_message
from django_txmsg.consuming.stage_middleware import prepared
from django_txmsg.envelope.message import Message
from django_txmsg.errors import BrokerUnavailable, ConfigurationError
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.stages import CallNext, Stage
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, declared, put, running, step, thread_of, txmsg

pytestmark = committing

HERE = "tests.integration.test_stage_middleware."

#: What happened, in its order.
events: list[str] = []
made: list[str] = []
#: What the middleware under test does.
does: list[Callable[[CallNext, Message], Any]] = []

variable: ContextVar[str] = ContextVar("variable", default="")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for notes in (events, made, does):
        notes.clear()


def note(what: str) -> None:
    events.append(f"{what}{' in block' if connection.in_atomic_block else ''}")


class Inside:
    def __init__(self, call_next: CallNext) -> None:
        self.call_next = call_next
        made.append(f"inside {call_next.stage.name}")

    def __call__(self, message: Message) -> Any:
        note("inside")
        result = self.call_next(message)
        note("inside again")
        return result


class Around(Inside):
    outside_transaction = True

    def __call__(self, message: Message) -> Any:
        note("around")
        result = self.call_next(message)
        note("around again")
        return result


def function(call_next: CallNext) -> Callable[[Message], Any]:
    def middleware(message: Message) -> Any:
        note("function")
        return call_next(message)

    return middleware


def unused(call_next: CallNext) -> Callable[[Message], Any]:
    raise MiddlewareNotUsed


def doing(call_next: CallNext) -> Callable[[Message], Any]:
    return lambda message: does[0](call_next, message)


def doing_outside(call_next: CallNext) -> Callable[[Message], Any]:
    return lambda message: does[0](call_next, message)


doing_outside.outside_transaction = True  # type: ignore[attr-defined]


async def asynchronous(call_next: CallNext) -> None: ...


class Coroutine:
    def __init__(self, call_next: CallNext) -> None: ...

    async def __call__(self, message: Message) -> None: ...


def nothing(call_next: CallNext) -> None: ...


def asking(call_next: CallNext) -> None:
    raise OperationalError("no such table")


def around(*names: str, **more: Any) -> Any:
    return txmsg(STAGE_MIDDLEWARE=[HERE + name for name in names], **more)


def effect(message: Message) -> str:
    note("handler")
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    send_message("tests.next", message.body)
    return "result"


def failing(message: Message) -> None:
    effect(message)
    raise LookupError("no stock")


def done() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def attempt(stage: Stage) -> str:
    """Return the error of the stage's only attempt."""
    return Attempt.objects.get(stage=stage.name).exception


MODES = ["outbox", "best_effort_1pc", "broker_only"]


@pytest.mark.parametrize("mode", MODES)
def test_middlewares_run_inside_or_around_the_transaction(mode: Any) -> None:
    with (
        around("Inside", "unused", "Around", "function"),
        declared(effect if mode == "outbox" else note_only, transaction=mode) as stage,
    ):
        put(stage.destination)
        step(stage)

    block = "" if mode == "broker_only" else " in block"
    inside = [f"{what}{block}" for what in ("inside", "function", "handler")]
    assert events == ["around", *inside, f"inside again{block}", "around again"]
    assert OutboxMessage.objects.count() == (mode == "outbox")


def note_only(message: Message) -> None:
    note("handler")


def test_the_transaction_is_committed_when_what_is_around_it_goes_on() -> None:
    seen: list[int] = []

    def look(call_next: CallNext, message: Message) -> None:
        seen.append(in_another_thread(Effect.objects.count))
        call_next(message)
        seen.append(in_another_thread(Effect.objects.count))

    does.append(look)
    with around("doing_outside"), declared(effect) as stage:
        put(stage.destination)
        step(stage)

    assert seen == [0, 1]


def in_another_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


def test_middlewares_are_created_once_for_all_threads() -> None:
    with around("Inside", "Around"), declared(effect) as stage:
        with running(stage, concurrency=3) as threads:
            for _ in range(6):
                put(stage.destination)
            wait_until(lambda: Effect.objects.count() == 6)
        assert threads[0].stage is threads[2].stage is prepared(stage)

    assert made == [f"inside {stage.name}"] * 2


def test_without_middlewares_only_the_answer_wraps_a_handler() -> None:
    with txmsg(), declared(effect) as stage:
        ready = prepared(stage)
    with around("unused"), declared(effect) as other:
        assert inspect.unwrap(prepared(other).handler) is effect

    assert stage.handler is other.handler is effect
    assert inspect.unwrap(ready.handler) is effect
    assert ready.outside is None


def test_what_the_handler_returns_comes_back_inside() -> None:
    found: list[Any] = []
    does.append(lambda call_next, message: found.append(call_next(message)))
    with around("doing"), declared(effect) as stage:
        put(stage.destination)
        step(stage)

    assert found == ["result"]


def test_invalid_middleware_is_refused_before_receiving() -> None:
    for name in ("asynchronous", "Coroutine", "nothing", "no_such"):
        with (
            around(name),
            declared(effect) as stage,
            pytest.raises(ConfigurationError, match="STAGE_MIDDLEWARE"),
        ):
            thread_of(stage)


# What a middleware does wrong, and what the attempt fails with.


def hides(call_next: CallNext, message: Message) -> None:
    with contextlib.suppress(LookupError):
        call_next(message)


def leaves_out(call_next: CallNext, message: Message) -> None:
    pass


def twice(call_next: CallNext, message: Message) -> None:
    call_next(message)
    call_next(message)


def twice_and_hides_it(call_next: CallNext, message: Message) -> None:
    call_next(message)
    with contextlib.suppress(Exception):
        call_next(message)


def from_another_thread(call_next: CallNext, message: Message) -> None:
    in_another_thread(lambda: call_next(message))


def another_message(call_next: CallNext, message: Message) -> None:
    call_next(dataclasses.replace(message, id=uuid.uuid4()))


def exits(call_next: CallNext, message: Message) -> None:
    call_next(message)
    raise SystemExit(3)


MISUSED = "django_txmsg.errors.MiddlewareMisused: "


#: Each with its handler, and with what the attempt fails.
WRONG: list[tuple[Any, Any, str]] = [
    (hides, failing, "LookupError: no stock"),
    (leaves_out, effect, f"{MISUSED}A middleware returned without"),
    (from_another_thread, effect, MISUSED),
    (another_message, effect, f"{MISUSED}call_next() was given message"),
]
WRONG_AFTERWARDS: list[tuple[Any, Any, str]] = [
    (twice, effect, f"{MISUSED}call_next() was called twice"),
    (twice_and_hides_it, effect, f"{MISUSED}call_next() was called twice"),
    (exits, effect, "SystemExit: 3"),
]


@pytest.mark.parametrize("mode", MODES)
def test_no_misuse_in_a_middleware_makes_a_message_processed(mode: Any) -> None:
    for wrong, handler, said in WRONG + WRONG_AFTERWARDS:
        does[:] = [wrong]
        with around("doing"), declared(handler, transaction=mode) as stage:
            put(stage.destination, wrong.__name__.encode().join([b'"'] * 2))
            step(stage)
            assert attempt(stage).startswith(said)
            if mode != "broker_only":
                assert wrong.__name__ not in done()
            # It was the middleware's fault: well again, all goes its way.
            does[:] = [lambda call_next, message: call_next(message)]
            if handler is effect:
                step(stage)
                assert wrong.__name__ in done()
    assert OutboxMessage.objects.count() == (6 if mode == "outbox" else 0)
    assert not DeadLetter.objects.exists()


def test_misused_call_next_around_the_transaction_fails_the_attempt() -> None:
    for wrong, handler, said in WRONG:
        does[:] = [wrong]
        with around("doing_outside"), declared(handler) as stage:
            put(stage.destination, b'"it"')
            step(stage)
            assert attempt(stage).startswith(said)

    assert done() == []
    assert not InboxMessage.objects.exclude(processed_at=None).exists()


@pytest.mark.parametrize("mode", MODES)
def test_middleware_error_after_the_commit_is_only_logged(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong, _, _ in WRONG_AFTERWARDS:
        does[:] = [wrong]
        with around("doing_outside"), declared(effect_alone, transaction=mode) as stage:
            put(stage.destination, b'"it"')
            step(stage, times=2)

    assert done() == ["it"] * 3
    assert not Attempt.objects.exists()
    assert not DeadLetter.objects.exists()
    assert caplog.text.count("raised after the commit") == 3


def effect_alone(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))


def test_an_error_can_be_replaced_by_a_verdict() -> None:
    def refuses(call_next: CallNext, message: Message) -> None:
        try:
            call_next(message)
        except LookupError as error:
            raise Refuse("not stocked here") from error

    does.append(refuses)
    for name in ("doing", "doing_outside"):
        with around(name), declared(failing) as stage:
            put(stage.destination)
            step(stage)
            assert DeadLetter.objects.get(stage=stage.name).reason == "refused"

    assert done() == []


def test_a_verdict_cannot_be_hidden() -> None:
    def handler(message: Message) -> None:
        raise Refuse("no")

    def hide(call_next: CallNext, message: Message) -> None:
        with contextlib.suppress(Refuse, Redeliver):
            call_next(message)

    does.append(hide)
    for name in ("doing", "doing_outside"):
        with around(name), declared(handler) as stage:
            put(stage.destination)
            step(stage)
            assert DeadLetter.objects.get(stage=stage.name).reason == "refused"


@pytest.mark.postgresql
def test_a_swallowed_query_error_in_a_middleware_fails_the_attempt() -> None:
    def spoil(call_next: CallNext, message: Message) -> None:
        call_next(message)
        with contextlib.suppress(IntegrityError):
            Effect.objects.create(pk=Effect.objects.get().pk, name="", message_id="")

    does.append(spoil)
    with around("doing"), declared(effect) as stage:
        put(stage.destination)
        step(stage)

    assert "SwallowedDatabaseError" in attempt(stage)
    assert done() == []


def test_outages_and_conflicts_bypass_middlewares() -> None:
    def handler(message: Message) -> None:
        raise BrokerUnavailable("gone")

    def bury(call_next: CallNext, message: Message) -> None:
        try:
            call_next(message)
        except Exception as error:
            raise Refuse from error

    does.append(bury)
    with around("doing_outside"), declared(handler) as stage:
        put(stage.destination)
        with pytest.raises(BrokerUnavailable, match="gone"):
            step(stage)

    assert not DeadLetter.objects.exists()
    assert not Attempt.objects.exists()


@pytest.mark.postgresql
def test_a_conflict_is_tried_again_whatever_is_made_of_it() -> None:
    tries: list[int] = []

    def handler(message: Message) -> None:
        tries.append(message.delivery_attempt)
        if len(tries) == 1:
            with connection.cursor() as cursor:
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"
                )
        effect(message)

    def bury(call_next: CallNext, message: Message) -> None:
        try:
            call_next(message)
        except Exception as error:
            raise Refuse from error

    does.append(bury)
    with around("doing_outside"), declared(handler) as stage:
        put(stage.destination, b'"it"')
        step(stage)

    assert (tries, done()) == ([1, 1], ["it"])


def test_a_copy_with_another_body_reaches_the_handler() -> None:
    does.append(
        lambda call_next, message: call_next(dataclasses.replace(message, body="plain"))
    )
    for name in ("doing", "doing_outside"):
        with around(name), declared(effect) as stage:
            put(stage.destination, b'"secret"')
            step(stage)

    assert done() == ["plain", "plain"]


def test_inner_middleware_wraps_each_message_of_a_batch() -> None:
    with around("Inside"), declared(failing_for("1"), batch=10) as stage:
        for body in (b'"0"', b'"1"', b'"2"'):
            put(stage.destination, body)
        step(stage)

    assert events.count("inside in block") == 3
    assert events.count("inside again in block") == 2
    assert done() == ["0", "2"]
    assert "LookupError" in attempt(stage)


def failing_for(body: str) -> Callable[[Message], None]:
    def handler(message: Message) -> None:
        effect(message)
        if message.body == body:
            raise LookupError(body)

    return handler


def test_in_a_batch_the_misused_message_fails_alone() -> None:
    def once_not(call_next: CallNext, message: Message) -> None:
        if message.body != "1":
            call_next(message)

    does.append(once_not)
    with around("doing"), declared(effect, batch=10) as stage:
        for body in (b'"0"', b'"1"', b'"2"'):
            put(stage.destination, body)
        step(stage)

    assert done() == ["0", "2"]
    assert attempt(stage).startswith(MISUSED)


def test_outside_middlewares_run_once_for_each_message_of_a_batch() -> None:
    with around("Around"), declared(failing_for("1"), batch=10) as stage:
        for body in (b'"0"', b'"1"', b'"2"'):
            put(stage.destination, body)
        step(stage, times=3, parked=False)

    assert events.count("around") == 3
    assert events.count("around again") == 2
    assert done() == ["0", "2"]


def test_a_copy_of_a_message_reaches_no_middleware() -> None:
    with around("Inside", "Around"), declared(effect) as stage:
        message_id = put(stage.destination)
        step(stage)
        before = list(events)
        put(stage.destination, message_id=message_id)
        step(stage)

    assert events == before


def test_the_tests_of_a_project_run_them_too() -> None:
    def fails(call_next: CallNext, message: Message) -> None:
        call_next(message)
        raise LookupError("of the middleware")

    does.append(fails)
    for name in ("doing", "doing_outside"):
        with around("Inside", name), declared(effect) as stage:
            with transaction.atomic():
                send_message(stage.destination, "it")
            with pytest.raises(LookupError, match="of the middleware"):
                drain(stage.name)
    assert "inside in block" in events


# The context.


@pytest.mark.parametrize("batch", [1, 10])
def test_context_variables_do_not_leak_into_the_next_message(
    batch: int,
) -> None:
    found: list[tuple[str, str, str]] = []
    token = variable.set("the thread's")

    def handler(message: Message) -> None:
        zone = timezone.get_current_timezone_name()
        found.append((variable.get(), translation.get_language(), zone))
        variable.set("a message's")
        translation.activate("de")
        timezone.activate("Europe/Berlin")

    try:
        with txmsg(), declared(handler, batch=batch) as stage:
            for _ in range(3):
                put(stage.destination)
            step(stage, times=3 // batch or 1)
    finally:
        variable.reset(token)

    language, zone = translation.get_language(), timezone.get_default_timezone_name()
    assert found == [("the thread's", language, zone)] * 3


def test_next_attempt_does_not_see_the_context_of_the_last() -> None:
    found: list[str] = []

    def handler(message: Message) -> None:
        found.append(variable.get())
        variable.set("left behind")
        raise LookupError

    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.0, mode="blocking")
    with txmsg(), declared(handler, redelivery=policy) as stage:
        put(stage.destination)
        step(stage)

    assert found == ["", "", ""]


def test_a_threads_messages_share_its_caches() -> None:
    """All messages of a thread use the same cache objects. Otherwise each message would
    open a new connection to the cache."""
    found: list[object] = []

    def handler(message: Message) -> None:
        found.append(caches["default"])

    with txmsg(), declared(handler) as stage, running(stage):
        for _ in range(3):
            put(stage.destination)
        wait_until(lambda: len(found) == 3)

    assert found[0] is found[1] is found[2]


def test_open_block_on_another_connection_ends_with_its_message() -> None:
    found: list[bool] = []

    def handler(message: Message) -> None:
        found.append(transaction.get_autocommit(using="other"))
        transaction.set_autocommit(False, using="other")
        Effect.objects.using("other").create(name="left", message_id="")

    # The open block fails the attempt, so without redeliveries each message runs once.
    once = RedeliveryPolicy(max_redeliveries=0)
    with txmsg(), declared(handler, redelivery=once) as stage, running(stage):
        for _ in range(2):
            put(stage.destination)
        wait_until(lambda: DeadLetter.objects.count() == 2)

    assert found == [True, True]
    assert not Effect.objects.using("other").exists()
