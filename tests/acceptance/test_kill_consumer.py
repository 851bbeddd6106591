"""A consumer is killed at each step of mode "outbox". No message is lost, and no effect
happens twice."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.acceptance.crash_play import Manage, Play, killed_worker
from tests.acceptance.failure_table import Outcome
from tests.running import committing
from tests.services.stomp_server import StompServer

pytestmark = committing

ONCE = Outcome(effects=1, sent=1, copies=1)


@pytest.mark.matrix
def test_killed_consumer_has_one_effect_on_the_embedded_broker(
    manage: Manage, tmp_path: Path
) -> None:
    url = "database://?poll=0.01&lease=2"
    play = Play("outbox", url, manage, tmp_path, uuid.uuid4().hex[:8])
    assert killed_worker(play) == dict.fromkeys(play.stages, ONCE)


@pytest.mark.parametrize(
    "broker",
    [
        "activemq",
        pytest.param("rabbitmq", marks=pytest.mark.soak),
        pytest.param("rabbitmq_amqp", marks=pytest.mark.soak),
    ],
)
def test_killed_consumer_has_one_effect_on_a_server(
    broker: str, manage: Manage, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    play = Play("outbox", server.url(), manage, tmp_path, uuid.uuid4().hex[:8])
    assert killed_worker(play) == dict.fromkeys(play.stages, ONCE)
