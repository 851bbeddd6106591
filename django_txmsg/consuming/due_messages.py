"""Hop 6's schedule: which stages have due parked messages.

One query for each database, for all the threads of a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ..models import InboxMessage
from ..runtime import database_health
from . import ordering
from .stage_thread import StageThread


def wake_for_parked(threads: Iterable[StageThread]) -> None:
    """Wake the threads whose stage has due parked messages.

    One query for each database; a database that is away is queried again later.
    """
    by_alias: dict[str, dict[str, list[StageThread]]] = {}
    for thread in threads:
        named = by_alias.setdefault(thread.using, {})
        named.setdefault(thread.stage.name, []).append(thread)
    for using, named in by_alias.items():
        reads = {name: threads[0].stage.reads for name, threads in named.items()}
        inbox = InboxMessage.objects.db_manager(using)
        looking = database_health.retry(
            using, "cannot see which parked messages are due"
        )
        due = looking.run(partial(inbox.due_stages, reads))
        if due is None:
            continue
        for name, threads in named.items():
            if threads[0].stage.ordered:
                # First: messages that must wait longer are then not due any more.
                _ask(threads, using, due=name in due)
            if name in due:
                for thread in threads:
                    thread.parked_due.set()


def _ask(threads: Sequence[StageThread], using: str, *, due: bool) -> None:
    """At an ordered stage, recheck the due waiting messages, if any, and whether there
    is room for more."""
    stage = threads[0].stage

    def ask() -> None:
        if due:
            ordering.ask(
                stage, all(one.has_received(ordering.grace()) for one in threads)
            )
        for room in {thread.room for thread in threads if thread.room is not None}:
            room.look()

    database_health.retry(using, f"cannot ask whose turn it is at {stage.name!r}").run(
        ask
    )
