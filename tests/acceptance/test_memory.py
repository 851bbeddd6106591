"""How much memory a relay of large messages uses, in a real process."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import transaction

from django_txmsg.models import OutboxMessage
from django_txmsg.sending.outbox import send_messages
from tests.faults import ManageProcess
from tests.running import IMPATIENT, committing, txmsg

pytestmark = committing

Manage = Callable[..., ManageProcess]

COUNT = 16
BYTES = 15 * 1000 * 1000
#: What it has to do with, in MiB.
ENOUGH = 320
DESTINATION = "tests.large"


def say_the_peak() -> None:
    """A hook for a process: print the most memory that it had, at its end."""
    atexit.register(_say)


def _say() -> None:
    print(Path("/proc/self/status").read_text(), flush=True)  # noqa: T201 - read below


def peak(process: ManageProcess) -> float:
    """Return MiB. Not from getrusage(), which includes the parent's memory at the
    fork."""
    found = re.search(r"VmHWM:\s+(\d+) kB", process.output)
    assert found is not None, process.output
    return int(found[1]) / 1024


def store() -> None:
    for number in range(COUNT):
        with transaction.atomic():
            body = os.urandom(1) * (BYTES - 2) + b"%02d" % number
            send_messages([{"destination": DESTINATION, "body": body}])


@pytest.mark.timeout(400)
def test_large_messages_pass_through_little_memory(manage: Manage) -> None:
    with txmsg():
        store()
        relay = manage(
            "relay",
            "--once",
            txmsg=dict(IMPATIENT),
            hook=f"{__name__}.say_the_peak",
        )
        relay.succeed(deadline=150)
        assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert peak(relay) < ENOUGH
