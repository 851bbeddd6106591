"""Recurring messages with their last and next ticks, for the admin and the commands."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db import router

from .. import conf
from ..models import Schedule
from ..models.fields import clock
from ..scheduling import timetable
from ..scheduling.timetable import Recurring, recurring
from .waiting import OVERDUE


@dataclass(frozen=True)
class Timing:
    """One recurring message. `recurring` is None if this code does not declare it.
    `row` is None if no relay has recorded it yet."""

    name: str
    recurring: Recurring | None
    row: Schedule | None
    #: Its next tick after now.
    next: dt.datetime | None
    #: Whether a tick passed two minutes ago and its message was not stored.
    overdue: bool

    @property
    def paused(self) -> bool:
        """Whether an operator has paused the message."""
        return self.row is not None and self.row.paused_at is not None

    @property
    def unrecorded(self) -> bool:
        """Whether no relay has recorded this declaration: each relay that runs may have
        older code. So it cannot be known how late the message is."""
        one, row = self.recurring, self.row
        return one is not None and (row is None or row.timing != str(one.cron))


def read() -> list[Timing]:
    """Return all recurring messages: those declared here, and those that have a row of
    this service."""
    home = router.db_for_write(Schedule)
    now = clock(home)
    found = [
        timing
        for alias in {home} | {one.alias for one in recurring()}
        for timing in in_database(alias, now)
    ]
    return sorted(found, key=lambda timing: timing.name)


def in_database(using: str, now: dt.datetime) -> list[Timing]:
    """Return the recurring messages of one database. For the outbox's database, include
    the messages that have a row but are not declared here."""
    declared = {one.name: one for one in recurring()}
    home = router.db_for_write(Schedule)
    if using != home and all(one.alias != using for one in declared.values()):
        return []
    own = {name: one for name, one in declared.items() if one.alias == using}
    service = conf.get().SERVICE
    rows = {
        row.name: row for row in Schedule.objects.using(using).filter(service=service)
    }
    own |= timetable.read_made(rows.values())
    unknown = rows.keys() - declared.keys() if using == home else set()
    return [
        _timing(name, own.get(name), rows.get(name), now)
        for name in own.keys() | unknown
    ]


def late(using: str, now: dt.datetime) -> list[Timing]:
    """Return the recurring messages of one database that are overdue."""
    return [timing for timing in in_database(using, now) if timing.overdue]


def database_of(name: str) -> str:
    """Return the database that stores a recurring message. For an unknown name, return
    the outbox's database."""
    for one in read():
        if one.name == name:
            row: Any = one.row
            return one.recurring.alias if one.recurring else str(row._state.db)
    return router.db_for_write(Schedule)


def _timing(
    name: str, one: Recurring | None, row: Schedule | None, now: dt.datetime
) -> Timing:
    if one is None:
        return Timing(name, None, row, None, overdue=False)
    overdue = False
    if row is not None and row.paused_at is None and row.timing == str(one.cron):
        expected = one.cron.after(row.last_tick)
        overdue = expected is not None and now - expected > OVERDUE
    return Timing(name, one, row, one.cron.after(now), overdue=overdue)
