"""The handlers that run in this process now, one for each thread. Heartbeats report
them."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Running:
    """A handler that is processing a message."""

    thread: str
    stage: str
    message_id: uuid.UUID
    attempt: int
    since: float
    """An instant of `time.monotonic()`."""


@contextmanager
def running(stage: str, message_id: uuid.UUID, attempt: int) -> Iterator[None]:
    """Record, for the duration of the block, that this thread runs a handler."""
    thread = threading.current_thread()
    ident, since = threading.get_ident(), time.monotonic()
    _running[ident] = Running(thread.name, stage, message_id, attempt, since)
    try:
        yield
    finally:
        _running.pop(ident, None)


def now_running() -> list[Running]:
    """Return the handlers that run now, the longest first."""
    found = list(_running.values())
    return sorted(found, key=lambda one: one.since)


_running: dict[int, Running] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
