"""Pages for operators in the project's Django admin. Django's autodiscover imports this
package."""

from __future__ import annotations

from django.apps import apps

# Each registers its models.
from . import (  # noqa: F401
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

if apps.is_installed("django_txmsg.spark"):
    from . import findings, pipeline  # noqa: F401 - their models are that app's
