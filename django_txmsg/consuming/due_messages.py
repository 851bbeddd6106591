"""Hop 6's calendar: which stages have parked messages whose time has come.

One query for each database finds out, for all the threads of a process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from django.db import Error as AnyDatabaseError

from ..models import InboxMessage
from ..stages import Stage
from ..upkeep import outage
from . import turns
from .stage_thread import StageThread

#: Not named after this module: log configurations watch the name that it has had.
log = logging.getLogger("django_txmsg.consumer")


def wake_for_parked(threads: Iterable[StageThread]) -> None:
    """Tell the threads whose stage has parked messages that are due.

    One query for each database; a database that is away is looked at again later.
    """
    by_alias: dict[str, dict[str, list[StageThread]]] = {}
    for thread in threads:
        named = by_alias.setdefault(thread.using, {})
        named.setdefault(thread.stage.name, []).append(thread)
    for using, named in by_alias.items():
        if not outage.usable(using):
            continue
        try:
            reads = {name: threads[0].stage.reads for name, threads in named.items()}
            due = InboxMessage.objects.db_manager(using).due_stages(reads)
        except AnyDatabaseError as error:
            if not outage.note(using, error):
                log.warning("cannot see which parked messages are due: %s", error)
            continue
        for name in due:
            for thread in named[name]:
                thread.parked_due.set()
            stage = named[name][0].stage
            if stage.ordered:
                _ask(stage, using)


def _ask(stage: Stage, using: str) -> None:
    try:
        turns.ask(stage)
    except AnyDatabaseError as error:
        if not outage.note(using, error):
            log.warning("cannot ask whose turn it is at %r: %s", stage.name, error)
