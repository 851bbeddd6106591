"""Pages for operators in the project's Django admin. Django's autodiscover imports this
package."""

from __future__ import annotations

from django.apps import apps

# Each registers its models.
from . import (  # noqa: F401
    audit,
    bulk,
    dead_letters,
    inbox,
    lists,
    outbox,
    runs,
    stages,
)

if apps.is_installed("django_txmsg.spark"):
    from . import pipeline  # noqa: F401 - its models are that app's
