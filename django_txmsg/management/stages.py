"""`manage.py txmsg stages list|pause|resume`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.db import router

from ..models import StageState
from ..monitoring import pausing, status
from ..monitoring.waiting import capped
from .pausing import PausingCommand
from .terminal import printable, require_tables


class Command(PausingCommand):
    """Show stages; pause and resume them."""

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
            why = f": {place.paused_why}" if place.paused_why else ""
            paused = f"  PAUSED by {place.paused_by or 'unknown'}{why}"
            self.stdout.write(
                printable(
                    f"{place.label}  {capped(place.waiting.count)} waiting  "
                    f"{place.dead:,} dead  {place.workers} workers"
                    f"{paused if place.paused_at else ''}"
                )
            )
