"""`manage.py txmsg schedule list|pause|resume|make|remove`: recurring messages."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import CommandError
from django.db import router, transaction

from ..envelope import serializers
from ..errors import TxmsgError
from ..models import Schedule
from ..models.monitoring import Deed
from ..monitoring import pausing, schedule
from ..monitoring.schedule import Timing
from ..scheduling import made
from . import operator
from .pausing import PausingCommand, pause_note
from .terminal import require_tables


class Command(PausingCommand):
    """Show, pause, resume, make and remove recurring messages."""

    help = "Recurring messages: list, pause, resume, make and remove them."
    noun = "recurring message"
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(schedule.database_of)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        self.add_pausing(
            actions,
            listed="Each with its last and next tick.",
            paused="Store no message at its ticks.",
        )
        make = actions.add_parser("make", help="Let a message recur from now on.")
        make.add_argument("name", metavar="NAME")
        make.add_argument("expression", metavar="EXPRESSION", help="as '0 3 * * *'")
        make.add_argument("destination", metavar="DESTINATION")
        make.add_argument("--body", default="null", metavar="JSON")
        make.add_argument("--tz", metavar="ZONE", help="default: TIME_ZONE")
        remove = actions.add_parser(
            "remove", help="Remove a message that `make` has made."
        )
        remove.add_argument("name", nargs="+", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(router.db_for_write(Schedule))
        action = options["action"]
        if action == "list":
            self._list(options["json"])
        elif action == "make":
            self._make(options)
        elif action == "remove":
            for name in options["name"]:
                self._remove(name)
        else:
            self.set_paused(options)

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
        said = made.said(name, expression, options["destination"])
        try:
            with transaction.atomic(using=using):
                made.make_recurring(
                    name,
                    expression,
                    options["destination"],
                    serializers.loads(options["body"]),
                    tz=options["tz"],
                )
                operator.record(using, Deed.MAKE, said)
        except (TxmsgError, ValueError) as error:
            raise CommandError(f"Nothing was changed: {error}") from error
        self.stdout.write(said)

    def _remove(self, name: str) -> None:
        using = router.db_for_write(Schedule)
        with transaction.atomic(using=using):
            if not made.remove_recurring(name):
                raise CommandError(f"No recurring message {name!r} was made here.")
            said = f"Removed recurring message {name}."
            operator.record(using, Deed.REMOVE, said)
        self.stdout.write(f"Removed {name}.")


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
        return pause_note(one.row)
    return "  OVERDUE" if one.overdue else ""
