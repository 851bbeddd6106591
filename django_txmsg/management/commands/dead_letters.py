"""`manage.py dead_letters`: lists, shows, redelivers, discards and annotates dead
letters.

The command calls the same functions as the admin.
"""

from __future__ import annotations

import argparse
import base64
import json
import uuid
from collections.abc import Iterable
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
from ...models.dead_letter import Resolution
from ...models.fields import clock, local
from ...models.monitoring import Deed
from ...monitoring import databases, dead, turns
from ...monitoring.alarms import listed
from ...stages import all_stages
from ..terminal import (
    DatabaseCommand,
    add_limit,
    chosen_database,
    not_blank,
    operator,
    plain,
    printable,
    printable_lines,
    read_age,
    record,
    require_home,
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
        if self._as_json:
            self._print([_facts(one) for one in rows])
            return
        for one in rows:
            again = f", died {one.deaths} times" if one.deaths > 1 else ""
            self._out.write(
                f"{one.pk:>8}  {one.message_id}  {printable(_place(one)):<24} "
                f"{local(one.created_at)}  "
                f"{_first(one.exception)}{again}"
            )
        count = letters.count()
        shown = f", {len(rows)} shown (--limit)" if count > len(rows) else ""
        self._out.write(f"{count} open dead letter{'s' * (count != 1)}{shown}.")

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
        rows = FailureNote.objects.using(letters.db)
        notes: dict[str, Any] = {note.fingerprint: note for note in rows}
        for group in groups:
            group["exception"] = errors.get(group.pop("example"), "")
            note = notes.get(group["fingerprint"])
            group["note"] = note.note if note else ""
            group["muted"] = group["fingerprint"] in muted
        if self._as_json:
            self._print(groups)
            return
        for group in groups:
            self._out.write(
                f"{group['count']:>8}  {group['fingerprint']}  "
                f"{local(group['first'])} to {local(group['last'])}  "
                f"{_first(group['exception'])}"
                f"{' (muted)' if group['muted'] else ''}"
            )
        if not groups:
            self._out.write("0 open dead letters.")

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
        if call := masking.call_shown(headers, body):
            facts["task"] = call
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
            names = ("id", "kind", "filter", "total", "done", "skipped", "state")
            self._print(
                {name: getattr(operation, name) for name in names}
                | {"skipped_why": operation.skipped_why}
            )
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
    return printable(error.partition("\n")[0][:80])


def _place(letter: DeadLetter) -> str:
    """If the message is a task, return the task's name. Otherwise return the stage, the
    relay or the broker that gave up the message."""
    task = letter.headers.get(wire.TASK) if wire.is_task(letter.destination) else None
    return str(task or dead.place(letter.stage, letter.destination, letter.reason))


_FLAGS = {
    "--all": "all there are",
    "--again": "died again after a redelivery",
    "--one-first": "redeliver one; when a consumer has processed it, 10, 100, the rest",
    "--force": "redeliver also messages that their stage has processed since; discard "
    "also undos in doubt whose stage is not declared here; the bulk operation records "
    "who did so",
    "--dry-run": "print how many, and a token for --shown",
    "--json": "print JSON",
}
_CHANGING = ("redeliver", "discard", "restore")
_NOTING = ("note", "mute", "unmute")
#: Most chosen dead letters that are named because an action leaves them.
_LEFT = 10
#: What a note would ignore, because it is about an error.
_NOT_FOR_NOTES = (
    "ids", "--dry-run", "--stage", "--destination", "--reason", "--older-than",
    "--again", "--operation", "--search", "--all", "--shown", "--rate", "--force",
)  # fmt: skip


class Command(DatabaseCommand):
    """List, show, redeliver, discard and annotate dead letters."""

    help = "Lists, shows, redelivers, discards and restores dead letters."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "action",
            choices=["list", "groups", "show", *_CHANGING, *_NOTING], metavar="ACTION",
            help="list, groups, show, redeliver, discard, restore, note, mute, unmute",
        )  # fmt: skip
        parser.add_argument(
            "ids", nargs="*", default=[], metavar="ID",
            help="of a dead letter or of a message",
        )  # fmt: skip
        for name, text in _FLAGS.items():
            parser.add_argument(name, action="store_true", help=text)
        parser.add_argument("--stage", help="the stage that gave up ('': the relay)")
        parser.add_argument("--destination", type=not_blank)
        parser.add_argument("--fingerprint", type=not_blank, help="of the error")
        parser.add_argument("--reason", type=not_blank, help="why it was buried")
        parser.add_argument("--text", help="of note and mute: what is known")
        parser.add_argument(
            "--for",
            dest="duration",
            metavar="AGE",
            help="of mute: it ends after 8h, 7d",
        )
        parser.add_argument(
            "--above", type=whole_number, metavar="N",
            help="of mute: it does not apply while more than N are open",
        )  # fmt: skip
        parser.add_argument(
            "--older-than",
            metavar="AGE",
            help="buried at least this long ago: 30m, 12h, 7d",
        )
        parser.add_argument(
            "--operation", type=whole_number, metavar="N",
            help="the last bulk operation that changed them",
        )  # fmt: skip
        parser.add_argument(
            "--search", type=not_blank, help="message id, correlation id or key"
        )
        add_limit(parser, None, help="of list and groups (default: 50)")
        parser.add_argument("--why", default="", help="kept with the bulk operation")
        parser.add_argument("--rate", type=float, help="messages a second at most")
        parser.add_argument(
            "--tolerate", type=whole_number, metavar="N",
            help="of --one-first: stop when more than N have died again (default: 0)",
        )  # fmt: skip
        parser.add_argument(
            "--shown", metavar="TOKEN",
            help="the token of a --dry-run: change exactly the dead letters it "
                 "counted, or none",
        )  # fmt: skip
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        _require_use(action, options)
        using = chosen_database(options, DeadLetter)
        report = Report(self.stdout, as_json=options["json"])
        filters = self._filters(using, options)
        if action in ("list", "groups"):
            opened = selection.matching("redeliver", filters, using=using)
            show = report.letters if action == "list" else report.groups
            show(opened, 50 if options["limit"] is None else options["limit"])
            # Ids and operations have numbers of their own in each database.
            numbered = options["ids"] or options["operation"] is not None
            if not (options["json"] or options["database"] or numbered):
                report.elsewhere(filters, using)
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

    def _filters(self, using: str, options: dict[str, Any]) -> dict[str, Any]:
        names = (
            "stage", "destination", "fingerprint", "reason", "operation", "search",
        )  # fmt: skip
        filters = {name: options[name] for name in names if options[name] is not None}
        if options["again"]:
            filters["again"] = True
        if options["older_than"] is not None:
            filters["before"] = (
                clock(using) - read_age(options["older_than"])
            ).isoformat()
        if options["ids"]:
            filters["ids"] = self._ids(using, options["ids"])
        if options["all"] and filters:
            raise CommandError("--all cannot be combined with ids or filters.")
        if options["stage"]:
            self._require_stage(options["stage"], using)
        return filters

    def _require_stage(self, name: str, using: str) -> None:
        """Raise CommandError for an unknown stage, so that a misspelt name does not
        look like a stage without dead letters."""
        letters = DeadLetter.objects.using(using)
        if letters.filter(stage=name).exists():
            return
        require_home(name, using)
        known = {one.name for one in all_stages()}
        if name in known:
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
        if not options["fingerprint"]:
            raise CommandError(f"Which error to {action}? Give its --fingerprint.")
        if action == "note" and options["text"] is None:
            raise CommandError("Give the note as --text.")
        length = options["duration"]
        with transaction.atomic(using=using):
            note = FailureNote.objects.db_manager(using).keep(
                options["fingerprint"],
                note=options["text"],
                muted=None if action == "note" else action == "mute",
                duration=None if length is None else read_age(length),
                above=options["above"],
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
        with transaction.atomic(using=using):
            operation = bulk.start(
                BulkKind(action),
                filters,
                using=using,
                by=f"command: {operator()}",
                why=why,
                force=options["force"],
                rate=options["rate"],
                shown=None if token is None else Shown.parse(token),
                tolerates=(options["tolerate"] or 0) if options["one_first"] else None,
            )
            record(
                using,
                Deed(action),
                f"{action.capitalize()} {operation.subject}"
                f"{operation.forced}"
                f"{', one first' if options['one_first'] else ''}; "
                f"filter: {selection.filter_text(filters)}"
                f"{f'; why: {why}' if why else ''}.",
                operation=operation,
            )
        try:
            bulk.finish(operation, on_batch=self._progress)
        except KeyboardInterrupt:
            BulkOperation.objects.db_manager(using).cancel(operation.pk)
            operation.refresh_from_db(using=using)
        if self.stderr.isatty():
            self.stderr.write("")
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
        if not self.stderr.isatty():
            return
        handled = operation.done + operation.skipped
        share = min(1.0, handled / operation.total) if operation.total else 1.0
        bar = "#" * round(share * 40)
        self.stderr.write(f"\r[{bar:<40}] {handled} of {operation.total}", ending="")


def _require_use(action: str, options: dict[str, Any]) -> None:
    """Raise CommandError if an option is given that the action would ignore."""
    about = f"{action} is about the error of a --fingerprint: it takes no "
    for name, used, what in (
        ("limit", action in ("list", "groups"), "--limit is only for list and groups."),
        ("duration", action == "mute", "--for is only for mute."),
        ("above", action == "mute", "--above is only for mute."),
        ("one_first", action == "redeliver", "--one-first is only for redeliver."),
        ("tolerate", options["one_first"], "--tolerate is only for --one-first."),
        *(
            (one.lstrip("-").replace("-", "_"), action not in _NOTING, f"{about}{one}.")
            for one in _NOT_FOR_NOTES
        ),
    ):
        given = options[name]
        if given is not None and given is not False and given != [] and not used:
            raise CommandError(what)
