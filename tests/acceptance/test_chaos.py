"""Orders are placed while processes and servers are killed or fail, on each broker,
behind PgBouncer.

`make soak` tests the brokers one after the other, for one hour in total or for
TXMSG_SOAK_SECONDS. `make test` only restarts and suspends the pooler, for some seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.acceptance import chaos
from tests.acceptance.chaos import Chaos, Manage
from tests.services import PgBouncer, PostgreSQL, Server
from tests.services.stomp_server import StompServer

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.postgresql,
]

BROKERS = ["activemq", "rabbitmq", "embedded"]
#: Seconds of the soak, over all brokers.
SOAK = float(os.environ.get("TXMSG_SOAK_SECONDS", 3600))


@pytest.fixture
def run(
    manage: Manage,
    tmp_path: Path,
    destination: str,
    postgres: PostgreSQL,
    pgbouncer: PgBouncer,
) -> object:
    """Return a function that prepares a chaos run on a broker. Pass None to that
    function to use the embedded broker."""

    def make(broker: StompServer | None) -> Chaos:
        return Chaos(manage, tmp_path, destination, postgres, pgbouncer, broker)

    return make


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "broker", ["activemq", pytest.param("embedded", marks=pytest.mark.matrix)]
)
def test_everything_works_through_a_pooler_that_comes_and_goes(
    broker: str, run, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    play(run(_server(broker, request)), 12.0, chaos.POOLER, 2.0, capsys)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_everything_works_through_refusals(
    run, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [*chaos.REFUSALS, chaos.Chaos.disk_full]
    play(run(_server("rabbitmq", request)), 0.0, faults, 1.0, capsys)


@pytest.mark.soak
@pytest.mark.timeout(SOAK + 600)
@pytest.mark.parametrize("broker", BROKERS)
def test_orders_happen_once_whatever_is_killed(
    broker: str, run, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [*chaos.PROCESSES, *chaos.DATABASE, *chaos.BROKER]
    faults += chaos.REFUSALS if broker == "rabbitmq" else []
    seconds = SOAK / len(BROKERS)
    play(run(_server(broker, request)), seconds, faults, 2.0, capsys)


def play(
    chaos: Chaos,
    seconds: float,
    faults: list[object],
    pause: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = chaos.run(seconds, faults, pause)
    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201 - what a soak is for
    assert report.placed > 0, chaos.told()
    wrong = [*report.lost, *report.doubled, *report.stuck, *report.dead]
    assert report.clean, "\n".join([str(report), *wrong, chaos.told()])


def _server(broker: str, request: pytest.FixtureRequest) -> Server | None:
    return None if broker == "embedded" else request.getfixturevalue(broker)
