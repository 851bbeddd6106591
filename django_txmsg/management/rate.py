"""`manage.py txmsg rate list|set|reset`: the rates of stages, changed for a while."""

from __future__ import annotations

import argparse
import datetime as dt
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from ..consuming import rates
from ..errors import ConfigurationError
from ..stages import all_stages
from . import operator
from .terminal import printable, read_age


class Command(BaseCommand):
    """Show the rates of stages; change one for a while."""

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
            operator.record(states.db, said)
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
