"""`manage.py txmsg stages` and `schedule`: list, pause and resume stages and recurring
messages. Also `manage.py txmsg rate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction
from django.db.models import Model

from ..consuming import rates
from ..envelope import serializers
from ..errors import TxmsgError
from ..models import Schedule, StageState
from ..models.fields import local
from ..models.monitoring import Deed
from ..monitoring import pausing, schedule, status
from ..monitoring.lengths import duration
from ..monitoring.schedule import Timing
from ..monitoring.waiting import capped
from ..scheduling import timetable
from ..stages import all_stages
from .terminal import (
    operator,
    print_list,
    printable,
    read_age,
    read_option,
    record,
    require_tables,
    values,
)

#: Who has paused a stage or a recurring message, when and why.
_PAUSED = ("paused_at", "paused_by", "paused_why")


class PausingCommand(BaseCommand):
    """A command with the actions `list`, `pause` and `resume`."""

    noun: str
    model: type[Model]
    #: The help texts of `list` and `pause`.
    listed: str
    paused: str
    #: `change` pauses or resumes the object with a name. `database` returns the
    #: database that stores this object.
    change: Callable[..., Model | None]
    database: Callable[[str], str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.add_actions(parser)

    def add_actions(self, parser: argparse.ArgumentParser) -> Any:
        """Add the actions. Return the object that adds further ones."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        shown = actions.add_parser("list", help=self.listed)
        shown.add_argument("--json", action="store_true")
        pause = actions.add_parser("pause", help=self.paused)
        pause.add_argument("--why", default="", help="The reason, for other operators.")
        for action in (pause, actions.add_parser("resume", help="Go on.")):
            action.add_argument("name", nargs="+", metavar="NAME")
        return actions

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(router.db_for_write(self.model))
        if options["action"] == "list":
            self.print_all(as_json=options["json"])
            return
        paused, why = options["action"] == "pause", options.get("why", "")
        verb, by = "Paused" if paused else "Resumed", f"command: {operator()}"
        for name in options["name"]:
            kind = type(self)
            using = kind.database(name)
            with transaction.atomic(using=using):
                changed = kind.change(name, paused=paused, by=by, why=why)
                if changed is not None:
                    what = f"{self.noun} {name}"
                    record(using, *pausing.entry(what, paused=paused, why=why))
            shown = printable(name)
            self.stdout.write(
                f"{verb} {shown}."
                if changed is not None
                else f"{shown} is paused already."
                if paused
                else f"{shown} is not paused."
            )

    def print_all(self, *, as_json: bool) -> None:
        """Print all objects."""
        raise NotImplementedError


def pause_note(row: Any) -> str:
    """Return a note for the output of `list`: who has paused this row, and why."""
    why = f": {row.paused_why}" if row.paused_why else ""
    return f"  PAUSED by {row.paused_by or 'unknown'}{why}"


class Stages(PausingCommand):
    """Show, pause and resume stages."""

    help = "Lists, pauses and resumes stages."
    noun, model = "stage", StageState
    listed = "Each with its messages and workers."
    paused = "Start no more messages."
    change = staticmethod(pausing.set_stage)
    database = staticmethod(lambda name: router.db_for_write(StageState))

    def print_all(self, *, as_json: bool) -> None:
        """Print all stages."""
        places = sorted(status.read().stages.items())
        rows = (
            values(place, "name", "database", "dead", "muted", "workers", *_PAUSED)
            | {"waiting": place.waiting.count, "declared": place.known}
            for _, place in places
        )
        lines = (
            f"{place.label}  {capped(place.waiting.count)} waiting  "
            f"{place.dead:,} dead  {place.workers} workers"
            f"{pause_note(place) if place.paused_at else ''}"
            for _, place in places
        )
        none = "There are no stages here."
        print_list(self.stdout, "stages", rows, lines, none, as_json=as_json)


# `manage.py txmsg rate list|set|reset`: the rates of stages, changed for a while.


