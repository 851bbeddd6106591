"""`manage.py txmsg contracts export|check|bury`: writes the contract, compares the
contract with the code, and buries messages that a rolled-back release cannot read."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from .. import contracts
from ..dead_letters.burial import bury_unread
from ..errors import ConfigurationError
from ..models.monitoring import Deed
from . import operator


class Command(BaseCommand):
    """Write the contract of this service, or report its breaking changes."""

    help = "AsyncAPI 3.0 of what is sent and received; what a change of it breaks."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        export = actions.add_parser("export", help="Write the contract's file.")
        check = actions.add_parser(
            "check", help="Exit 1 if a change breaks a sender or receiver."
        )
        bury = actions.add_parser("bury", help="Bury messages that need newer code.")
        bury.add_argument("--stage", default="", help="Of this stage alone.")
        bury.add_argument("--database", metavar="ALIAS", default="default")
        for action in (export, check):
            action.add_argument(
                "file",
                nargs="?",
                help='Default: TXMSG["CONTRACT"]; "-": standard output',
            )
        check.add_argument("--json", action="store_true")
        check.add_argument(
            "--database", metavar="ALIAS", nargs="?", const="default",
            help="Also look for messages that wait for something removed.",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["action"] == "export":
                self._export(options["file"])
            elif options["action"] == "bury":
                using, stage = options["database"], options["stage"]
                # First: it is done in many transactions, each of which may be the last.
                of = f"stage {stage}" if stage else "all stages"
                said = f"Bury messages of {of} that need newer code."
                operator.record(using, Deed.BURY, said, count=None)
                buried = bury_unread(using, stage)
                self.stdout.write(f"Buried {buried} messages that need newer code.")
            else:
                self._check(options)
        except ConfigurationError as error:
            raise CommandError(str(error)) from error

    def _export(self, given: str | None) -> None:
        file = contracts.path(None if given == "-" else given)
        before = contracts.read(file) if file.exists() else {}
        contract = contracts.build(before)
        if given == "-":
            self.stdout.write(contracts.text(contract), ending="")
        elif contracts.write(file, contract):
            self.stdout.write(f"Wrote {file}.")
        else:
            self.stdout.write(f"{file} matches the code.")

    def _check(self, options: dict[str, Any]) -> None:
        file = contracts.path(options["file"])
        before = contracts.read(file)
        now = contracts.build(before)
        broken = contracts.breaking(before, now)
        if options["database"]:
            broken += contracts.waiting(before, now, options["database"])
        if options["json"]:
            changes = [one._asdict() for one in broken]
            self.stdout.write(json.dumps({"breaking": changes}, indent=2))
        else:
            for one in broken:
                self.stdout.write(self.style.ERROR(str(one)))
            if not broken:
                same = contracts.text(now) == contracts.text(before)
                self.stdout.write(
                    "The contract matches the code."
                    if same
                    else "The changes break nothing. Record them with: manage.py "
                    "txmsg contracts export"
                )
        if broken:
            sys.exit(1)
