"""`manage.py consume`: runs stages until stopped."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ...consumer import Consumer
from ...errors import BrokerUnavailable, ConfigurationError
from ...stages import find
from ._process import stay_light, stop_on_signals


class Command(BaseCommand):
    """Receive messages and run their stages."""

    help = "Runs stages, all or the named ones, until stopped (SIGTERM or SIGINT)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("stages", nargs="*", metavar="STAGE")
        parser.add_argument("--once", action="store_true", help="until idle")
        parser.add_argument(
            "--concurrency", type=int, metavar="N", help="threads for each stage"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        concurrency = options["concurrency"]
        if concurrency is not None and concurrency < 1:
            raise CommandError("--concurrency must be 1 or more.")
        try:
            stages = find(options["stages"])
            consumer = Consumer(stages, concurrency=concurrency)
        except ConfigurationError as error:
            raise CommandError(str(error)) from error
        if options["verbosity"] > 0:
            names = ", ".join(stage.name for stage in stages) or "control messages only"
            self.stderr.write(f"Consuming: {names}.")
        if not options["once"]:
            stay_light()
        with stop_on_signals(consumer.stop, self.stderr):
            try:
                consumer.run(once=options["once"])
            except BrokerUnavailable as error:
                raise CommandError(f"The consumer ended: {error}") from error
        if options["verbosity"] > 0:
            self.stdout.write(f"Handled {consumer.handled} deliveries.")
