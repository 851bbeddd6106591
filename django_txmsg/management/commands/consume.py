"""`manage.py consume`: runs stages until stopped."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandError
from django.db import Error as AnyDatabaseError

from ...consuming.consumer import Consumer
from ...errors import BrokerUnavailable, ConfigurationError, WorkerFailed
from ...monitoring.databases import with_only_queues, with_tables
from ...stages import find
from ..terminal import SEARCHED, DatabaseCommand, require_positive, require_tables, say
from ._workers import add_arguments, working


class Command(DatabaseCommand):
    """Receive messages and run their stages."""

    help = "Runs all stages, or these, until it is stopped (SIGTERM or SIGINT)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("stages", nargs="*", metavar="STAGE")
        parser.add_argument("--once", action="store_true", help="end when idle")
        parser.add_argument(
            "--concurrency", type=int, metavar="N", help="threads for each stage"
        )
        parser.add_argument(
            "--max-messages",
            type=int,
            metavar="N",
            help="end after this many deliveries",
        )
        parser.add_argument(
            "--max-memory", type=float, metavar="MIB", help="end above so much memory"
        )
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        require_positive(options, "concurrency")
        limits = {name: options[name] for name in ("max_messages", "max_memory")}
        for name, limit in limits.items():
            if limit is not None and not limit >= 0:
                option = name.replace("_", "-")
                raise CommandError(f"--{option} must be 0, for no limit, or more.")
        require_tables(*with_tables(), *with_only_queues(), waits=True)
        stages = find(options["stages"])
        consumer = Consumer(stages, concurrency=options["concurrency"], **limits)
        with working(consumer.stop, options, self.stderr):
            if options["verbosity"] > 0:
                names = ", ".join(stage.name for stage in stages)
                self.stderr.write(f"Consuming: {names or 'control messages only'}.")
                if not stages:
                    self.stderr.write(f"No stage is declared. {SEARCHED}")
            try:
                consumer.run(once=options["once"])
            except (
                BrokerUnavailable,
                ConfigurationError,
                WorkerFailed,
                AnyDatabaseError,
            ) as error:
                raise CommandError(f"The consumer ended: {error}") from error
        if options["verbosity"] > 0:
            count = consumer.handled
            if consumer.allowance.over:
                say(self.stderr, f"Ended: {consumer.allowance.over}.")
            say(self.stdout, f"Handled {count} deliver{'y' if count == 1 else 'ies'}.")
