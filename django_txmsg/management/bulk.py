"""`manage.py txmsg bulk list|pause|resume|cancel`: bulk operations on dead letters."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction

from ..models import BulkOperation
from . import operator
from .terminal import local, printable, require_tables


class Command(BaseCommand):
    """Show bulk operations; pause, resume and cancel them."""

    help = "Bulk operations on dead letters: progress, pausing, cancelling."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        shown = actions.add_parser("list", help="The newest first.")
        shown.add_argument("--limit", type=int, default=20, metavar="N")
        shown.add_argument("--json", action="store_true")
        for name, text in (
            ("pause", "Stop after the current batch."),
            ("resume", "Go on after the last batch."),
            ("cancel", "End here; processed messages are not undone."),
        ):
            action = actions.add_parser(name, help=text)
            action.add_argument("id", type=int, metavar="ID")
        for action in actions.choices.values():
            action.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        using = options["database"] or router.db_for_write(BulkOperation)
        require_tables(using)
        if options["action"] == "list":
            self._list(using, options["limit"], options["json"])
        else:
            self._move(using, options["action"], options["id"])

    def _list(self, using: str, limit: int, as_json: bool) -> None:
        rows: Any = BulkOperation.objects.using(using).order_by("-pk")
        found = [_facts(one) for one in rows[: max(limit, 0)]]
        if as_json:
            text = json.dumps({"operations": found}, indent=2, default=str)
            self.stdout.write(text)
            return
        for one in found:
            why = f": {one['why']}" if one["why"] else ""
            self.stdout.write(
                printable(
                    f"{one['id']:>6}  {local(one['created_at'])}  {one['state']}  "
                    f"{one['kind']} {one['done']:,} of {one['total']:,}, "
                    f"{one['skipped']:,} skipped, by {one['by'] or 'unknown'}{why}"
                )
            )

    def _move(self, using: str, verb: str, pk: int) -> None:
        operations = BulkOperation.objects.db_manager(using)
        with transaction.atomic(using=using):
            moved = getattr(operations, verb)(pk)
            if moved:
                operation = operations.get(pk=pk)
                operator.record(using, f"{verb.capitalize()}: {operation}.")
        if not moved:
            raise CommandError(
                f"Bulk operation {pk} does not exist, has ended, or was {verb}d before."
            )
        self.stdout.write(f"{verb.capitalize()}: {operation}.")


def _facts(operation: BulkOperation) -> dict[str, Any]:
    names = (
        "id", "kind", "state", "total", "done", "skipped", "by", "why", "rate",
        "filter", "created_at", "finished_at",
    )  # fmt: skip
    return {name: getattr(operation, name) for name in names}
