"""Messages that the OnceTask running in this context must send after its end."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from ..brokers.celery.publication import Publication


@dataclass
class Run:
    """One execution: `later` is sent to the broker when its transaction has ended. Once
    it has `ended`, further calls are sent at once."""

    later: list[Publication] = field(default_factory=list)
    ended: bool = False


_run: ContextVar[Run | None] = ContextVar("django_txmsg_celery_run", default=None)


def current_run() -> Run | None:
    """Return the execution that is open in this context."""
    return _run.get()


def enter(run: Run | None) -> None:
    """Make `run` the open execution, or none."""
    _run.set(run)
