"""`manage.py txmsg schedule list|pause|resume|make|remove`: recurring messages."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction

from .. import conf
from ..errors import TxmsgError
from ..models import Schedule
from ..monitoring import schedule
from ..monitoring.schedule import Timing
from ..scheduling import made
from . import operator
from .tables import require_tables

log = logging.getLogger("django_txmsg.timekeeper")


class Command(BaseCommand):
    """Show recurring messages; pause, resume, make and remove them."""

    help = "Recurring messages: when each is due, pausing, resuming and making one."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        shown = actions.add_parser("list", help="Each with its last and next tick.")
        shown.add_argument("--json", action="store_true")
        pause = actions.add_parser("pause", help="Store no message at its ticks.")
        pause.add_argument("--why", default="", help="The reason, for other operators.")
        resume = actions.add_parser("resume", help="Go on with the next tick.")
        make = actions.add_parser("make", help="Let a message recur from now on.")
        make.add_argument("name", metavar="NAME")
        make.add_argument("expression", metavar="EXPRESSION", help="as '0 3 * * *'")
        make.add_argument("destination", metavar="DESTINATION")
        make.add_argument("--body", default="null", metavar="JSON")
        make.add_argument("--tz", metavar="ZONE", help="default: TIME_ZONE")
        remove = actions.add_parser("remove", help="Remove one that was made so.")
        for action in (pause, resume, remove):
            action.add_argument("name", nargs="+", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(router.db_for_write(Schedule))
        if options["action"] == "list":
            self._list(options["json"])
            return
        if options["action"] == "make":
            self._make(options)
            return
        for name in options["name"]:
            if options["action"] == "remove":
                self._remove(name)
                continue
            self._set(name, options["action"] == "pause", options.get("why", ""))

    def _list(self, as_json: bool) -> None:
        found = schedule.read()
        if as_json:
            rows = [_as_json(one) for one in found]
            self.stdout.write(json.dumps({"recurring": rows}, indent=2))
            return
        for one in found:
            shown = _as_json(one)
            self.stdout.write(
                f"{one.name}  {shown['every'] or 'unknown here'} {shown['tz']}  "
                f"to {shown['destination'] or '-'}  last {shown['last'] or '-'}  "
                f"next {shown['next'] or '-'}{_state(one)}"
            )
        if not found:
            self.stdout.write("Nothing recurs here: no every(), and no SCHEDULE.")

    def _make(self, options: dict[str, Any]) -> None:
        name, expression = options["name"], options["expression"]
        using = router.db_for_write(Schedule)
        said = f"Made recurring message {name}: {expression} to "
        said += f"{options['destination']}."
        try:
            with transaction.atomic(using=using):
                made.make_recurring(
                    name,
                    expression,
                    options["destination"],
                    json.loads(options["body"]),
                    tz=options["tz"],
                )
                operator.record(using, said)
        except (TxmsgError, ValueError) as error:
            raise CommandError(f"Nothing was changed: {error}") from error
        self.stdout.write(said)

    def _remove(self, name: str) -> None:
        using = router.db_for_write(Schedule)
        with transaction.atomic(using=using):
            if not made.remove_recurring(name):
                raise CommandError(f"No recurring message {name!r} was made here.")
            operator.record(using, f"Removed recurring message {name}.")
        self.stdout.write(f"Removed {name}.")

    def _set(self, name: str, pause: bool, why: str) -> None:
        using = schedule.database_of(name)
        if using is None:
            raise CommandError(f"No recurring message {name!r} here.")
        rows, service = Schedule.objects.db_manager(using), conf.get().SERVICE
        user, verb = operator.name(), "Paused" if pause else "Resumed"
        with transaction.atomic(using=using):
            if pause:
                changed = rows.pause(service, name, by=user, why=why)
            else:
                changed = rows.resume(service, name)
            if changed:
                because = f": {why}" if why else "."
                operator.record(using, f"{verb} recurring message {name}{because}")
        if changed:
            log.info("recurring message %r: %s by %s %s", name, verb, user, why)
        entry = f"{verb} {name}." if changed else f"{name} is {verb.lower()} already."
        self.stdout.write(entry)


def _as_json(one: Timing) -> dict[str, Any]:
    declared, row = one.recurring, one.row
    return {
        "name": one.name,
        "every": declared and declared.expression,
        "tz": declared.cron.tz if declared else "",
        "destination": declared and str(declared.destination),
        "last": row and row.moves and row.last_tick.isoformat(),
        "next": one.next and one.next.isoformat(),
        "overdue": one.overdue,
        "paused_at": row and row.paused_at and row.paused_at.isoformat(),
        "paused_by": row and row.paused_by,
        "paused_why": row and row.paused_why,
    }


def _state(one: Timing) -> str:
    if one.paused and one.row is not None:
        why = f": {one.row.paused_why}" if one.row.paused_why else ""
        return f"  PAUSED by {one.row.paused_by or 'unknown'}{why}"
    return "  OVERDUE" if one.overdue else ""
