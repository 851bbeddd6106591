"""SIGTERM in every state of every thread: the process soon exits with 0, and nothing is
lost.

The states are in `stop_states.py`. The next process processes the unfinished messages
once.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from django.db import connections

from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage, Worker
from django_txmsg.models.queue import QueueMessage
from tests.acceptance import stop_states as states
from tests.acceptance.stop_states import Manage, World
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, declared, running, ship, txmsg

pytestmark = committing

State = Callable[[World, str], AbstractContextManager[None]]

#: Seconds from the signal to the end: the processes' patience, and a busy machine.
GRACE = 12.0

ON_SQLITE = [
    states.broker_is_silent,
    states.broker_keeps_its_answers,
    states.broker_refuses,
    states.host_drops_packets,
]
CONSUME = [
    states.in_blocking_redelivery,
    states.in_bulk,
    states.in_the_handler,
    states.in_the_handler_of_1pc,
    states.in_the_handler_of_a_batch,
    states.looks_again,
    states.throttled,
    states.with_parked_messages,
]
ON_POSTGRESQL = [
    states.database_is_silent,
    states.database_refuses,
    states.waits_for_a_lock,
]
#: Where both halves of one process have to end.
RUN = [
    states.broker_is_silent,
    states.database_is_silent,
    states.waits_for_a_lock,
]
#: What is the same on every database is tried on one.
MARKS = [
    *((state, pytest.mark.sqlite) for state in ON_SQLITE),
    *((state, pytest.mark.postgresql) for state in ON_POSTGRESQL),
    (states.idle, pytest.mark.database),
]


def _table() -> Iterator[object]:
    for state, marks in MARKS:
        for command in ("relay", "consume", *(["run"] if state in RUN else [])):
            name = f"{command}-{state.__name__}"
            # Both halves end in one process too, which has two reasons to wait.
            more = [pytest.mark.matrix] if state in RUN and command != "run" else []
            yield pytest.param(state, command, id=name, marks=[marks, *more])
    for state in CONSUME:
        yield pytest.param(state, "consume", id=f"consume-{state.__name__}")
    yield pytest.param(states.in_the_handler, "run", id="run-in_the_handler")


@pytest.fixture
def world(
    request: pytest.FixtureRequest, manage: Manage, tmp_path: Path, destination: str
) -> Iterator[World]:
    """The process under test, with its messages and its broker. The process is not
    started yet."""
    with ExitStack() as stack:
        made = World(manage, tmp_path, destination, stack)
        if "TXMSG_TEST_DATABASE_URL" in os.environ:
            made.postgres = request.getfixturevalue("postgres")
        if request.node.callspec.params.get("state") is states.broker_keeps_its_answers:
            made.activemq = request.getfixturevalue("activemq")
        yield made


@pytest.mark.parametrize(("state", "command"), list(_table()))
def test_a_stop_ends_the_process_and_loses_nothing(
    state: State, command: str, world: World
) -> None:
    with state(world, command):
        began = time.monotonic()
        world.process.terminate()
        assert world.process.wait(deadline=60) == 0, world.process.output
        took = time.monotonic() - began
    assert took < GRACE, f"{took:.1f} s:\n{world.process.output}"
    everything_happens_once(world)


@pytest.mark.parametrize("command", ["relay", "consume"])
def test_a_worker_that_was_stopped_says_so(command: str, world: World) -> None:
    with states.idle(world, command):
        wait_until(Worker.objects.exists)
        world.process.terminate()
        world.process.succeed()
    assert not Worker.objects.exists()


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, "consume"),
        (signal.SIGINT, "consume"),
        (signal.SIGTERM, "run"),
    ],
)
def test_a_second_signal_stops_at_once(
    number: signal.Signals, command: str, world: World
) -> None:
    """On SQLite, the handler holds a lock for which the heartbeat in the main thread
    waits. A second signal still stops the process immediately."""
    world.script["hold_at"] = 2
    world.dispatch()
    world.start(command, CONSUME={"POLL_INTERVAL": 0.05, "HEARTBEAT": 0.05})
    world.waiting("in the handler")
    world.process.process.send_signal(number)
    world.waiting("Stopping")
    assert world.process.running
    world.process.process.send_signal(number)
    assert world.process.wait(deadline=10) == 128 + number
    everything_happens_once(world)


@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
@pytest.mark.parametrize("command", ["relay", "consume"])
def test_signals_end_a_process_whose_main_thread_hangs(
    signals: int, code: int, command: str, world: World
) -> None:
    with states.idle(world, command):
        wait_until(Worker.objects.exists)
        world.process.process.send_signal(signal.SIGUSR1)
        world.waiting("the main thread hangs")
        world.process.terminate()
        world.waiting("Stopping")
        if signals == 2:
            world.process.terminate()
        assert world.process.wait(deadline=GRACE) == code, world.process.output
        assert ("without an answer" in world.process.output) == (signals == 1)


@pytest.mark.parametrize("command", ["consume", "run"])
def test_a_handler_may_terminate_a_process_that_it_forked(
    command: str, world: World
) -> None:
    """The signal ends the child, and does not stop the worker."""
    world.script["fork_at"] = 2
    world.dispatch()
    world.start(command)
    world.waiting(f"the child ended: {-signal.SIGTERM}")
    wait_until(lambda: not QueueMessage.objects.exists())
    assert world.process.running
    assert "Stopping" not in world.process.output
    world.process.terminate()
    world.process.succeed()
    everything_happens_once(world)


def everything_happens_once(world: World) -> None:
    """Process the remaining messages in this process, and check that each message had
    one effect."""
    connections.close_all()

    def effect(message: Message) -> None:
        Effect.objects.create(name=world.destination, message_id=str(message.id))

    options = world.script.get("options", {})
    with (
        txmsg(**world.settings()),
        declared(effect, world.destination, **options) as stage,
        running(stage),
    ):

        def all_happened() -> bool:
            ship()
            return (
                Effect.objects.count() >= world.stored
                and not QueueMessage.objects.exists()
            )

        wait_until(all_happened, deadline=60, message=lambda: _count(world))
    effects = Counter(Effect.objects.values_list("message_id", flat=True))
    assert len(effects) == world.stored, _count(world)
    assert set(effects.values()) == {1}, effects
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert not InboxMessage.objects.filter(processed_at=None).exists()
    assert not DeadLetter.objects.exists()


def _count(world: World) -> str:
    return (
        f"stored {world.stored}, effects {Effect.objects.count()}, "
        f"outbox {OutboxMessage.objects.filter(dispatched_at=None).count()}, "
        f"queue {list(QueueMessage.objects.values_list('queue', 'deliveries'))}, "
        f"dead {list(DeadLetter.objects.values_list('reason', 'exception'))}\n"
        f"{world.process.output}"
    )
