"""`manage.py dead_letters`: lists, shows, redelivers, discards and annotates dead
letters.

The command calls the same functions as the admin.
"""

from __future__ import annotations

import argparse
import base64
import json
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from django.core.management.base import CommandError, OutputWrapper
from django.db import Error as AnyDatabaseError
from django.db import transaction
from django.db.models import Count, Max, Min

from ... import conf, wire
from ...dead_letters import bulk, masking, selection
from ...dead_letters.selection import Shown
from ...models import BulkOperation, DeadLetter, FailureNote
from ...models.bulk_operation import PAST, BulkKind, BulkState
from ...models.fields import clock, local
from ...models.monitoring import Deed
from ...monitoring import databases, dead, turns
from ...monitoring.alarms import listed
from ..terminal import (
    DatabaseCommand,
    add_actions,
    chosen_database,
    not_blank,
    operator,
    plain,
    print_list,
    printable,
    printable_lines,
    read_age,
    read_option,
    record,
    require_stage,
    values,
    whole_number,
)


class Report:
    """Prints dead letters and the results of actions on them."""

    def __init__(self, out: OutputWrapper, *, as_json: bool) -> None:
        self._out, self._as_json = out, as_json

    def letters(self, letters: Any, limit: int) -> None:
        """Print the newest open dead letters, one per line."""
        rows = list(letters.defer("body", "traceback").order_by("-pk")[:limit])
        lines = [
            f"{one.pk:>8}  {one.message_id}  {_place(one):<24} "
            f"{local(one.created_at)}  {_first(one.exception)}"
            + (f", died {one.deaths} times" if one.deaths > 1 else "")
            for one in rows
        ]
        count = letters.count()
        shown = f", {len(rows)} shown (--limit)" if count > len(rows) else ""
        lines.append(f"{count} open dead letter{'s' * (count != 1)}{shown}.")
        print_list(self._out, "", map(_facts, rows), lines, "", as_json=self._as_json)

    def groups(self, letters: Any, limit: int) -> None:
        """Print open dead letters grouped by error, the largest groups first."""
        groups = list(
            letters.values("fingerprint")
            .annotate(
                count=Count("pk"), first=Min("created_at"), last=Max("created_at")
            )
            .annotate(example=Max("pk"))
            .order_by("-count", "fingerprint")[:limit]
        )
        errors = dict(
            DeadLetter.objects.using(letters.db)
            .filter(pk__in=[group["example"] for group in groups])
            .values_list("pk", "exception")
        )
        muted = {one.fingerprint for one in dead.by_error(letters.db) if one.muted}
        noted = FailureNote.objects.using(letters.db)
        notes = dict(noted.values_list("fingerprint", "note"))
        for group in groups:
            group["exception"] = errors.get(group.pop("example"), "")
            group["note"] = notes.get(group["fingerprint"], "")
            group["muted"] = group["fingerprint"] in muted
        lines = (
            f"{one['count']:>8}  {one['fingerprint']}  "
            f"{local(one['first'])} to {local(one['last'])}  "
            f"{_first(one['exception'])}{' (muted)' * one['muted']}"
            for one in groups
        )
        none = "0 open dead letters."
        print_list(self._out, "", groups, lines, none, as_json=self._as_json)

    def elsewhere(self, filters: dict[str, Any], using: str) -> None:
        """Print which other databases have open dead letters that match a filter."""
        for alias in databases.with_tables():
            with suppress(AnyDatabaseError):  # not migrated, or away
                rows = selection.matching("redeliver", filters, using=alias)
                if alias != using and (count := rows.count()):
                    self._out.write(f"{count} open elsewhere: --database {alias}")

    def shown(self, letters: Iterable[DeadLetter]) -> None:
        """Print all data of the dead letters, one value per line. With `--json`, print
        an object, or an array if there are several dead letters."""
        if not self._as_json:
            for letter in letters:
                for name, value in self._facts(letter).items():
                    text = value if isinstance(value, str) else _json(value)
                    self._out.write(f"{name}: {printable_lines(text)}")
            return
        facts = [self._facts(letter) for letter in letters]
        self._print(facts[0] if len(facts) == 1 else facts)

    def _facts(self, letter: DeadLetter) -> dict[str, Any]:
        headers, body = masking.shown(
            letter.destination, letter.headers, bytes(letter.body), letter.content_type
        )
        facts = _facts(letter)
        if task := headers.get(wire.TASK):
            facts["task"] = task
        facts |= {"headers": headers, "traceback": letter.traceback}
        if order := turns.note(letter):
            facts["order"] = order
        if isinstance(body, bytes):
            facts["body_base64"] = base64.b64encode(body).decode()
        else:
            facts["body"] = body
        return facts

    def dry_run(self, action: str, shown: Shown) -> None:
        """Print how many dead letters an action would change."""
        count = shown.count
        if self._as_json:
            facts = {"action": action, "matching": count, "dry_run": True}
            self._print(facts | {"shown": str(shown)})
            return
        self._out.write(f"Would {action} {count} dead letter{'s' * (count != 1)}.")
        self._out.write(f"To {action} exactly these: --shown {shown}")

    def operation(self, operation: BulkOperation) -> None:
        """Print the result of an operation."""
        if self._as_json:
            names = (
                "id", "kind", "filter", "total", "done", "skipped", "state",
                "skipped_why",
            )  # fmt: skip
            self._print(values(operation, *names))
            return
        text = operation.result
        if operation.skipped:
            text += f" {operation.skipped} skipped:"
        self._out.write(text)
        for pk, why in operation.skipped_why.items():
            self._out.write(f"  {pk}: {printable(why)}")

    def _print(self, value: Any) -> None:
        text = _json(value, indent=2, ensure_ascii=False)
        self._out.write(masking.encodable(text))


