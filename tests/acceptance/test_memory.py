"""Large messages in real relay and consumer processes: how much memory they use."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import transaction

from django_txmsg import stages
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_messages
from tests.faults import ManageProcess
from tests.running import IMPATIENT, committing, txmsg

pytestmark = committing

Manage = Callable[..., ManageProcess]

COUNT = 16
BYTES = 15 * 1000 * 1000
#: MiB. A relay of `database://` was measured with 208, all others with less.
ENOUGH = 256
#: Of the consumer.
THREADS = 4


def say_the_peak() -> None:
    """Declare a stage, and print the peak memory of the process when it exits."""
    stages.stage(os.environ["LARGE"], concurrency=THREADS)(lambda _: None)
    atexit.register(_say)


def _say() -> None:
    print(Path("/proc/self/status").read_text(), flush=True)  # noqa: T201 - read below


def peak(process: ManageProcess) -> float:
    """Return the peak memory of a process in MiB. (getrusage() would include the memory
    that the parent had at the fork.)"""
    found = re.search(r"VmHWM:\s+(\d+) kB", process.output)
    assert found is not None, process.output
    return int(found[1]) / 1024


def store(destination: str) -> None:
    for number in range(COUNT):
        with transaction.atomic():
            body = os.urandom(1) * (BYTES - 2) + b"%02d" % number
            send_messages([{"destination": destination, "body": body}])


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "broker",
    ["embedded", "activemq", "rabbitmq", "rabbitmq_amqp"],
)
def test_large_messages_pass_through_little_memory(
    broker: str, manage: Manage, destination: str, request: pytest.FixtureRequest
) -> None:
    settings = dict(IMPATIENT)
    if broker != "embedded":
        url = request.getfixturevalue(broker).url()
        settings["BROKERS"] = {"default": {"URL": url}}

    def once(*words: str) -> ManageProcess:
        hook = f"{__name__}.say_the_peak"
        process = manage(
            *words, "--once", txmsg=settings, hook=hook, env={"LARGE": destination}
        )
        process.succeed(deadline=150)
        return process

    with txmsg():
        store(destination)
        relay = once("relay")
        assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
        consumer = once("consume", destination)
        assert InboxMessage.objects.filter(processed_at__isnull=False).count() == COUNT
    assert peak(relay) < ENOUGH
    assert peak(consumer) < ENOUGH
