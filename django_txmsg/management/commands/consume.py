"""`manage.py consume`: runs stages until stopped."""

from __future__ import annotations

import argparse
from typing import Any

from ...consuming.consumer import Consumer
from ...monitoring.databases import with_only_queues, with_tables
from ...stages import find
from ..terminal import (
    SEARCHED,
    DatabaseCommand,
    positive,
    read_option,
    require_tables,
    say,
)
from ._workers import add_arguments, working


class Command(DatabaseCommand):
    """Receive messages and run their stages."""

    help = "Runs all stages, or these, until it is stopped (SIGTERM or SIGINT)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("stages", nargs="*", metavar="STAGE")
        parser.add_argument("--once", action="store_true", help="end when idle")
        parser.add_argument(
            "--concurrency", type=positive, metavar="N", help="threads for each stage"
        )
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        require_tables(*with_tables(), *with_only_queues(), waits=True)
        stages = find(options["stages"])
        threads = read_option(options, "concurrency", positive)
        consumer = Consumer(stages, concurrency=threads)
        with working(consumer.stop, options, self.stderr):
            if options["verbosity"] > 0:
                names = ", ".join(stage.name for stage in stages)
                self.stderr.write(f"Consuming: {names or 'control messages only'}.")
                if not stages:
                    self.stderr.write(f"No stage is declared. {SEARCHED}")
            consumer.run(once=options["once"])
        if options["verbosity"] > 0:
            count = consumer.handled
            if consumer.allowance.over:
                say(self.stderr, f"Ended: {consumer.allowance.over}.")
            say(self.stdout, f"Handled {count} deliver{'y' if count == 1 else 'ies'}.")
