"""Keeps a migration from taking away what running processes use."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models.functions import Now

from ..errors import ConfigurationError

#: How old a living worker's last heartbeat is at most, in the releases that did not
#: write it down.
LIVING = dt.timedelta(seconds=30)
#: The most workers that are named.
NAMED = 5


def refuse_beside_workers(apps: Any, schema_editor: Any) -> None:
    """Raise ConfigurationError while a worker lives in the database.

    For a migration that the other release's processes cannot live with: whoever runs
    before it is applied (or undone) is of that release.
    """
    workers = apps.get_model("django_txmsg", "Worker").objects
    recent = workers.using(schema_editor.connection.alias).filter(
        heartbeat_at__gte=Now() - LIVING
    )
    found = list(recent.order_by("kind", "host", "pid")[: NAMED + 1])
    if not found:
        return
    named = ", ".join(
        f"{one.kind} {one.pid} on {one.host}" for one in found[:NAMED]
    ) + (" and more" if len(found) > NAMED else "")
    raise ConfigurationError(
        f"This migration takes away columns that running processes use: {named}. Their "
        f"messages would fail, and might end as dead letters. Nothing was changed. Stop "
        f"them and migrate again; one that was killed is forgotten after "
        f"{LIVING.total_seconds():.0f} seconds."
    )
