"""Prevents a migration from removing columns that running processes use."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from ..models.worker import living

#: The most workers that are named.
NAMED = 5


def refuse_beside_workers(apps: Any, schema_editor: Any) -> None:
    """Raise ConfigurationError while a live worker uses the database.

    Pass it to the `RunPython` of a migration whose schema breaks processes that are
    already running. When the migration is applied or undone, these processes still run
    the code of the other release.
    """
    workers = apps.get_model("django_txmsg", "Worker").objects
    alive = workers.using(schema_editor.connection.alias).filter(living())
    found = list(alive.order_by("kind", "host", "pid")[: NAMED + 1])
    if not found:
        return
    named = ", ".join(
        f"{one.kind} {one.pid} on {one.host}" for one in found[:NAMED]
    ) + (" and more" if len(found) > NAMED else "")
    forgotten = max(one.silent_after for one in found).total_seconds()
    raise ConfigurationError(
        f"This migration takes away columns that running processes use: {named}. Their "
        f"messages would fail, and might end as dead letters. Nothing was changed. Stop "
        f"them and migrate again; one that was killed is forgotten {forgotten:.0f} "
        f"seconds after its last heartbeat."
    )
