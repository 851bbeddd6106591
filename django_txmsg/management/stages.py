"""`manage.py txmsg stages list|pause|resume` and `rate list|set|reset`."""

from __future__ import annotations

import argparse
import datetime as dt
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction

from ..consuming import rates
from ..errors import ConfigurationError
from ..models import StageState
from ..models.monitoring import Deed
from ..monitoring import pausing, status
from ..monitoring.waiting import capped
from ..stages import all_stages
from . import operator
from .pausing import PausingCommand, pause_note
from .terminal import printable, read_age, require_tables


class Stages(PausingCommand):
    """Show, pause and resume stages."""

    help = "Stages: list what waits there, pause and resume."
    noun = "stage"
    change = staticmethod(pausing.set_stage)
    database = staticmethod(lambda name: router.db_for_write(StageState))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        self.add_pausing(
            actions,
            listed="Each with its messages and workers.",
            paused="Start no more messages.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(router.db_for_write(StageState))
        if options["action"] == "list":
            self._list(options["json"])
        else:
            self.set_paused(options)

    def _list(self, as_json: bool) -> None:
        places = sorted(status.read().stages.items())
        if as_json:
            rows = [
                {
                    "name": place.name,
                    "database": place.database,
                    "waiting": place.waiting.count,
                    "dead": place.dead,
                    "muted": place.muted,
                    "workers": place.workers,
                    "declared": place.known,
                    "paused_at": place.paused_at and place.paused_at.isoformat(),
                    "paused_by": place.paused_by,
                    "paused_why": place.paused_why,
                }
                for _, place in places
            ]
            self.stdout.write(json.dumps({"stages": rows}, indent=2))
            return
        for _, place in places:
            self.stdout.write(
                printable(
                    f"{place.label}  {capped(place.waiting.count)} waiting  "
                    f"{place.dead:,} dead  {place.workers} workers"
                    f"{pause_note(place) if place.paused_at else ''}"
                )
            )


# `manage.py txmsg rate list|set|reset`: the rates of stages, changed for a while.


class Rate(BaseCommand):
    """Show the rates of stages, or set or reset one of them."""

    help = "Rates of stages: list them, and change one for a while."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="The stages that have a rate.")
        change = actions.add_parser("set", help="Give a stage another rate.")
        change.add_argument("stage", metavar="STAGE")
        change.add_argument("rate", metavar="RATE", help="like 10/s, 900/m")
        change.add_argument(
            "--for", dest="age", default="1h", metavar="AGE", help="until when: 1h"
        )
        reset = actions.add_parser("reset", help="Give a stage its own rate back.")
        reset.add_argument("stage", metavar="STAGE")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list()
            return
        name, states = options["stage"], rates.states()
        with transaction.atomic(using=states.db):
            if options["action"] == "reset":
                if not states.unlimit(name):
                    raise CommandError(f"The rate of stage {name!r} is not changed.")
                said = f"Stage {name} has its own rate again."
            else:
                age = options["age"]
                try:
                    rates.limit(
                        name, options["rate"], read_age(age), by=operator.name()
                    )
                except ConfigurationError as error:
                    raise CommandError(str(error)) from error
                said = f"Stage {name} has a rate of {options['rate']} for {age}."
            operator.record(states.db, Deed.LIMIT, said)
        self.stdout.write(printable(said))

    def _list(self) -> None:
        limited = [one for one in all_stages() if one.rate is not None]
        changed = rates.states().rates()
        for one in limited:
            per = f" per {one.per}" if one.per else ""
            now = ""
            if one.name in changed:
                rate, seconds = changed[one.name]
                left = dt.timedelta(seconds=round(seconds))
                now = f"  CHANGED to {rate} for {left} more"
            self.stdout.write(f"{one.name}  {one.rate}{per}{now}")
        if not limited:
            self.stdout.write("No stage here has a rate.")
