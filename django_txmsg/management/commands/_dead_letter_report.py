"""The output of `manage.py dead_letters`, for people or as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from django.core.management.base import OutputWrapper
from django.db.models import Count, Max, Min

from ... import wire
from ...dead_letters import masking
from ...dead_letters.selection import Shown
from ...models import BulkOperation, DeadLetter, FailureNote
from ...monitoring import turns
from ..terminal import printable, printable_lines

_PAST = {"redeliver": "Redelivered", "discard": "Discarded", "restore": "Restored"}


class Report:
    """Prints dead letters and the results of actions on them."""

    def __init__(self, out: OutputWrapper, *, as_json: bool) -> None:
        self._out, self._as_json = out, as_json

    def letters(self, letters: Any, limit: int) -> None:
        """Print the newest open dead letters, one a line."""
        rows = list(letters.defer("body", "traceback").order_by("-pk")[:limit])
        if self._as_json:
            self._print([_facts(one) for one in rows])
            return
        for one in rows:
            again = f", died {one.deaths} times" if one.deaths > 1 else ""
            self._out.write(
                f"{one.pk:>8}  {one.message_id}  {printable(_place(one)):<24} "
                f"{one.created_at:%Y-%m-%d %H:%M:%S}  "
                f"{_first(one.exception)}{again}"
            )
        count = letters.count()
        shown = f", {len(rows)} shown (--limit)" if count > len(rows) else ""
        self._out.write(f"{count} open dead letter{'s' * (count != 1)}{shown}.")

    def groups(self, letters: Any) -> None:
        """Print open dead letters by error, the largest groups first."""
        groups = list(
            letters.values("fingerprint")
            .annotate(
                count=Count("pk"), first=Min("created_at"), last=Max("created_at")
            )
            .annotate(example=Max("pk"))
            .order_by("-count")
        )
        errors = dict(
            DeadLetter.objects.using(letters.db)
            .filter(pk__in=[group["example"] for group in groups])
            .values_list("pk", "exception")
        )
        notes = FailureNote.objects.using(letters.db).in_bulk(field_name="fingerprint")
        for group in groups:
            group["exception"] = errors.get(group.pop("example"), "")
            note = notes.get(group["fingerprint"])
            group["note"] = note.note if note else ""
            group["muted"] = note is not None and note.muted
        if self._as_json:
            self._print(groups)
            return
        for group in groups:
            self._out.write(
                f"{group['count']:>8}  {group['fingerprint']}  "
                f"{group['first']:%Y-%m-%d %H:%M} to {group['last']:%Y-%m-%d %H:%M}  "
                f"{_first(group['exception'])}"
                f"{' (muted)' if group['muted'] else ''}"
            )

    def shown(self, letters: Iterable[DeadLetter]) -> None:
        """Print dead letters whole; as JSON one object, or an array of several."""
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
        done = operation.done
        text = f"{_PAST[operation.kind]} {done:,} message{'s' * (done != 1)}."
        if operation.skipped:
            text += f" {operation.skipped} skipped:"
        self._out.write(text)
        for pk, why in operation.skipped_why.items():
            self._out.write(f"  {pk}: {printable(why)}")

    def _print(self, value: Any) -> None:
        self._out.write(_json(value, indent=2, ensure_ascii=False))


def _facts(letter: DeadLetter) -> dict[str, Any]:
    names = (
        "id", "message_id", "stage", "broker", "destination", "correlation_id",
        "reason", "exception", "fingerprint", "attempts", "deaths",
        "message_created_at", "created_at", "resolution", "resolved_at",
        "resolved_by", "replaced_by",
    )  # fmt: skip
    return {name: getattr(letter, name) for name in names}


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, default=str, **options)


def _first(error: str) -> str:
    """Return the first line of an error, as far as a list shows it."""
    return printable(error.partition("\n")[0][:80])


def _place(letter: DeadLetter) -> str:
    """Return the name of a task, or the stage that gave up."""
    task = letter.headers.get(wire.TASK) if wire.is_task(letter.destination) else None
    return str(task or letter.stage or "relay")
