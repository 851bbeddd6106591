"""Control groups under any order of events: committed messages are always dispatched.

Here no process dispatches messages after its commit, as if each process died right
then. So messages are dispatched only because of control messages.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_txmsg import send_message
from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Delivery, Session
from django_txmsg.conf import get
from django_txmsg.http_outbox import control_receive
from django_txmsg.http_outbox.session import OutboxSession
from django_txmsg.models import OutboxMessage
from django_txmsg.relaying.lane import Lane
from tests.faults import wait_until

from .conftest import wait_for_the_database
from .test_control_groups import SPARE, WINDOW, grouped, proxy, settings_for

__all__ = ["grouped", "proxy", "settings_for"]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.postgresql,
]


class Requests:
    """A thread that handles one request after another, on its own connection."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.session: OutboxSession | None = None

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(work, *arguments).result(60)

    def begin(self) -> None:
        def begin() -> OutboxSession:
            session = OutboxSession()  # of this thread's connection
            session.begin()
            return session

        self.session = self.do(begin)

    def end(self, how: str) -> None:
        session, self.session = self.session, None
        self.do(getattr(session, how))

    def kill(self) -> None:
        """Close the connection in the middle of a request, as if the process had
        died."""

        def die() -> None:
            connection.connection and connection.connection.close()
            with contextlib.suppress(Exception):
                assert self.session is not None
                self.session.rollback()
            connection.close()

        self.do(die)
        self.session = None

    def close(self) -> None:
        if self.session is not None:
            self.kill()
        self.do(connections.close_all)
        self._pool.shutdown()


def send(key: str) -> None:
    send_message("groups.machine", {}, key=key or None)


def send_and_regret(key: str) -> None:
    with contextlib.suppress(RuntimeError), transaction.atomic():
        send(key)
        raise RuntimeError


def dispatch(using: str, session_id: Any) -> None:
    lane = Lane(using, "default")
    try:
        while lane.dispatch(session_id=session_id):
            pass
    finally:
        lane.close()


#: What a long request does: sends with a key or without, regrets it, or takes time.
STEPS = ["keyed", "pass", "regret", "send"]


class Groups(RuleBasedStateMachine):
    """The state machine. Hypothesis lets long and short requests, a receiver and the
    clock act in any order."""

    def __init__(self) -> None:
        super().__init__()
        OutboxMessage.objects.all().delete()
        self.actors = [Requests() for _ in range(3)]
        self.receiver: Session | None = None
        self.in_hand: list[Delivery] = []

    @rule(
        which=st.integers(0, 1),
        beside=st.booleans(),
        steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4),
        end=st.sampled_from(["commit", "wait, commit", "rollback", "kill", ""]),
    )
    def request(self, which: int, beside: bool, steps: list[str], end: str) -> None:
        """Let a long request perform `steps`. Then end the long request in the way that
        `end` names. If `end` is "", the long request stays open, and a later call may
        continue it. With `beside`, handle a short request first: the long request may
        then join the control group of the short request."""
        actor = self.actors[which]
        if beside:
            self.store()
        for step in steps:
            if step == "pass":
                self.pass_time(WINDOW + SPARE + 0.3)
                continue
            if actor.session is None:
                actor.begin()
            # With a key it is inserted at once; without, before the commit.
            key = "" if step == "send" else str(which)
            actor.do(send_and_regret if step == "regret" else send, key)
        if actor.session is None:
            return
        if end == "kill":
            actor.kill()
        elif end:
            if end == "wait, commit":
                self.pass_time(WINDOW + SPARE + 0.3)
            actor.end(end.removeprefix("wait, "))

    def store(self) -> None:
        """Handle a short request. The request opens a control group, unless one is
        open."""
        short = self.actors[2]
        short.begin()
        short.do(send, "")
        short.end("commit")

    @rule(seconds=st.sampled_from([WINDOW / 2, WINDOW]))
    def pass_time(self, seconds: float) -> None:
        """Wait `seconds`, as if the processes were suspended. The receiver checks its
        messages before and after."""
        self.look()
        wait_for_the_database(seconds)
        self.look()

    @rule()
    def look(self) -> None:
        """Let the receiver take the waiting control messages, and check each message
        once."""
        if self.receiver is None:
            self.receiver = get_broker().open()
            name = f"{get().SERVICE}.txmsg.control"
            self.receiver.subscribe(name, prefetch=100)
        while (delivery := self.receiver.receive(0.1)) is not None:
            self.in_hand.append(delivery)
        for delivery in list(self.in_hand):
            with contextlib.suppress(control_receive.LookAgain):
                control_receive.handle(delivery, dispatch, threading.Event())
                self.receiver.ack([delivery])
                self.in_hand.remove(delivery)

    @precondition(lambda self: self.receiver is not None)
    @rule()
    def kill_the_receiver(self) -> None:
        """Kill the receiver. Its messages are delivered again."""
        assert self.receiver is not None
        self.receiver.close()
        self.receiver, self.in_hand = None, []

    def teardown(self) -> None:
        for actor in self.actors:
            actor.close()

        def settled() -> bool:
            self.look()
            return not self.in_hand

        wait_until(settled, deadline=60)
        # Once more: nothing is on its way to us.
        self.look()
        if self.receiver is not None:
            self.receiver.close()
        left = OutboxMessage.objects.filter(dispatched_at=None)
        assert not left.exists(), f"{left.count()} committed, and nobody looks after"


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Groups,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            # Each example takes seconds: what fails is shown, and not made smaller.
            phases=[Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.usefixtures("grouped")
def test_what_was_committed_leaves() -> None:
    run(examples=4, steps=5)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("grouped")
def test_what_was_committed_leaves_whatever_the_order() -> None:
    run(examples=60, steps=8)
