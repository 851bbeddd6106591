"""Every accepted message is stored, however late in its transaction it was sent.

Hooks and receivers of signals run before, between and after the package's last steps.
Either their messages are sent, or their send_message() raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.dispatch import Signal

from django_txmsg import outbox_session, send_message, signals
from django_txmsg.envelope.message import Message
from django_txmsg.models import OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.running import committing, declared, send, step, txmsg

pytestmark = committing

LATE = "tests.late"
MODES = ["outbox", "best_effort_1pc", "broker_only"]
KEYS = [None, "k"]


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Use a broker in another database, so that control messages are sent."""
    with txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}):
        yield


def late() -> int:
    """Return how many late messages are in the outbox or in the broker's queue."""
    stored = OutboxMessage.objects.filter(destination=LATE)
    queued = QueueMessage.objects.using("other").filter(queue=LATE)
    ids = {str(one) for one in stored.values_list("message_id", flat=True)}
    return len(ids | {one.headers["txmsg-id"] for one in queued})


def send_late(key: str | None) -> None:
    """Send a message in a new transaction, as code outside any transaction does."""
    with transaction.atomic():
        Effect.objects.create(name="late")
        send_message(LATE, None, key=key)


@contextmanager
def received(signal: Signal, act: Callable[[], None]) -> Iterator[list[Exception]]:
    """Connect a receiver that calls `act` at the first signal. Yields a list of the
    exceptions that `act` has raised."""
    failed: list[Exception] = []
    acted: list[bool] = []

    def receiver(**_: Any) -> None:
        if not acted:
            acted.append(True)
            try:
                act()
            except Exception as error:
                failed.append(error)

    signal.connect(receiver, weak=False)
    try:
        yield failed
    finally:
        signal.disconnect(receiver)
        assert acted, "the signal was never sent"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("drained", [False, True], ids=["consume", "drain"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_a_stage_send_in_their_own_transactions(
    mode: Any, batch: int, drained: bool, key: str | None
) -> None:
    """A stage's hooks send messages in transactions of their own. One hook registers
    another hook. All messages are sent."""
    if batch > 1 and mode != "outbox":
        batch = 1

    def hook() -> None:
        send_late(key)
        with transaction.atomic():
            transaction.on_commit(lambda: send_late(key))

    def handler(message: Message) -> None:
        send_message("tests.next", None)
        with transaction.atomic():
            transaction.on_commit(hook)

    with declared(handler, transaction=mode, batch=batch) as stage:
        for _ in range(3):
            send(stage.destination)
        if drained:
            drain(stage.name)
        else:
            step(stage, times=3)
    assert Effect.objects.count() == 6
    assert late() == 6


@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc"])
def test_stage_hook_without_transaction_raises(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name="done")
        transaction.on_commit(lambda: send_message(LATE, None))

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage)
    assert "needs an open transaction" in caplog.text
    assert (Effect.objects.count(), late()) == (1, 0)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "signal",
    [
        signals.message_stored,
        signals.messages_committed,
        signals.message_processed,
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_receiver_of_a_stages_signal_sends_once(
    signal: Signal, batch: int, key: str | None
) -> None:
    def handler(message: Message) -> None:
        send_message("tests.next", None)

    with declared(handler, batch=batch) as stage:
        for _ in range(batch):
            send(stage.destination)
        with received(signal, lambda: send_late(key)) as failed:
            step(stage)
    assert not failed
    assert late() == 1


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "signal",
    [
        signals.control_message_sent,
        signals.message_stored,
        signals.messages_committed,
        signals.session_ended,
    ],
)
def test_receiver_of_a_sessions_signal_sends_once(
    signal: Signal, key: str | None
) -> None:
    """If a receiver of one of a session's signals sends a message, this message is
    stored exactly once. Of these signals, only `control_message_sent` comes before the
    commit, so only the message of its receiver belongs to the session."""
    with (
        received(signal, lambda: send_late(key)) as failed,
        outbox_session() as session,
    ):
        send_message("tests.next", None)
    assert not failed
    assert late() == Effect.objects.count() == 1
    inside = OutboxMessage.objects.filter(destination=LATE, session_id=session.id)
    assert inside.exists() == (signal is signals.control_message_sent)


def test_dispatcher_is_woken_although_events_cannot_be_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the commit, the query for the stored rows fails, so their events cannot be
    sent. The dispatcher still wakes up."""
    woken = list[int]()

    def refuse(execute: Any, sql: str, *given: Any) -> Any:
        if sql.startswith("SELECT") and not connection.in_atomic_block:
            raise DatabaseError("the disk is full")
        return execute(sql, *given)

    def wake(ids: list[int], **_: Any) -> None:
        woken.extend(ids)

    signals.messages_committed.connect(wake)
    try:
        with (
            caplog.at_level(logging.INFO),
            connection.execute_wrapper(refuse),
            transaction.atomic(),
        ):
            send_message(LATE, None)
    finally:
        signals.messages_committed.disconnect(wake)
    assert woken == [OutboxMessage.objects.get().pk]
    assert "Error calling django_txmsg.outbox in on_commit()" in caplog.text


@pytest.mark.parametrize("key", KEYS)
def test_hooks_of_a_session_send_in_their_own_transactions(key: str | None) -> None:
    def hook() -> None:
        send_late(key)
        with outbox_session():
            send_message(LATE, None, key=key)
            transaction.on_commit(lambda: send_late(key))

    with outbox_session():
        transaction.on_commit(hook)
        send_message("tests.next", None)
        with outbox_session(), transaction.atomic():
            transaction.on_commit(hook)
    assert late() == 6