def _facts(letter: DeadLetter) -> dict[str, Any]:
    names = (
        "id", "message_id", "stage", "broker", "destination", "correlation_id",
        "reason", "exception", "fingerprint", "attempts", "deaths",
        "message_created_at", "created_at", "resolution", "resolved_at",
        "resolved_by", "replaced_by",
    )  # fmt: skip
    return values(letter, *names)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, default=plain, **options)


def _first(error: str) -> str:
    """Return the first line of an error, shortened for a list."""
    return error.partition("\n")[0][:80]


def _place(letter: DeadLetter) -> str:
    """If the message is a task, return the task's name. Otherwise return the stage, the
    relay or the broker that gave up the message."""
    task = letter.headers.get(wire.TASK) if wire.is_task(letter.destination) else None
    return str(task or dead.place(letter.stage, letter.destination, letter.reason))


#: Most chosen dead letters that are named because an action leaves them.
_LEFT = 10

_CHANGING = ("redeliver", "discard", "restore")
_NOTING = ("note", "mute", "unmute")


class Command(DatabaseCommand):
    """List, show, redeliver, discard and annotate dead letters."""

    help = "Lists, shows, redelivers, discards and restores dead letters."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        names = ("list", "groups", "show", *_CHANGING, *_NOTING)
        for name, action in add_actions(parser, dict.fromkeys(names)).items():
            add = action.add_argument
            add("--database", metavar="ALIAS")
            if name in _NOTING:
                _add_note(add, name)
                continue
            _add_selection(add, "+" if name == "show" else "*")
            if name in _CHANGING:
                _add_change(add, name)
            elif name != "show":
                add("--limit", type=whole_number, default=50, metavar="N")

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        using = chosen_database(options, DeadLetter)
        if action in _NOTING:
            self._note(action, using, options)
            return
        report = Report(self.stdout, as_json=options["json"])
        filters = self._filters(using, options)
        if action in _CHANGING:
            if not filters and not options["all"]:
                raise CommandError(
                    f"To {action} all dead letters, say --all. Or give ids, "
                    f"--stage, --fingerprint, --older-than, --reason."
                )
            self._change(action, filters, using, options, report)
        elif action == "show":
            found = selection.filtered(filters, using=using).order_by("pk")
            report.shown(found.iterator(chunk_size=1))
        else:
            opened = selection.matching("redeliver", filters, using=using)
            show = report.letters if action == "list" else report.groups
            show(opened, read_option(options, "limit", whole_number))
            # Ids and operations have numbers of their own in each database.
            numbered = options["ids"] or options["operation"] is not None
            if not (options["json"] or options["database"] or numbered):
                report.elsewhere(filters, using)

    def _filters(self, using: str, options: dict[str, Any]) -> dict[str, Any]:
        names = (
            "stage", "destination", "fingerprint", "reason", "operation", "search",
        )  # fmt: skip
        options["operation"] = read_option(options, "operation", whole_number)
        filters = {name: options[name] for name in names if options[name] is not None}
        if options["again"]:
            filters["again"] = True
        if (age := read_option(options, "older_than", read_age)) is not None:
            filters["before"] = (clock(using) - age).isoformat()
        if options["ids"]:
            filters["ids"] = self._ids(using, options["ids"])
        if options["all"] and filters:
            raise CommandError("--all cannot be combined with ids or filters.")
        if options["stage"]:
            require_stage(options["stage"], DeadLetter.objects.using(using))
        return filters

    def _ids(self, using: str, given: list[str]) -> list[int]:
        letters = DeadLetter.objects.using(using)
        found: list[int] = []
        for one in given:
            try:
                rows = (
                    letters.filter(pk=int(one))
                    if one.isdecimal()
                    else letters.filter(message_id=uuid.UUID(one))
                )
            except ValueError:
                raise CommandError(
                    f"{one!r} is neither the number of a dead letter nor a message id."
                ) from None
            pks = list(rows.values_list("pk", flat=True))
            if not pks:
                raise CommandError(f"No dead letter {one}.")
            found += pks
        return found

    def _note(self, action: str, using: str, options: dict[str, Any]) -> None:
        with transaction.atomic(using=using):
            note = FailureNote.objects.db_manager(using).keep(
                options["fingerprint"],
                note=options["text"],
                muted=None if action == "note" else action == "mute",
                duration=read_option(options, "duration", read_age),
                above=read_option(options, "above", whole_number),
                by=f"command: {operator()}",
            )
            verb = {"note": "Noted on", "mute": "Muted", "unmute": "Unmuted"}[action]
            text = f": {note.note}" if note.note else "."
            said = f"{verb} failures {note.fingerprint}{text}"
            record(using, Deed.NOTE, said)
        until = f" until {note.muted_until:%Y-%m-%d %H:%M}" if note.muted_until else ""
        if note.muted_above is not None:
            until += f" up to {note.muted_above:,} open"
        muted = f" (muted{until})" if note.muted else ""
        self.stdout.write(f"{verb} {note.fingerprint}{muted}{text}")

    def _change(
        self,
        action: str,
        filters: dict[str, Any],
        using: str,
        options: dict[str, Any],
        report: Report,
    ) -> None:
        letters = selection.matching(action, filters, using=using)
        left = selection.left(action, letters, filters, options["ids"])
        named = listed(left, _LEFT)
        if left and options["shown"] is None and not letters.exists():
            raise CommandError(f"Nothing to {action}: {named}.")
        if action != "restore" and not options["json"]:
            facts = selection.summary(letters)
            if action == "discard" and facts.in_doubt:
                self.stderr.write(
                    f"{facts.in_doubt} of them are undos in doubt: discarding "
                    "confirms that you have checked them, and undone by hand what "
                    "had been done. Their flows continue."
                )
            if action == "redeliver" and facts.forgotten:
                self.stderr.write(
                    f"{facts.forgotten} of them are older than the inbox remembers "
                    f"({conf.get().RETENTION.INBOX:g} days): one that was processed "
                    f"in the meantime would be processed again."
                )
        if options["dry_run"]:
            report.dry_run(action, Shown.of(letters))
            if left:
                self.stderr.write(f"Would not {action}: {named}.")
            return
        token, why = options["shown"], options["why"]
        tolerates = read_option(options, "tolerate", whole_number)
        if tolerates is None and options.get("one_first"):
            tolerates = 0
        with transaction.atomic(using=using):
            operation = bulk.start(
                BulkKind(action),
                filters,
                using=using,
                by=f"command: {operator()}",
                why=why,
                force=options["force"],
                rate=read_option(options, "rate", float),
                shown=None if token is None else Shown.parse(token),
                tolerates=tolerates,
            )
            said = bulk.described(operation, filters, why)
            record(using, Deed(action), said, operation=operation)
        try:
            bulk.finish(operation, on_batch=self._progress)
        except KeyboardInterrupt:
            BulkOperation.objects.db_manager(using).cancel(operation.pk)
            operation.refresh_from_db(using=using)
        if self.stderr.isatty():
            self.stderr.write("")  # ends the line of the progress
        report.operation(operation)
        if operation.stopped_why:
            raise CommandError(
                f"Bulk operation {operation.pk} has stopped itself: "
                f"{operation.stopped_why}. The others are untouched."
            )
        if operation.state != BulkState.DONE:
            raise CommandError(f"Bulk operation {operation.pk} is {operation.state}.")
        undone = [named] * bool(left)
        undone += [f"{operation.skipped} skipped"] * bool(operation.skipped)
        if undone:
            raise CommandError(f"Not {PAST[action].lower()}: {', '.join(undone)}.")

    def _progress(self, operation: BulkOperation) -> None:
        if self.stderr.isatty():
            handled = operation.done + operation.skipped
            self.stderr.write(f"\r{handled:,} of {operation.total:,}", ending="")


