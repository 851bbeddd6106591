"""The operator's pages in the project's own admin; Django's autodiscover imports this
package."""

from __future__ import annotations

from django.apps import apps

from . import (
    alerts,
    audit,
    bulk,
    dead_letters,
    idempotency,
    inbox,
    outbox,
    runs,
    schedule,
    stages,
    workers,
)

__all__ = [
    "alerts",
    "audit",
    "bulk",
    "dead_letters",
    "idempotency",
    "inbox",
    "outbox",
    "runs",
    "schedule",
    "stages",
    "workers",
]

if apps.is_installed("django_txmsg.spark"):
    from . import findings, pipeline  # noqa: F401 - their models are that app's
