"""Recurring messages with their last and next ticks, for the admin and the commands.
Operators also make and remove recurring messages here."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db import router

from .. import conf
from ..envelope import serializers
from ..errors import ConfigurationError
from ..models import Schedule
from ..models.fields import clock
from ..models.monitoring import Deed, Done
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
    """Return the database that stores a recurring message. A message that this code
    does not declare is stored in the outbox's database."""
    declared = {one.name: one.alias for one in recurring()}
    return declared.get(name) or router.db_for_write(Schedule)


def make(
    name: str, expression: str, destination: str, body: Any, tz: str | None
) -> Done:
    """Make a recurring message at run time, or change it. If `body` is a text, it is
    JSON. Raises the errors of `make_recurring()`, and DecodeError for such a text."""
    rows = Schedule.objects.using(router.db_for_write(Schedule)).filter(name=name)
    made = rows.filter(service__in=conf.get().services, made__isnull=False)
    known = serializers.is_storable(name) and made.exists()
    verb = "Changed" if known else "Made"
    value = serializers.loads(body) if isinstance(body, str) else body
    timetable.make_recurring(name, expression, destination, value, tz=tz)
    said = f"{verb} recurring message {name}: {expression} to {destination}."
    return rows.get(service=conf.get().SERVICE), Deed.MAKE, said


def remove(name: str) -> Done:
    """Remove a recurring message that was made at run time. Raises ConfigurationError
    if there is none with this name."""
    rows = timetable.adopt(router.db_for_write(Schedule))
    row = rows.filter(service=conf.get().SERVICE, name=name).first()
    if row is None or not timetable.remove_recurring(name):
        raise ConfigurationError(f"No recurring message {name!r} was made here.")
    return row, Deed.REMOVE, f"Removed recurring message {name}."


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