class Rate(BaseCommand):
    """Show the rates of stages, or set or reset one of them."""

    help = "Lists the rates of stages, and changes a rate for a while."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="The stages that have a rate.")
        change = actions.add_parser("set", help="Give a stage another rate.")
        change.add_argument("stage", metavar="STAGE")
        change.add_argument("rate", metavar="RATE", help="like 10/s, 900/m")
        change.add_argument(
            "--for", dest="age", type=read_age, default="1h", metavar="AGE",
            help="for how long (default: 1h)",
        )  # fmt: skip
        reset = actions.add_parser("reset", help="Restore a stage's declared rate.")
        reset.add_argument("stage", metavar="STAGE")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list()
            return
        name, states = options["stage"], rates.states()
        with transaction.atomic(using=states.db):
            if options["action"] == "reset":
                if not states.unlimit(name):
                    raise CommandError(f"No stage {name!r} has a changed rate.")
                said = f"Stage {name} has its own rate again."
            else:
                age = read_option(options, "age", read_age)
                rates.limit(name, options["rate"], age, by=operator())
                said = (
                    f"Stage {name} has a rate of {options['rate']} for {duration(age)}."
                )
            record(states.db, Deed.LIMIT, said)
        self.stdout.write(printable(said))

    def _list(self) -> None:
        limited = [one for one in all_stages() if one.rate is not None]
        changed = rates.states().rates()
        for one in limited:
            per = f" per {one.per}" if one.per else ""
            now = ""
            if one.name in changed:
                rate, seconds = changed[one.name]
                now = f"  CHANGED to {rate} for {duration(seconds)} more"
            self.stdout.write(f"{one.name}  {one.rate}{per}{now}")
        if not limited:
            self.stdout.write("No stage here has a rate.")


class Schedules(PausingCommand):
    """Show, pause, resume, make and remove recurring messages."""

    help = "Lists, pauses, resumes, makes and removes recurring messages."
    noun, model = "recurring message", Schedule
    listed = "Each with its last and next tick."
    paused = "Store no message at its ticks."
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(schedule.database_of)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = self.add_actions(parser)
        make = actions.add_parser("make", help="Let a message recur from now on.")
        make.add_argument("name", metavar="NAME")
        make.add_argument("expression", metavar="EXPRESSION", help="like '0 3 * * *'")
        make.add_argument("destination", metavar="DESTINATION")
        make.add_argument("--body", default="null", metavar="JSON")
        make.add_argument("--tz", metavar="ZONE", help="default: TIME_ZONE")
        remove = actions.add_parser("remove", help="Remove what `make` has made.")
        remove.add_argument("name", nargs="+", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] not in ("make", "remove"):
            super().handle(*args, **options)
            return
        using = router.db_for_write(Schedule)
        require_tables(using)
        if options["action"] == "make":
            self._make(using, options)
            return
        for name in options["name"]:
            with transaction.atomic(using=using):
                if not timetable.remove_recurring(name):
                    raise CommandError(f"No recurring message {name!r} was made here.")
                said = f"Removed recurring message {name}."
                record(using, Deed.REMOVE, said)
            self.stdout.write(printable(said))

    def _make(self, using: str, options: dict[str, Any]) -> None:
        name, expression = options["name"], options["expression"]
        to = options["destination"]
        said = timetable.said_made(name, expression, to)
        try:
            with transaction.atomic(using=using):
                body = options["body"]
                if isinstance(body, str):  # else given to call_command() by keyword
                    body = serializers.loads(body)
                timetable.make_recurring(name, expression, to, body, tz=options["tz"])
                record(using, Deed.MAKE, said)
        except (TxmsgError, ValueError) as error:
            raise CommandError(f"Nothing was changed: {error}") from error
        self.stdout.write(printable(said))

    def print_all(self, *, as_json: bool) -> None:
        """Print all recurring messages."""
        found = schedule.read()
        rows, lines = map(_timing_as_json, found), map(_timing_line, found)
        none = "Nothing recurs here: no every(), and no SCHEDULE."
        print_list(self.stdout, "recurring", rows, lines, none, as_json=as_json)


def _timing_as_json(one: Timing) -> dict[str, Any]:
    declared, row = one.recurring, one.row
    return {
        "name": one.name,
        "every": declared and declared.expression,
        "tz": declared.cron.tz if declared else "",
        "destination": declared and str(declared.destination),
        "last": row.last_tick.isoformat() if row and row.moves else None,
        "next": one.next and one.next.isoformat(),
        "overdue": one.overdue,
        "recorded": not one.unrecorded,
        **values(row, *_PAUSED),
    }


def _timing_line(one: Timing) -> str:
    shown = _timing_as_json(one)
    last = local(one.row.last_tick) if one.row and one.row.moves else "-"
    following = local(one.next) if one.next else "-"
    return (
        f"{one.name}  {shown['every'] or 'unknown here'} {shown['tz']}  "
        f"to {shown['destination'] or '-'}  last tick or start {last}  "
        f"next {following}{_timing_note(one)}"
    )


def _timing_note(one: Timing) -> str:
    if one.paused and one.row is not None:
        return pause_note(one.row)
    if one.unrecorded:
        return "  (no relay has recorded it)"
    return "  OVERDUE" if one.overdue else ""
