"""`manage.py txmsg stages list|pause|resume`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction

from ..models import StageState
from ..monitoring import status
from ..monitoring.known_stages import is_known
from ..monitoring.waiting import capped
from . import operator
from .tables import require_tables
from .terminal import printable


class Command(BaseCommand):
    """Show stages; pause and resume them."""

    help = "Stages: what waits there, pausing and resuming."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        shown = actions.add_parser("list", help="Each with its messages and workers.")
        shown.add_argument("--json", action="store_true")
        pause = actions.add_parser("pause", help="Start no more messages.")
        pause.add_argument("--why", default="", help="The reason, for other operators.")
        resume = actions.add_parser("resume", help="Go on.")
        for action in (pause, resume):
            action.add_argument("stage", nargs="+", metavar="STAGE")

    def handle(self, *args: Any, **options: Any) -> None:
        using = router.db_for_write(StageState)
        require_tables(using)
        if options["action"] == "list":
            self._list(options["json"])
            return
        pauses = options["action"] == "pause"
        for name in options["stage"]:
            if pauses and not is_known(name, using):
                raise CommandError(f"There is no stage {name!r} here.")
            self._set(name, using, pauses, options.get("why", ""))

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
            why = f": {place.paused_why}" if place.paused_why else ""
            paused = f"  PAUSED by {place.paused_by or 'unknown'}{why}"
            self.stdout.write(
                printable(
                    f"{place.label}  {capped(place.waiting.count)} waiting  "
                    f"{place.dead:,} dead  {place.workers} workers"
                    f"{paused if place.paused_at else ''}"
                )
            )

    def _set(self, name: str, using: str, pauses: bool, why: str) -> None:
        states, verb = StageState.objects.db_manager(using), "Resumed"
        with transaction.atomic(using=using):
            if pauses:
                verb = "Paused"
                by = f"command: {operator.name()}"
                changed = states.pause(name, by=by, why=why)
            else:
                changed = states.resume(name)
            if changed:
                because = f": {why}" if why else "."
                operator.record(using, f"{verb} stage {name}{because}")
        shown = printable(name)
        self.stdout.write(
            f"{verb} {shown}." if changed else f"{shown} is {verb.lower()} already."
        )
