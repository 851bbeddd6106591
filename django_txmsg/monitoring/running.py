"""The messages that handlers were processing at the last heartbeat of their process."""

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
    """A message that a handler was processing."""

    worker: Worker
    thread: str
    stage: str
    message_id: uuid.UUID
    attempt: int
    since: dt.datetime


def as_json() -> list[dict[str, Any]]:
    """Return what runs in this process, for the worker's row. With the heartbeat, the
    seconds show when a handler began, by the database's clock."""
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
    """Return what these processes were running, the longest first. Entries that other
    code has written, and that are unreadable here, are left out."""
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
