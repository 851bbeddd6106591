"""Causes every fault at every step of every transaction mode, and checks the result.

The table in `docs/explanation/failures.md` is generated from the expectations here:

    python -m tests.acceptance.failure_table

`make test` runs a sample. `make test-matrix` runs more cases, and `make soak` runs the
rest.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.acceptance import crash_play, failure_table
from tests.acceptance.crash_play import Manage, Play
from tests.acceptance.failure_table import STEPS, Outcome
from tests.running import committing
from tests.services.stomp_server import StompServer

#: What `make test` plays: each mode, and three of four faults.
SAMPLE = {
    ("outbox", "database backend terminated", "activemq"),
    ("broker_only", "kill -9 of the worker", "activemq"),
    ("best_effort_1pc", "connection to the broker cut", "activemq"),
}
#: With these, `make test-matrix` plays each fault and each broker at least once.
FURTHER = {
    ("best_effort_1pc", "broker killed", "activemq"),
    ("best_effort_1pc", "broker killed", "rabbitmq_amqp"),
    ("best_effort_1pc", "kill -9 of the worker", "rabbitmq"),
}


def marks(case: tuple[str, str, str]) -> list[pytest.MarkDecorator]:
    """Return the markers by which the `make` commands select a case."""
    if case in SAMPLE:
        return []
    return [pytest.mark.matrix if case in FURTHER else pytest.mark.soak]


def play(
    mode: str, fault: str, manage: Manage, directory: Path, broker: StompServer
) -> dict[str, Outcome]:
    """Cause `fault` at every step of `mode`, and return the outcomes by step."""
    scene = Play(mode, broker.url(), manage, directory, uuid.uuid4().hex[:8])
    if fault == "kill -9 of the worker":
        return crash_play.killed_worker(scene)
    if fault == "connection to the broker cut":
        return crash_play.cut_connection(scene, broker)
    if fault == "broker killed":
        return crash_play.killed_broker(scene, broker)
    return crash_play.terminated_backends(scene)


def test_the_docs_show_what_is_expected_here() -> None:
    assert failure_table.PAGE.read_text() == failure_table.page()


# On PostgreSQL, because SQLite has one writer: if it is stopped, all others wait.
@committing
@pytest.mark.postgresql
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "fault", "broker"),
    [
        pytest.param(*one, marks=marks(one))
        for mode in STEPS
        for fault in failure_table.FAULTS
        for broker in ("activemq", "rabbitmq", "rabbitmq_amqp")
        for one in [(mode, fault, broker)]
    ],
)
def test_fault_at_each_step_ends_as_the_table_says(
    mode: str,
    fault: str,
    broker: str,
    manage: Manage,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    seen = play(mode, fault, manage, tmp_path, request.getfixturevalue(broker))
    assert list(seen) == STEPS[mode]
    expected = {
        step: failure_table.expected(mode, fault, step, broker) for step in seen
    }
    wrong = {
        step: outcome for step, outcome in seen.items() if outcome not in expected[step]
    }
    assert not wrong, f"expected {[expected[step] for step in wrong]}"