def _add_selection(add: Callable[..., Any], ids: str) -> None:
    """Add the options that select dead letters."""
    add("ids", nargs=ids, metavar="ID", help="of a dead letter or of a message")
    add("--all", action="store_true", help="all there are")
    add("--stage", help="the stage that gave up ('': the relay)")
    add("--destination", type=not_blank)
    add("--fingerprint", type=not_blank, help="of the error")
    add("--reason", type=not_blank, help="why it was buried")
    add(
        "--older-than", type=read_age, metavar="AGE",
        help="buried at least this long ago: 30m, 12h, 7d",
    )  # fmt: skip
    add("--again", action="store_true", help="died again after a redelivery")
    add(
        "--operation", type=whole_number, metavar="N",
        help="the last bulk operation that changed them",
    )  # fmt: skip
    add("--search", type=not_blank, help="message id, correlation id or key")
    add("--json", action="store_true", help="print JSON")
    add(
        "--dry-run", action="store_true",
        help="of a change: print how many, and a token for --shown",
    )  # fmt: skip


def _add_change(add: Callable[..., Any], action: str) -> None:
    add(
        "--shown", metavar="TOKEN",
        help="the token of a --dry-run: change exactly the dead letters it counted, "
             "or none",
    )  # fmt: skip
    add("--why", default="", help="kept with the bulk operation")
    add("--rate", type=float, help="messages a second at most")
    add(
        "--force", action="store_true",
        help="redeliver also messages that their stage has processed since; discard "
             "also undos in doubt whose stage is not declared here; the bulk operation "
             "records who did so",
    )  # fmt: skip
    if action == "redeliver":
        add(
            "--one-first", action="store_true",
            help="redeliver one; when a consumer has processed it, 10, 100, the rest",
        )  # fmt: skip
        add(
            "--tolerate", type=whole_number, metavar="N",
            help="like --one-first, and stop when more than N have died again "
                 "(without it: 0)",
        )  # fmt: skip


def _add_note(add: Callable[..., Any], action: str) -> None:
    add("--fingerprint", type=not_blank, required=True, help="of the error")
    add("--text", required=action == "note", help="what is known")
    if action == "mute":
        add(
            "--for", dest="duration", type=read_age, metavar="AGE",
            help="it ends after 8h, 7d",
        )  # fmt: skip
        add(
            "--above", type=whole_number, metavar="N",
            help="it does not apply while more than N are open",
        )  # fmt: skip
