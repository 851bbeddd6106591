"""The databases that store messages, according to the settings and the stages.

The relay, pruning, bulk operations and checks get their databases here.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from django.db import connections, router

from .. import conf, stages
from ..brokers import find_broker, of_kind
from ..errors import ConfigurationError
from ..models import OutboxMessage
from ..models.fields import query
from ..scheduling.timetable import recurring
from ..stages import Stage

#: Vendors of databases that can hold messages.
VENDORS = ("postgresql", "sqlite")


def in_use() -> dict[str, str]:
    """Return the aliases of the databases in which messages are stored. Each alias has
    a text that names a part of the project that uses the database."""
    asking = {router.db_for_write(OutboxMessage): "the outbox"}
    asking.setdefault(conf.get().HTTP.USING, 'TXMSG["HTTP"]["USING"]')
    for one in recurring():
        asking.setdefault(one.alias, f"the recurring message {one.name!r}")
    for stage in stages.all_stages():
        using = of_stage(stage)
        if using is not None:
            asking.setdefault(using, f"stage {stage.name!r}")
    for broker in of_kind("celery").values():
        with suppress(ConfigurationError):  # the checks report it
            for task in once_tasks(broker.app):
                if task.using:
                    asking.setdefault(task.using, f"the OnceTask {task.name!r}")
    return asking


def once_tasks(app: Any) -> list[Any]:
    """Return the `OnceTask`s of a Celery app that this process has imported, sorted by
    name."""
    # Only an OnceTask has this method. This part cannot import the class.
    return [one for _, one in sorted(app.tasks.items()) if hasattr(one, "careless")]


def with_tables() -> list[str]:
    """Return the databases in use in which migrations create our tables. The outbox's
    database comes first."""
    return [
        alias
        for alias in in_use()
        if alias in connections and router.allow_migrate_model(alias, OutboxMessage)
    ]


def with_only_queues(*brokers: str) -> list[str]:
    """Return the databases that are not in use, except that embedded brokers keep their
    queues there: these brokers, by default all. Other services may use their further
    tables."""
    known, kept = with_tables(), brokers_by_database(*brokers)
    return [one for one in connections if one in kept and one not in known]


def brokers_by_database(*brokers: str) -> dict[str, str]:
    """Map each database in which embedded brokers keep their queues to the alias of one
    of these brokers, of "default" if possible. By default, all brokers are searched."""
    found: dict[str, str] = {}
    embedded = of_kind("database")
    for alias in sorted(brokers or embedded, key=lambda one: one != "default"):
        if alias in embedded:
            found.setdefault(embedded[alias].stored_in, alias)
    return found


def left_out() -> list[str]:
    """Return the databases in which migrations create our tables, although no known
    part of the project uses these databases. They may still contain messages, because
    any code can store messages there with `using=`. A database that a broker keeps its
    queues in is not returned: it needs our tables for the queues."""
    known = {*in_use(), conf.get().LISTEN_DATABASE}  # the last: another route to one
    brokers = map(find_broker, conf.get().BROKERS)
    known |= {one.stored_in for one in brokers if one is not None}
    return [
        alias
        for alias in connections
        if alias not in known
        and connections[alias].vendor in VENDORS
        and router.allow_migrate_model(alias, OutboxMessage)
    ]


def is_read_only(alias: str, named: Collection[str] = ()) -> bool:
    """Return whether the server of this alias refuses writes, as a standby does. Only
    PostgreSQL is asked. If the operator has `named` the databases to read, return
    False, because one of them may be a replica."""
    if named or connections[alias].vendor != "postgresql":
        return False
    ((read_only,),) = query(
        alias,
        "SELECT pg_is_in_recovery()"
        " OR current_setting('default_transaction_read_only')::boolean",
    )
    return bool(read_only)


def of_stage(stage: Stage) -> str | None:
    """Return the database of a stage. Return None if the stage's definition raises an
    error."""
    try:
        return stage.definition.using
    except Exception:
        return None
