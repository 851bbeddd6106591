"""No thread ends unnoticed. An exception of a handler fails its message. Another error
that ends a thread also ends its process, so that a supervisor restarts it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import signals, stages
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.stage_options import TRANSACTION_MODES, TransactionMode
from django_txmsg.errors import WorkerFailed
from django_txmsg.models import DeadLetter, InboxMessage, Worker
from django_txmsg.models.queue import QueueMessage
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.sending.outbox import send_message
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.faults import ManageProcess, broken_log, wait_until
from tests.running import IMPATIENT, committing, declared, put, running, txmsg

pytestmark = committing

Manage = Callable[..., ManageProcess]


class TimedOut(BaseException):
    """A time-out of gevent or a similar library. It is not a subclass of
    `Exception`."""


WORST: dict[str, type[BaseException]] = {
    "cancelled": asyncio.CancelledError,
    "exit": GeneratorExit,
    "time-out": TimedOut,
    "system": SystemExit,
    "interrupt": KeyboardInterrupt,
}


def handler(message: Message) -> None:
    """Record an effect, and raise the exception that the message's body names."""
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    if message.body in WORST:
        raise WORST[str(message.body)]


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize(
    ("mode", "batch"), [("outbox", 1), ("outbox", 4), ("best_effort_1pc", 1)]
)
def test_every_exception_of_a_handler_fails_only_its_message(
    mode: Any, batch: int, worst: str
) -> None:
    with (
        txmsg(),
        declared(handler, transaction=mode, batch=batch) as stage,
    ):
        for body in (b'"first"', f'"{worst}"'.encode(), b'"last"'):
            put(stage.destination, body)
        with running(stage):
            wait_until(lambda: DeadLetter.objects.count() == 1)
            wait_until(lambda: Effect.objects.count() == 2)
            wait_until(lambda: not QueueMessage.objects.exists())
            # The thread lives: it takes another.
            put(stage.destination, b'"after"')
            wait_until(lambda: Effect.objects.filter(name="after").exists())
    assert DeadLetter.objects.get().reason == "attempts_exhausted"
    assert InboxMessage.objects.get(dead_at__isnull=False).attempts == 3


def test_all_threads_of_a_group_end_with_the_first_error() -> None:
    stop = threading.Event()
    group = ThreadGroup(stop.set)
    ended: list[str] = []

    def lasting() -> None:
        stop.wait(30)
        ended.append("lasting")

    def failing() -> None:
        raise GeneratorExit

    group.add("lasting", lasting)
    group.add("failing", failing)
    group.start()
    with pytest.raises(WorkerFailed, match="Thread failing ended by GeneratorExit"):
        group.join()
    assert ended == ["lasting"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_threads_of_a_group_end_even_if_the_log_fails() -> None:
    stop = threading.Event()
    group = ThreadGroup(stop.set)

    def failing() -> None:
        raise ValueError("it fails")

    group.add("lasting", lambda: stop.wait(30))
    group.add("failing", failing)
    with broken_log("django_txmsg.threads"):
        group.start()
        with pytest.raises(ValueError, match="it fails"):
            group.join()
    assert stop.is_set()


@pytest.mark.parametrize("mode", TRANSACTION_MODES)
def test_message_is_processed_once_if_the_log_fails(mode: TransactionMode) -> None:
    with txmsg(), declared(handler, transaction=mode) as stage:
        put(stage.destination, b'"once"')
        with broken_log("django_txmsg.messages"), running(stage):
            wait_until(lambda: not QueueMessage.objects.exists())
            put(stage.destination, b'"after"')
            wait_until(lambda: Effect.objects.filter(name="after").exists())
    assert Effect.objects.filter(name="once").count() == 1
    assert not InboxMessage.objects.exclude(last_error="").exists()


@pytest.mark.parametrize("worst", ["cancelled", "system"])
@pytest.mark.parametrize(
    ("mode", "batch"),
    [("outbox", 1), ("outbox", 4), ("none", 1), ("best_effort_1pc", 1)],
)
def test_exception_of_a_receiver_fails_no_message(
    mode: Any, batch: int, worst: str
) -> None:
    def receiver(**_: Any) -> None:
        raise WORST[worst]

    signals.message_processed.connect(receiver, weak=False)
    try:
        with txmsg(), declared(handler, transaction=mode, batch=batch) as stage:
            for body in (b'"first"', b'"second"'):
                put(stage.destination, body)
            with running(stage):
                wait_until(lambda: not QueueMessage.objects.exists())
                # The thread lives: it takes another.
                put(stage.destination, b'"after"')
                wait_until(lambda: Effect.objects.filter(name="after").exists())
    finally:
        signals.message_processed.disconnect(receiver)
    assert Effect.objects.count() == 3
    assert not InboxMessage.objects.exclude(last_error="").exists()


class Ending(DatabaseBroker):
    """An embedded broker whose sessions end the thread that uses them."""

    def open(self, **options: Any) -> DatabaseSession:
        raise GeneratorExit


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("command", ["consume", "relay"])
def test_a_thread_that_ends_ends_its_process(
    command: str, once: bool, manage: Manage
) -> None:
    with txmsg(), transaction.atomic():
        send_message("tests.group", None)
    put("tests.group")
    worker = manage(
        command,
        *(["--once"] if once else []),
        txmsg={**IMPATIENT, "BROKERS": {"default": {"BACKEND": f"{__name__}.Ending"}}},
        hook="tests.integration.test_thread_group.declare",
    )
    assert worker.wait() == 1
    assert "ended, and its process with it" in worker.output
    assert not Worker.objects.exists()


def declare() -> None:
    """Declare a stage in the worker with the handler of this module."""
    stages.stage("tests.group")(handler)


def test_a_handlers_own_keyboard_interrupt_fails_its_message_and_ctrl_c_still_stops(
    manage: Manage,
) -> None:
    with txmsg():
        for body in (b'"interrupt"', b'"next"'):
            put("tests.group", body)
        worker = manage(
            "consume",
            txmsg=IMPATIENT,
            hook="tests.integration.test_thread_group.declare",
        )
        wait_until(lambda: DeadLetter.objects.exists() and Effect.objects.exists())
        put("tests.group", b'"after"')
        wait_until(lambda: Effect.objects.filter(name="after").exists())
        worker.interrupt()
    assert worker.wait() == 0
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 3)
    assert letter.exception == "KeyboardInterrupt"


@pytest.mark.parametrize("batch", [1, 3])
def test_ctrl_c_in_a_test_ends_the_test(batch: int) -> None:
    """In a test, the stage runs in the main thread, where Python raises
    KeyboardInterrupt for Ctrl-C. The exception ends the test, and no message is
    buried."""

    def pressed(message: Message) -> None:
        signal.raise_signal(signal.SIGINT)

    # Ignored where the run itself was started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with txmsg(), declared(pressed, batch=batch) as stage:
            for _ in range(2):
                put(stage.destination)
            with pytest.raises(KeyboardInterrupt):
                drain(stage.name)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not InboxMessage.objects.filter(dead_at__isnull=False).exists()
