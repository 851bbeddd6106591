"""What a OnceTask that runs in this context has left to be sent after its end."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from ..brokers.celery.publication import Publication


@dataclass
class Run:
    """One execution: `later` goes to the broker when its transaction has ended. Once it
    has `ended`, so does whatever is called."""

    later: list[Publication] = field(default_factory=list)
    ended: bool = False


_run: ContextVar[Run | None] = ContextVar("django_txmsg_celery_run", default=None)


def current_run() -> Run | None:
    """Return the run that is open in this context."""
    return _run.get()


def enter(run: Run | None) -> None:
    """Make `run` the one that is open, or none."""
    _run.set(run)
