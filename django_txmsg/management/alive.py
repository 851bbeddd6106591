"""`manage.py txmsg alive`: a liveness probe without a port."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from .. import conf
from ..monitoring import process_states
from ..monitoring.process_states import WITHIN


class Command(BaseCommand):
    """Ask this service's worker processes on this host whether their loops are
    running."""

    help = (
        "Exits with 0 if each worker of this service on this host is alive: each of "
        "its loops has run within the last --within seconds. Uses no database and no "
        "broker."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--within",
            type=float,
            default=WITHIN,
            metavar="SECONDS",
            help=f"more than the longest handler takes (default: {WITHIN:g})",
        )
        parser.add_argument(
            "--ready",
            action="store_true",
            help="fail also if one has not started yet, or is stopping",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        states = process_states.running()
        if not states:
            raise CommandError(
                f"No worker of service {conf.get().SERVICE!r} runs here: none has a "
                f"file in {process_states.directory()}."
            )
        for pid, state in sorted(states.items()):
            if state.silent > options["within"]:
                raise CommandError(
                    f"Process {pid}: {state.loop or 'the process'} has not run for "
                    f"{state.silent:.0f} s."
                )
            if options["ready"] and not state.ready:
                raise CommandError(
                    f"Process {pid} has not started yet, or is stopping."
                )
        if options["verbosity"] > 0:
            self.stdout.write(f"Alive: {', '.join(map(str, sorted(states)))}.")
