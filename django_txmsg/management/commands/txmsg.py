"""`manage.py txmsg VERB`: all commands of the package under one name."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

from ... import __name__ as package
from ..doctor import Command as Doctor
from ..flows import Command as Flows
from ..monitoring import Alerts, Alive, Audit
from ..pending import Bulk, Cancel, Reschedule, Stop
from ..project import Contracts, Init
from ..stages import Rate, Schedules, Stages
from ..terminal import DatabaseCommand, VerbParser
from ._run import Command as Run


class Command(DatabaseCommand):
    """Runs any command of the package: `manage.py txmsg VERB` runs the command with the
    name VERB."""

    help = "Runs any command of django_txmsg."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(
            dest="verb", required=True, metavar="VERB", parser_class=VerbParser
        )
        self._verbs: dict[str, BaseCommand] = {
            "alerts": Alerts(),
            "alive": Alive(),
            "audit": Audit(),
            "bulk": Bulk(),
            "cancel": Cancel(),
            "contracts": Contracts(),
            "doctor": Doctor(),
            "flows": Flows(),
            "init": Init(),
            "rate": Rate(),
            "reschedule": Reschedule(),
            "run": Run(),
            "schedule": Schedules(),
            "stages": Stages(),
            "stop": Stop(),
        }
        for name, app in get_commands().items():
            if app == package and name != "txmsg":
                self._verbs[name] = load_command_class(package, name)
        for name, command in sorted(self._verbs.items()):
            verb = verbs.add_parser(name, help=command.help, description=command.help)
            command.add_arguments(verb)
            if not command.requires_system_checks:  # Django reads it only of `txmsg`
                verb.set_defaults(skip_checks=True)

    def handle(self, *args: Any, **options: Any) -> None:
        command = self._verbs[options.pop("verb")]
        command.stdout, command.stderr, command.style = (
            self.stdout,
            self.stderr,
            self.style,
        )
        command.handle(*args, **options)
