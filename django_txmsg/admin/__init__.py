"""The operator's pages in the project's own admin; Django's autodiscover imports us."""

from __future__ import annotations

from . import (
    bulk,
    dead_letters,
    idempotency,
    inbox,
    outbox,
    pipeline,
    stages,
    workers,
)

__all__ = [
    "bulk",
    "dead_letters",
    "idempotency",
    "inbox",
    "outbox",
    "pipeline",
    "stages",
    "workers",
]
