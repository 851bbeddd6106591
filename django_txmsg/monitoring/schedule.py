"""Recurring messages and their last ticks, for the admin and the command."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.db import router

from .. import conf
from ..models import Schedule
from ..models.fields import clock
from ..scheduling.timetable import Recurring, recurring
from .waiting import OVERDUE


@dataclass(frozen=True)
class Timing:
    """One recurring message. `recurring` is None if this code does not declare it,
    `row` if no relay has recorded it yet."""

    name: str
    recurring: Recurring | None
    row: Schedule | None
    #: Its next tick after now.
    next: dt.datetime | None
    #: Whether a tick passed two minutes ago and its message was not stored.
    overdue: bool

    @property
    def paused(self) -> bool:
        """Whether an operator has paused it."""
        return self.row is not None and self.row.paused_at is not None


def read() -> list[Timing]:
    """Return the messages declared here, and those in this service's table."""
    declared = {one.name: one for one in recurring()}
    home = router.db_for_write(Schedule)
    aliases = sorted({home} | {one.alias for one in declared.values()})
    service = conf.get().SERVICE
    now = clock(home)
    rows: dict[str, Schedule] = {}
    for alias in aliases:
        for row in Schedule.objects.using(alias).filter(service=service):
            one = declared.get(row.name)
            if (one.alias if one else home) == alias:
                rows[row.name] = row
    return [
        _timing(name, declared.get(name), rows.get(name), now)
        for name in sorted(declared.keys() | rows.keys())
    ]


def database_of(name: str) -> str | None:
    """Return the database of a recurring message; None for an unknown name."""
    for one in read():
        if one.name == name:
            return one.recurring.alias if one.recurring else one.row._state.db  # type: ignore[union-attr]  # one of them is there
    return None


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
