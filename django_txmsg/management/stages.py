"""`manage.py txmsg stages` and `schedule`: list, pause and resume stages and recurring
messages. Also `manage.py txmsg rate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router
from django.db.models import Model

from ..consuming import rates
from ..errors import TxmsgError
from ..models import Schedule, StageState
from ..models.fields import local
from ..models.monitoring import Done
from ..monitoring import pausing, schedule, status
from ..monitoring.lengths import duration
from ..monitoring.schedule import Timing
from ..monitoring.waiting import capped
from ..stages import all_stages
from .terminal import (
    add_actions,
    operator,
    perform,
    print_list,
    printable,
    read_age,
    read_option,
    require_tables,
    values,
)

#: Who has paused a stage or a recurring message, when and why.
_PAUSED = ("paused_at", "paused_by", "paused_why")


class PausingCommand(BaseCommand):
    """A command with the actions `list`, `pause` and `resume`."""

    model: type[Model]
    #: The actions with their help texts.
    actions: Mapping[str, str]
    #: `change` pauses or resumes the object with a name. `database` returns the
    #: database that stores this object.
    change: Callable[..., Done | None]
    database: Callable[[str], str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.add_actions(parser)

    def add_actions(self, parser: argparse.ArgumentParser) -> dict[str, Any]:
        """Add the actions. Return their parsers by name."""
        actions = add_actions(parser, self.actions)
        actions["list"].add_argument("--json", action="store_true")
        why = "The reason, for other operators."
        actions["pause"].add_argument("--why", default="", help=why)
        for name in ("pause", "resume"):
            actions[name].add_argument("name", nargs="+", metavar="NAME")
        return actions

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(router.db_for_write(self.model))
        if options["action"] == "list":
            self.print_all(as_json=options["json"])
            return
        paused, why = options["action"] == "pause", options.get("why", "")
        verb, by = "Paused" if paused else "Resumed", f"command: {operator()}"
        for name in options["name"]:
            change = partial(self.change, name, paused=paused, by=by, why=why)
            changed, shown = perform(self.database(name), change), printable(name)
            self.stdout.write(
                f"{verb} {shown}."
                if changed
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
    model = StageState
    actions = {
        "list": "Each with its messages and workers.",
        "pause": "Start no more messages.",
        "resume": "Go on.",
    }
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
        actions = add_actions(parser, {
            "list": "The stages that have a rate.",
            "set": "Give a stage another rate.",
            "reset": "Restore a stage's declared rate.",
        })  # fmt: skip
        # Not "stage" and "rate": call_command() takes arguments of any verb for options
        # of any other that have the same name, and fails.
        for name in ("set", "reset"):
            actions[name].add_argument("of_stage", metavar="STAGE")
        add = actions["set"].add_argument
        add("new_rate", metavar="RATE", help="like 10/s, 900/m")
        add(
            "--for", dest="age", type=read_age, default="1h", metavar="AGE",
            help="for how long (default: 1h)",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list()
            return
        name = options["of_stage"]
        change: Callable[[], Done | None] = partial(rates.reset, name)
        if options["action"] == "set":
            age = read_option(options, "age", read_age)
            change = partial(rates.limit, name, options["new_rate"], age, by=operator())
        said = perform(rates.states().db, change)
        if not said:
            raise CommandError(f"No stage {name!r} has a changed rate.")
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
    model = Schedule
    actions = {
        "list": "Each with its last and next tick.",
        "pause": "Store no message at its ticks.",
        "resume": "Go on.",
        "make": "Let a message recur from now on.",
        "remove": "Remove what `make` has made.",
    }
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(schedule.database_of)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = self.add_actions(parser)
        add = actions["make"].add_argument
        add("name", metavar="NAME")
        add("expression", metavar="EXPRESSION", help="like '0 3 * * *'")
        add("send_to", metavar="DESTINATION")  # see Rate
        add("--body", default="null", metavar="JSON")
        add("--tz", metavar="ZONE", help="default: TIME_ZONE")
        actions["remove"].add_argument("name", nargs="+", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] not in ("make", "remove"):
            super().handle(*args, **options)
            return
        using = router.db_for_write(Schedule)
        require_tables(using)
        if options["action"] == "remove":
            for name in options["name"]:
                said = perform(using, partial(schedule.remove, name))
                self.stdout.write(printable(said))
            return
        fields = ("name", "expression", "send_to", "body", "tz")
        make = partial(schedule.make, *(options[field] for field in fields))
        try:
            said = perform(using, make)
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
