"""Shows whom dead letters affect: their keys, flows and tenants, as counts and as
CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, F, Max, QuerySet, TextField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from .. import conf, wire
from ..models import DeadLetter
from ..models.fields import MessageKey
from . import masking

#: Values that are shown of each kind, those with the most dead letters.
MOST = 10
#: Characters with which a cell begins that a spreadsheet would execute.
_FORMULA = tuple("=+-@\t\r")


@dataclass
class Affected:
    """Values of one kind (key, flow or tenant) in dead letters: how many different
    values there are, how many dead letters have none, and the values with the most dead
    letters."""

    kind: str
    distinct: int
    without: int
    most: list[tuple[str, int]] = field(default_factory=list)


def read(letters: QuerySet[DeadLetter]) -> list[Affected]:
    """Return the keys and flows of dead letters. If the setting TENANT_HEADER names a
    header, also return their tenants. Values of headers are masked."""
    tenant = conf.get().TENANT_HEADER
    kinds: list[tuple[str, Any, str]] = [
        ("key", MessageKey("headers"), wire.KEY),
        ("flow", F("correlation_id"), ""),
    ]
    if tenant:
        value = Cast(KeyTextTransform(tenant, "headers"), TextField())
        kinds.append(("tenant", value, tenant))
    every = letters.order_by()
    count = every.count()
    return [_read(every, count, kind, value, header) for kind, value, header in kinds]


def _read(
    letters: QuerySet[DeadLetter], count: int, kind: str, value: Any, header: str
) -> Affected:
    have = letters.annotate(value=value).filter(value__gt="")
    rows: Any = have.values("value").annotate(n=Count("pk"), example=Max("pk"))
    found = list(rows.order_by("-n", "value")[:MOST])
    examples = letters.only("destination", "headers", "content_type").in_bulk(
        [row["example"] for row in found] if header else []
    )
    totals = have.aggregate(distinct=Count("value", distinct=True), have=Count("pk"))
    affected = Affected(kind, totals["distinct"], count - totals["have"])
    for row in found:
        text = row["value"]
        if header:
            text = _masked(examples[row["example"]]).get(header, masking.MASKED)
        affected.most.append((text, row["n"]))
    return affected


def as_csv(letters: QuerySet[DeadLetter]) -> Iterator[str]:
    """Yield one CSV line for each dead letter. The line shows whom the dead letter
    affects. Bodies, errors and all other headers are not shown. Values of headers are
    masked."""
    tenant = conf.get().TENANT_HEADER
    names = ["message_id", "stage", "destination", "reason", "died", "key", "flow"]
    write = csv.writer(_Line()).writerow
    yield write([*names, "tenant"] if tenant else names)
    needed = letters.only(
        "message_id", "stage", "destination", "reason", "created_at", "headers",
        "content_type", "correlation_id",
    )  # fmt: skip
    for letter in needed.order_by("pk").iterator(chunk_size=1000):
        headers = _masked(letter)
        cells = [
            str(letter.message_id), letter.stage, letter.destination, letter.reason,
            letter.created_at.isoformat(), headers.get(wire.KEY, ""),
            letter.correlation_id, *([headers.get(tenant, "")] if tenant else []),
        ]  # fmt: skip
        # A quote keeps spreadsheets from executing what a sender wrote.
        yield write([f"'{one}" if one.startswith(_FORMULA) else one for one in cells])


class _Line:
    """A file for `csv.writer` that returns each line instead of storing it."""

    def write(self, line: str) -> str:
        return line


def _masked(letter: DeadLetter) -> dict[str, str]:
    headers, _ = masking.shown(
        letter.destination, letter.headers, None, letter.content_type
    )
    return {name: str(value) for name, value in headers.items()}
