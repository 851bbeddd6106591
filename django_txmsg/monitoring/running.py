"""The messages that handlers were processing at the last heartbeats."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..models import Worker
from ..runtime import handlers

#: Most messages that a process writes into its row: those that have run longest.
MOST = 100


@dataclass(frozen=True)
class Known:
    """A message that a handler was processing at the last heartbeat of its worker."""

    worker: Worker
    thread: str
    stage: str
    message_id: uuid.UUID
    attempt: int
    since: dt.datetime


def as_json() -> list[dict[str, Any]]:
    """Return the messages that handlers of this process are processing, as JSON for the
    worker's row. Each has its duration so far, in seconds.

    The time of the heartbeat comes from the database's clock. To get a start time, the
    reader subtracts the duration from the time of the heartbeat.
    """
    now = time.monotonic()
    return [
        {
            "thread": one.thread,
            "stage": one.stage,
            "message": str(one.message_id),
            "attempt": one.attempt,
            "seconds": round(now - one.since, 1),
        }
        for one in handlers.now_running()[:MOST]
    ]


def read(workers: Iterable[Worker]) -> list[Known]:
    """Return the messages that these processes were processing, longest first. Entries
    that cannot be read, because another version of the code has written them, are
    omitted."""
    found = []
    for worker in workers:
        for given in worker.running if isinstance(worker.running, list) else ():
            try:
                since = worker.heartbeat_at - dt.timedelta(seconds=given["seconds"])
                thread, stage = str(given["thread"]), str(given["stage"])
                message_id, attempt = uuid.UUID(given["message"]), int(given["attempt"])
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue
            found.append(Known(worker, thread, stage, message_id, attempt, since))
    return sorted(found, key=lambda one: one.since)
