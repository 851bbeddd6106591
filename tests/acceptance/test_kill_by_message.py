"""A message kills the worker at each attempt, in its handler or while its body is read.
The message is buried after the same number of attempts as a message whose handler
fails."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import DeadLetter, InboxMessage
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import IMPATIENT, committing, put, txmsg

pytestmark = committing

ATTEMPTS = 3
SETTINGS = {
    **IMPATIENT,
    "BROKERS": {"default": {"URL": "database://?poll=0.01&lease=1"}},
}


@dataclass
class Note:
    """A body that kills the worker which reads it, if it is the deadly one."""

    text: str

    def __post_init__(self) -> None:
        if self.text == "deadly":
            print("attempt to read", flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)


def deadly_to_read() -> None:
    """Declare a stage that takes notes."""

    def handler(note: Note, message: Message) -> None:
        Effect.objects.create(name=note.text, message_id=str(message.id))

    options = json.loads(os.environ["DEADLY_STAGE"])
    policy = RedeliveryPolicy(max_redeliveries=ATTEMPTS - 1, initial_delay=0.0)
    stages.stage(options["name"], redelivery=policy, batch=options["batch"])(handler)


def deadly() -> None:
    """Declare a stage whose handler kills the worker if the message is the deadly
    one."""

    def handler(message: Message) -> None:
        if message.body == "deadly":
            print(f"attempt {message.delivery_attempt}", flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)
        Effect.objects.create(name="done", message_id=str(message.id))

    options = json.loads(os.environ["DEADLY_STAGE"])
    attempts = options.get("attempts", ATTEMPTS)
    policy = RedeliveryPolicy(max_redeliveries=attempts - 1, initial_delay=0.0)
    stages.stage(options["name"], redelivery=policy, batch=options["batch"])(handler)


def consume(manage: Manage, hook: str, stage: dict[str, Any]) -> list[str]:
    """Consume, with a new worker for each that dies, until there is a dead letter and
    the four good messages are processed. Returns the attempts that were begun."""
    attempts: list[str] = []
    while not DeadLetter.objects.exists():
        worker = manage(
            *("consume", stage["name"]),
            hook=f"tests.acceptance.test_kill_by_message.{hook}",
            txmsg=SETTINGS,
            env={"DEADLY_STAGE": json.dumps(stage)},
        )
        wait_until(
            lambda worker=worker: not worker.running or DeadLetter.objects.exists(),
            message=lambda worker=worker: worker.output,
        )
        if not worker.running:
            worker.wait()  # for its last line, too
        attempts += [one for one in worker.output.split("\n") if "attempt " in one]
        assert len(attempts) < 10, "it is never buried"
    wait_until(lambda: Effect.objects.count() == 4, message=lambda: worker.output)
    worker.terminate()
    worker.succeed()
    return attempts


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.matrix), 10])
def test_message_that_kills_its_worker_dies_after_the_usual_attempts(
    batch: int, manage: Manage, destination: str
) -> None:
    """The handler of a message kills the worker at each attempt. The message is buried
    after the usual number of attempts, and the other messages of its batch are
    processed. The attempt in a batch is not counted, because it does not show which
    message killed the worker."""
    with txmsg(**SETTINGS):
        first = [put(destination, b'"good"') for _ in range(2)]
        deadly_id = put(destination, b'"deadly"')
        last = [put(destination, b'"good"') for _ in range(2)]
        attempts = consume(manage, "deadly", {"name": destination, "batch": batch})
    alone = [f"attempt {n}" for n in range(1, ATTEMPTS + 1)]
    assert attempts == (alone if batch == 1 else ["attempt 1", *alone])
    letter = DeadLetter.objects.get()
    assert (letter.message_id, letter.reason) == (deadly_id, "worker_lost")
    assert letter.attempts == ATTEMPTS
    rows = InboxMessage.objects.filter(message_id__in=[*first, *last])
    assert rows.filter(processed_at__isnull=False).count() == 4
    assert max(one.attempts for one in rows) == 1


@pytest.mark.parametrize("batch", [1, pytest.param(10, marks=pytest.mark.matrix)])
def test_message_that_kills_its_reader_dies_after_one_attempt_more(
    batch: int, manage: Manage, destination: str
) -> None:
    """The first delivery is counted only after the body is read, so that a good message
    is recorded only once. Every later delivery is counted before that."""
    with txmsg(**SETTINGS):
        for _ in range(2):
            put(destination, b'{"text": "good"}')
        deadly_id = put(destination, b'{"text": "deadly"}')
        for _ in range(2):
            put(destination, b'{"text": "good"}')
        stage = {"name": destination, "batch": batch}
        attempts = consume(manage, "deadly_to_read", stage)
    assert attempts == ["attempt to read"] * (ATTEMPTS + 1)
    letter = DeadLetter.objects.get()
    assert (letter.message_id, letter.reason) == (deadly_id, "worker_lost")
    assert letter.attempts == ATTEMPTS


def test_message_of_one_attempt_survives_death_of_its_batch_worker(
    manage: Manage, destination: str
) -> None:
    """A stage allows only one attempt. The handler of a batch's first message kills the
    worker before the other messages have run. Only the first message is buried; later
    workers process the others."""
    stage = {"name": destination, "batch": 3, "attempts": 1}
    with txmsg(**SETTINGS):
        deadly_id = put(destination, b'"deadly"')
        for _ in range(2):
            put(destination, b'"good"')
        deaths = 0
        while Effect.objects.count() < 2 or not DeadLetter.objects.exists():
            worker = manage(
                *("consume", destination, "--once"),
                hook="tests.acceptance.test_kill_by_message.deadly",
                txmsg=SETTINGS,
                env={"DEADLY_STAGE": json.dumps(stage)},
            )
            deaths += worker.wait() != 0
    assert deaths == 2
    letter = DeadLetter.objects.get()
    assert (letter.message_id, letter.reason) == (deadly_id, "worker_lost")
    assert Effect.objects.count() == 2
