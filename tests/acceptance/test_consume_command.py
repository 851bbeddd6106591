"""`manage.py consume` and `relay` as an operator uses them: with `--once`, stopped by a
signal, and with an unknown stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.db import transaction

from django_txmsg.models import InboxMessage, OutboxMessage, Worker
from django_txmsg.sending.outbox import send_messages
from tests import services
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import Proxy, wait_until
from tests.running import IMPATIENT, committing, put, txmsg

pytestmark = committing


def consumer(destination: str) -> dict[str, object]:
    """Return the options that start a consumer of `destination`."""
    stage = {"destination": destination, "batch": 1}
    return {
        "hook": "tests.acceptance.test_kill_servers.declare",
        "txmsg": IMPATIENT,
        "env": {"BUSY_STAGE": json.dumps(stage)},
    }


def test_relay_and_consume_once_end_by_themselves(
    manage: Manage, destination: str
) -> None:
    with txmsg(), transaction.atomic():
        send_messages({"destination": destination, "body": n} for n in range(10))
    assert "Dispatched 10" in manage("relay", "--once", txmsg=IMPATIENT).succeed()
    assert OutboxMessage.objects.filter(dispatched_at__isnull=False).count() == 10
    said = manage("consume", "--once", destination, **consumer(destination)).succeed()
    assert "Handled 10" in said
    assert Effect.objects.count() == 10
    assert not Worker.objects.exists()


def test_once_waits_for_a_broker_that_is_slow_to_answer(
    manage: Manage, destination: str, activemq: services.ActiveMQ
) -> None:
    """A consumer that is still connecting is not idle. It counts as idle only after it
    has connected and has received nothing."""
    with (
        txmsg(BROKERS={"default": {"URL": activemq.url()}}),
        Proxy(activemq.port) as proxy,
    ):
        put(destination)
        proxy.delay(0.5)
        options = consumer(destination)
        brokers = {"default": {"URL": activemq.url(port=proxy.port)}}
        options["txmsg"] = {**IMPATIENT, "BROKERS": brokers}
        manage("consume", "--once", destination, **options).succeed()
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("command", ["relay", "consume"])
def test_once_with_a_broker_that_is_down_says_so_and_fails(
    command: str, manage: Manage, destination: str
) -> None:
    with txmsg(), transaction.atomic():
        send_messages([{"destination": destination, "body": 1}])
    options = consumer(destination)
    dead = {"default": {"URL": "stomp://127.0.0.1:1"}}
    options["txmsg"] = {**IMPATIENT, "BROKERS": dead}
    names = [destination] if command == "consume" else []
    process = manage(command, "--once", *names, **options)
    assert process.wait() == 1
    assert "127.0.0.1" in process.output


@pytest.mark.parametrize("signal", ["terminate", "interrupt"])
def test_the_first_signal_finishes_and_the_second_ends(
    signal: str, manage: Manage, destination: str, tmp_path: Path
) -> None:
    with txmsg():
        for _ in range(3):
            put(destination)
    declared = [
        {
            "destination": destination,
            "name": destination,
            "transaction": "outbox",
            "next": "tests.next",
        }
    ]

    def start(go: str) -> object:
        process = manage(
            *("consume", destination),
            hook="tests.acceptance.crash_points.consumer",
            txmsg=IMPATIENT,
            env={
                "CRASH_STAGES": json.dumps(declared),
                "CRASH_POINT": "recorded",
                "CRASH_GO": str(tmp_path / go),
            },
        )
        process.wait_for_line("at recorded")
        getattr(process, signal)()
        process.wait_for_line("Stopping")
        return process

    polite = start("go")
    (tmp_path / "go").touch()
    polite.succeed()  # type: ignore[attr-defined]
    assert Effect.objects.count() == 1
    assert InboxMessage.objects.count() == 1
    hasty = start("never")
    getattr(hasty, signal)()
    assert hasty.wait() != 0  # type: ignore[attr-defined]
    assert Effect.objects.count() == 1


def test_an_unknown_stage_is_refused_by_name(manage: Manage) -> None:
    process = manage("consume", "no.such.stage", txmsg=IMPATIENT)
    assert process.wait() == 1
    assert "no.such.stage" in process.output


def test_an_idle_worker_stops_at_once(manage: Manage, destination: str) -> None:
    worker = manage("consume", destination, **consumer(destination))
    wait_until(Worker.objects.exists)
    worker.terminate()
    worker.succeed(deadline=15)
    assert not Worker.objects.exists()
