"""Tasks that are sent through brokers that run as a server."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import override_settings

from django_txmsg.models import DeadLetter
from django_txmsg.stages import find
from tests.app import jobs
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, running, ship, txmsg
from tests.services.stomp_server import StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]


@pytest.mark.parametrize("mode", ["outbox", "none"])
@pytest.mark.parametrize("broker", ["activemq", "rabbitmq"])
def test_tasks_succeed_are_retried_and_die_on_a_server(
    broker: str, mode: str, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    # A queue's name is anything; the server must not have met its destination before.
    alias = f"on-{broker}-{mode}"
    backend: dict[str, Any] = {
        "BACKEND": "django_txmsg.tasks_backend.TransactionalBackend",
        "QUEUES": [],
        "OPTIONS": {"TRANSACTION": mode, "MAX_REDELIVERIES": 1},
    }
    settings = {"default": backend, alias: backend}
    url = {"default": {"URL": server.url()}}
    with txmsg(BROKERS=url), override_settings(TASKS=settings):
        (stage,) = find([f"tests.tasks.{alias}"])
        note = jobs.note.using(backend=alias, queue_name="Straße: 7\n")
        results = [
            note.enqueue("ü"),
            jobs.fail_until.using(backend=alias).enqueue(2, "again"),
            jobs.fail.using(backend=alias).enqueue(),
        ]
        ship()

        def done() -> bool:
            for one in results:
                one.refresh()
            return all(one.is_finished for one in results)

        with running(stage):
            wait_until(done, deadline=60.0)

        assert [one.status for one in results] == ["SUCCESSFUL"] * 2 + ["FAILED"]
        assert results[0].return_value == "ü"
        assert results[0].task.queue_name == note.queue_name
        assert [one.attempts for one in results] == [1, 2, 2]
        assert Effect.objects.filter(name="ü").count() == 1
        assert DeadLetter.objects.count() == 1
