"""`manage.py prune_messages`: deletes settled rows past retention."""

from __future__ import annotations

import argparse
from typing import Any

from django.db import router

from ... import conf
from ...models import OutboxMessage
from ...monitoring import retention
from ..terminal import (
    DatabaseCommand,
    chosen_database,
    positive,
    read_option,
    require_tables,
    say,
)


class Command(DatabaseCommand):
    """Delete settled rows past their retention."""

    help = 'Deletes settled rows that are older than TXMSG["RETENTION"].'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="say how many")
        parser.add_argument(
            "--batch-size",
            type=positive,
            default=retention.BATCH_SIZE,
            metavar="N",
            help="rows of a transaction at most (default: %(default)s)",
        )
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        home = chosen_database(options, OutboxMessage)
        size = read_option(options, "batch_size", positive)
        for kind, using in retention.places(options["database"]):
            name = kind.name
            if using != home:
                require_tables(using)
                name += f" in database {using!r}"
            if not retention.prunable(kind):
                self._say(options, f"{name}: {self._why(kind, using)}.")
            elif options["dry_run"]:
                number = retention.count(kind, using)
                self.stdout.write(f"{name}: {number} would be deleted.")
            else:
                number = sum(retention.prune(kind, using, batch_size=size))
                self._say(options, f"{name}: {number} deleted.")

    def _say(self, options: dict[str, Any], line: str) -> None:
        if options["verbosity"] > 0:
            say(self.stdout, line)

    def _why(self, kind: retention.Kind, using: str) -> str:
        if kind.days is None:
            return "kept for ever"
        lake = conf.get().LAKE
        where = lake.URI if lake else "no lake"
        home = using == router.db_for_write(OutboxMessage)
        job = "archive" if home else f"--database {using} archive"
        return f"left to `manage.py pipeline {job}`, which keeps them in {where}"
