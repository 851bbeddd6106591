"""A handler may raise an exception whose text cannot be read. The message then fails as
with any other exception: its policy decides whether it is redelivered or buried."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.test import override_settings

from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.stages import find
from django_txmsg.tasks_backend.framework import TaskResultStatus
from django_txmsg.testing import drain
from tests.app import jobs
from tests.app.models import Effect
from tests.faults import wait_until
from tests.hostile_errors import HOSTILE, misspelt
from tests.running import committing, declared, put, running, ship, txmsg

pytestmark = committing

REFUSED = RedeliveryPolicy(refuse_on=(LookupError, ValidationError))
ONCE = RedeliveryPolicy(max_redeliveries=0)
TWICE = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)


def run(
    error: Any, policy: RedeliveryPolicy, batch: int = 1, mode: Any = "outbox"
) -> DeadLetter:
    """Process three messages, of which the second fails. Return its dead letter."""

    def handler(message: Message) -> None:
        Effect.objects.create(name=str(message.body), message_id=str(message.id))
        if message.body == 2:
            raise error()

    with (
        txmsg(),
        declared(handler, redelivery=policy, batch=batch, transaction=mode) as stage,
    ):
        for body in (b"1", b"2", b"3"):
            put(stage.destination, body)
        with running(stage):
            wait_until(DeadLetter.objects.exists)
            wait_until(lambda: not QueueMessage.objects.exists())
    assert set(Effect.objects.values_list("name", flat=True)) == {"1", "3"}
    letter: DeadLetter = DeadLetter.objects.get()
    return letter


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("batch", [1, 3])
def test_unreadable_exception_obeys_refuse_on(kind: str, batch: int) -> None:
    letter = run(HOSTILE[kind][0], REFUSED, batch)
    assert (letter.reason, letter.attempts) == ("refused", 1)
    assert letter.exception.endswith(HOSTILE[kind][1])


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc"])
def test_unreadable_exception_counts_attempts(kind: str, mode: Any) -> None:
    letter = run(HOSTILE[kind][0], TWICE, mode=mode)
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 2)
    kept = Attempt.objects.values_list("exception", flat=True)
    assert [one.endswith(HOSTILE[kind][1]) for one in kept] == [True] * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_djangos_own_error_with_a_misspelt_parameter_is_one_attempt(batch: int) -> None:
    letter = run(misspelt, ONCE, batch)
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 1)
    assert letter.exception.endswith("ValidationError: <str() raised KeyError>")


@pytest.mark.parametrize("mode", ["outbox", "none"])
def test_task_that_raises_an_unreadable_exception_fails(mode: str) -> None:
    backend = "django_txmsg.tasks_backend.TransactionalBackend"
    options = {"TRANSACTION": mode}
    given = {"default": {"BACKEND": backend, "OPTIONS": options}}
    with txmsg(), override_settings(TASKS=given):
        result = jobs.fail_without_text.enqueue()
        drain(raises=False)
        result.refresh()
    assert result.status == TaskResultStatus.FAILED
    (error,) = result.errors
    assert error.exception_class_path == "tests.hostile_errors.SilentError"
    assert InboxMessage.objects.get().attempts == 1


@pytest.mark.parametrize("mode", ["outbox", "none"])
def test_a_task_that_raises_keyboard_interrupt_has_failed(mode: str) -> None:
    backend = "django_txmsg.tasks_backend.TransactionalBackend"
    given = {"default": {"BACKEND": backend, "OPTIONS": {"TRANSACTION": mode}}}
    with txmsg(), override_settings(TASKS=given):
        first, second = jobs.interrupt.enqueue(), jobs.meaning_of_life.enqueue()
        ship()
        (stage,) = find(["tests.tasks.default.default"])
        with running(stage):
            wait_until(DeadLetter.objects.exists)
            wait_until(lambda: not QueueMessage.objects.exists())
        first.refresh()
        second.refresh()
    assert first.status == TaskResultStatus.FAILED
    assert first.errors[0].exception_class is KeyboardInterrupt
    assert second.return_value == 42
