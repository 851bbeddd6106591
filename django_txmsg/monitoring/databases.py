"""The databases that hold messages, according to the settings and the stages.

Relay, pruning, bulk operations and checks get the list of databases from this module.
"""

from __future__ import annotations

from django.db import connections, router

from .. import conf, stages
from ..models import OutboxMessage
from ..scheduling.timetable import recurring
from ..stages import Stage

#: Vendors of databases that can hold messages.
VENDORS = ("postgresql", "sqlite")


def in_use() -> dict[str, str]:
    """Return the aliases in which messages are stored, each with what uses it."""
    asking = {router.db_for_write(OutboxMessage): "the outbox"}
    asking.setdefault(conf.get().HTTP.USING, 'TXMSG["HTTP"]["USING"]')
    for one in recurring():
        asking.setdefault(one.alias, f"the recurring message {one.name!r}")
    for stage in stages.all_stages():
        using = of_stage(stage)
        if using is not None:
            asking.setdefault(using, f"stage {stage.name!r}")
    return asking


def with_tables() -> list[str]:
    """Return the databases in use that may have our tables. The outbox's database comes
    first."""
    return [
        alias
        for alias in in_use()
        if alias in connections and router.allow_migrate_model(alias, OutboxMessage)
    ]


def left_out() -> list[str]:
    """Return the other aliases that may have our tables. Whether these databases hold
    messages is unknown, because any code can store a message there with `using=`."""
    known = {*in_use(), conf.get().LISTEN_DATABASE}  # the last: another route to one
    return [
        alias
        for alias in connections
        if alias not in known
        and connections[alias].vendor in VENDORS
        and router.allow_migrate_model(alias, OutboxMessage)
    ]


def of_stage(stage: Stage) -> str | None:
    """Return the database of a stage, or None if its definition fails."""
    try:
        return stage.definition.using
    except Exception:
        return None
