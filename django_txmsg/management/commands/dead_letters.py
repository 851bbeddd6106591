"""`manage.py dead_letters`: lists, shows, redelivers, discards and annotates them.

It calls the same functions as the admin, for the terminal and for scripts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import uuid
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction
from django.utils import timezone

from ... import conf
from ...dead_letters import bulk, selection
from ...dead_letters.selection import Shown
from ...errors import TxmsgError
from ...models import BulkOperation, DeadLetter, FailureNote
from ...models.bulk_operation import BulkKind, BulkState
from ...models.dead_letter import Resolution
from ...stages import all_stages
from .. import operator
from ._dead_letter_report import Report
from ._tables import require_tables

_CHANGING = ("redeliver", "discard", "restore")
_NOTING = ("note", "mute", "unmute")


class Command(BaseCommand):
    """Work with dead letters."""

    help = "Lists, shows, redelivers, discards and restores dead letters."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "action",
            choices=["list", "groups", "show", *_CHANGING, *_NOTING], metavar="ACTION",
            help="list, groups, show, redeliver, discard, restore, note, mute, unmute",
        )  # fmt: skip
        parser.add_argument(
            "ids", nargs="*", metavar="ID", help="of a dead letter or of a message"
        )
        parser.add_argument("--all", action="store_true", help="all there are")
        parser.add_argument("--stage", help="the stage that gave up ('': the relay)")
        parser.add_argument("--destination")
        parser.add_argument("--fingerprint", help="of the error")
        parser.add_argument("--reason", help="why it was buried")
        parser.add_argument("--text", help="of note and mute: what is known")
        parser.add_argument(
            "--older-than", metavar="AGE", help="buried so long ago: 30m, 12h, 7d"
        )
        parser.add_argument(
            "--again", action="store_true", help="died again after a redelivery"
        )
        parser.add_argument("--search", help="message id, correlation id or key")
        parser.add_argument("--limit", type=_count, default=50, help="of list")
        parser.add_argument("--why", default="", help="kept with the bulk operation")
        parser.add_argument("--rate", type=float, help="messages a second at most")
        parser.add_argument(
            "--force",
            action="store_true",
            help="redeliver also what its stage has processed in the meantime; the "
            "bulk operation in the admin says who did so",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="say how many, with a token for --shown",
        )
        parser.add_argument(
            "--shown", metavar="TOKEN",
            help="of --dry-run: change exactly what it has counted, or nothing",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        using = options["database"] or router.db_for_write(DeadLetter)
        require_tables(using)
        report = Report(self.stdout, as_json=options["json"])
        filters = self._filters(using, options)
        try:
            if action in ("list", "groups"):
                opened = selection.matching("redeliver", filters, using=using)
                if action == "list":
                    report.letters(opened, options["limit"])
                else:
                    report.groups(opened)
            elif action == "show":
                if not options["ids"]:
                    raise CommandError("Which one? Give its id or its message's id.")
                found = selection.filtered(filters, using=using).order_by("pk")
                report.shown(found.iterator(chunk_size=1))
            elif action in _NOTING:
                self._note(action, using, options)
            else:
                if not filters and not options["all"]:
                    raise CommandError(
                        f"To {action} all dead letters, say --all. Or give ids, "
                        f"--stage, --fingerprint, --older-than, --reason."
                    )
                self._change(action, filters, using, options, report)
        except TxmsgError as error:
            raise CommandError(str(error)) from error

    def _filters(self, using: str, options: dict[str, Any]) -> dict[str, Any]:
        names = ("stage", "destination", "fingerprint", "reason", "search")
        filters = {name: options[name] for name in names if options[name] is not None}
        if options["again"]:
            filters["again"] = True
        if options["older_than"]:
            filters["before"] = (
                timezone.now() - _age(options["older_than"])
            ).isoformat()
        if options["ids"]:
            filters["ids"] = self._ids(using, options["ids"])
        if options["all"] and filters:
            raise CommandError("--all goes with no ids and no filter.")
        if options["stage"]:
            self._require_stage(options["stage"], using)
        return filters

    def _require_stage(self, name: str, using: str) -> None:
        """A misspelt name must not look like a stage without dead letters."""
        letters = DeadLetter.objects.using(using)
        known = {one.name for one in all_stages()}
        if name in known or letters.filter(stage=name).exists():
            return
        opened = letters.filter(resolution=Resolution.OPEN).exclude(stage="")
        known |= set(opened.order_by().values_list("stage", flat=True).distinct()[:50])
        raise CommandError(
            f"No stage {name!r}; known: {', '.join(sorted(known)) or 'none'}."
        )

    def _ids(self, using: str, given: list[str]) -> list[int]:
        letters = DeadLetter.objects.using(using)
        found: list[int] = []
        for one in given:
            if one.isdecimal():
                pks = list(letters.filter(pk=int(one)).values_list("pk", flat=True))
            else:
                try:
                    wanted = uuid.UUID(one)
                except ValueError:
                    raise CommandError(
                        f"{one!r} is neither the number of a dead letter nor a "
                        f"message id."
                    ) from None
                pks = list(
                    letters.filter(message_id=wanted).values_list("pk", flat=True)
                )
            if not pks:
                raise CommandError(f"No dead letter {one}.")
            found += pks
        return found

    def _note(self, action: str, using: str, options: dict[str, Any]) -> None:
        if not options["fingerprint"]:
            raise CommandError(f"Which error to {action}? Give its --fingerprint.")
        if action == "note" and options["text"] is None:
            raise CommandError("What is to be noted? Give it as --text.")
        with transaction.atomic(using=using):
            note = FailureNote.objects.db_manager(using).keep(
                options["fingerprint"],
                note=options["text"],
                muted=None if action == "note" else action == "mute",
                by=f"command: {operator.name()}",
            )
            verb = {"note": "Noted on", "mute": "Muted", "unmute": "Unmuted"}[action]
            operator.record(using, f"{verb} failures {note.fingerprint}: {note.note}")
        muted = " (muted)" if note.muted else ""
        self.stdout.write(f"Noted on {note.fingerprint}{muted}: {note.note}")

    def _change(
        self,
        action: str,
        filters: dict[str, Any],
        using: str,
        options: dict[str, Any],
        report: Report,
    ) -> None:
        letters = selection.matching(action, filters, using=using)
        if action == "redeliver" and not options["json"]:
            forgotten = selection.summary(letters).forgotten
            if forgotten:
                self.stderr.write(
                    f"{forgotten} of them are older than the inbox remembers "
                    f"({conf.get().RETENTION.INBOX:g} days): one that was processed "
                    f"in the meantime would be processed again."
                )
        if options["dry_run"]:
            report.dry_run(action, Shown.of(letters))
            return
        token, why = options["shown"], options["why"]
        with transaction.atomic(using=using):
            operation = bulk.start(
                BulkKind(action),
                filters,
                using=using,
                by=f"command: {operator.name()}",
                why=why,
                force=options["force"],
                rate=options["rate"],
                shown=Shown.parse(token) if token else None,
            )
            operator.record(
                using,
                f"{action.capitalize()} {operation.total} dead letters"
                f"{', even if processed in the meantime' if operation.force else ''}; "
                f"filter: {filters or 'all'}{f'; why: {why}' if why else ''}.",
            )
        try:
            bulk.finish(operation, on_batch=self._progress)
        except KeyboardInterrupt:
            BulkOperation.objects.db_manager(using).cancel(operation.pk)
            operation.refresh_from_db(using=using)
        if self.stderr.isatty():
            self.stderr.write("")
        report.operation(operation)
        if operation.state != BulkState.DONE:
            raise CommandError(f"Bulk operation {operation.pk} is {operation.state}.")

    def _progress(self, operation: BulkOperation) -> None:
        if not self.stderr.isatty():
            return
        handled = operation.done + operation.skipped
        share = min(1.0, handled / operation.total) if operation.total else 1.0
        bar = "#" * round(share * 40)
        self.stderr.write(f"\r[{bar:<40}] {handled} of {operation.total}", ending="")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _age(text: str) -> dt.timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise CommandError(f"--older-than {text!r}: write an age like 30m, 12h or 7d.")
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    return dt.timedelta(**{units[match[2]]: float(match[1])})
