"""The pages of open dead letters. One page groups the open dead letters by error, and
shows operators' notes. The other page shows which keys, flows and tenants are affected
by the dead letters that an operator has selected."""

from __future__ import annotations

import csv
import datetime as dt
import re
from collections.abc import Iterator
from typing import Any

from django.contrib import messages
from django.db import router
from django.db.models import Count, F, Max, QuerySet, TextField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    StreamingHttpResponse,
)

from .. import conf, wire
from ..dead_letters import masking, selection
from ..dead_letters.selection import Shown, filter_text
from ..errors import TxmsgError
from ..models import DeadLetter, FailureNote
from ..models.bulk_operation import BulkKind
from ..models.fields import MessageKey, clock
from ..models.monitoring import Deed, Done
from ..monitoring import dead
from . import display
from .audit import audit, audited, perform
from .base import ReadOnlyAdmin, given, insist, may, operator
from .bulk import hidden_fields, read_filter

#: Most groups on a page.
MOST_GROUPS = 200

#: An error is marked as new if its first dead letter is not older.
NEW = dt.timedelta(hours=1)

#: How long a mute may last, by the form's words; any other word: for ever.
MUTES = {
    "1 hour": dt.timedelta(hours=1),
    "8 hours": dt.timedelta(hours=8),
    "1 day": dt.timedelta(days=1),
    "1 week": dt.timedelta(weeks=1),
}

#: Values that are shown of each kind, those with the most dead letters.
MOST_VALUES = 10
#: Where a spreadsheet would begin to execute a cell. With another separator than the
#: comma, a spreadsheet finds further cells in a cell.
_FORMULA = re.compile(r"""(^|[;\t\r\n])(?=[ "]*[=+\-@\t\r])""")


def groups(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show open dead letters grouped by error, the largest groups first."""
    insist(admin.has_view_permission(request))
    using = router.db_for_write(DeadLetter)
    groups = grouped(using)
    context = {
        "groups": groups[:MOST_GROUPS],
        "mutes": list(MUTES),
        "more": max(0, len(groups) - MOST_GROUPS),
        "total": sum(group["count"] for group in groups),
        "muted": sum(group["count"] for group in groups if group["muted"]),
    }
    return admin.show(request, "groups", "Dead letters", context)


def note(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Store an operator's note about an error, and mute the error if requested."""
    may_note = may(request, "redeliver_deadletter")
    insist(may_note and admin.has_view_permission(request))
    using = router.db_for_write(FailureNote)
    fingerprint, lasts = given(request, "fingerprint"), request.POST.get("for", "")
    duration = MUTES.get(lasts)
    known = FailureNote.objects.using(using).filter(fingerprint=fingerprint).first()
    if lasts == "unchanged" and known and known.muted_until:
        duration = known.muted_until - clock(using)

    def change() -> Done:
        note = FailureNote.objects.db_manager(using).keep(
            fingerprint,
            note=given(request, "note"),
            muted=request.POST.get("muted") == "1",
            duration=duration,
            above=_limit(given(request, "above")),
            by=operator(request),
            seen=request.POST.get("seen"),
        )
        ends = known is not None and known.muted and not note.muted
        said = "Muted" if note.muted else "Unmuted" if ends else "Noted on"
        if note.muted_until:
            said += f" until {note.muted_until:%Y-%m-%d %H:%M} UTC"
        if note.muted_above is not None:
            said += f" up to {note.muted_above:,} open"
        return note, Deed.NOTE, f"{said} failures {note.fingerprint}: {note.note}"

    perform(request, using, change, refusal="")
    return admin.led_to_list(request)


def affected(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponseBase:
    """Show who is affected by the open dead letters that match a filter (GET), or
    export these dead letters as CSV (POST)."""
    exports = request.method == "POST"
    may_see = admin.has_view_permission(request)
    insist(may_see and (not exports or may(request, "export_deadletter")))
    using = router.db_for_write(DeadLetter)
    try:
        filters = read_filter(request.POST if exports else request.GET)
        letters = selection.matching(BulkKind.DISCARD, filters, using=using)
        shown = Shown.of(letters)
    except (TxmsgError, ValueError) as error:
        messages.error(request, str(error))
        return admin.led_to_list(request)
    letters, said = shown.bound(letters), filter_text(filters)
    newest = letters.order_by("-pk").first()
    if newest is None:
        messages.warning(request, "No open dead letter matches.")
        return admin.led_to_list(request)
    if exports:
        with audited(using):
            text = f"Exported {shown.count:,} dead letters as CSV; filter: {said}."
            audit(request, newest, Deed.EXPORT, text, count=shown.count)
        name = {"Content-Disposition": 'attachment; filename="dead-letters.csv"'}
        lines = _as_csv(letters)
        return StreamingHttpResponse(lines, content_type="text/csv", headers=name)
    context = {
        "count": shown.count,
        "parts": _affected(letters),
        "filters": said,
        "fields": hidden_fields(filters),
    }
    return admin.show(request, "affected", "Who is affected", context)


def _limit(text: str) -> int | None:
    """Return the limit of a mute. An empty text means no limit; any other text that is
    not a limit must not mean that."""
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise TxmsgError(
            f"The limit of a mute is a number from 1 to 999999999, not {text!r}."
        )
    return int(text)


def grouped(using: str) -> list[dict[str, Any]]:
    """Return groups of open dead letters, one group for each fingerprint. The first
    groups, which a page shows, have an example and the operator's note.

    The largest groups come first, and muted groups last.
    """
    groups: dict[str, dict[str, Any]] = {}
    for one in dead.by_error(using):
        group = groups.setdefault(
            one.fingerprint,
            {
                "fingerprint": one.fingerprint, "count": 0, "places": {},
                "first": one.first, "last": one.last, "example": 0, "deaths": 0,
                "muted": one.muted,
            },
        )  # fmt: skip
        group["count"] += one.count
        group["first"] = min(group["first"], one.first)
        group["last"] = max(group["last"], one.last)
        group["example"] = max(group["example"], one.example)
        group["deaths"] = max(group["deaths"], one.deaths)
        group["places"][one.place] = group["places"].get(one.place, 0) + one.count
    now = clock(using)
    ordered = sorted(groups.values(), key=lambda one: (one["muted"], -one["count"]))
    shown = ordered[:MOST_GROUPS]
    notes = {
        note.fingerprint: note
        for note in FailureNote.objects.using(using).filter(
            fingerprint__in=[group["fingerprint"] for group in shown]
        )
    }
    letters: Any = DeadLetter.objects.using(using).defer("body")
    examples = letters.in_bulk([group["example"] for group in shown])
    for group in shown:
        group["new"] = group["first"] > now - NEW and group["deaths"] == 1
        note = group["note"] = notes.get(group["fingerprint"])
        # Even if more are open than the mute allows, so that a new note keeps it.
        group["has_mute"] = (
            note is not None
            and note.muted
            and (note.muted_until is None or note.muted_until > now)
        )
        letter = group["letter"] = examples.get(group["example"])
        group["task"] = display.task(letter) if letter else ""
        group["error"] = (letter.exception or letter.reason) if letter else ""
    return ordered


def _affected(letters: QuerySet[DeadLetter]) -> list[dict[str, Any]]:
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
    return [_values(every, count, kind, value, header) for kind, value, header in kinds]


def _values(
    letters: QuerySet[DeadLetter], count: int, kind: str, value: Any, header: str
) -> dict[str, Any]:
    """Return the values of one kind (key, flow or tenant) in dead letters: how many
    different values there are, how many dead letters have none, and the values with the
    most dead letters."""
    have = letters.annotate(value=value).filter(value__gt="")
    rows: Any = have.values("value").annotate(n=Count("pk"), example=Max("pk"))
    found = list(rows.order_by("-n", "value")[:MOST_VALUES])
    examples = letters.only("destination", "headers", "content_type").in_bulk(
        [row["example"] for row in found] if header else []
    )
    totals = have.aggregate(distinct=Count("value", distinct=True), have=Count("pk"))
    most = []
    for row in found:
        text = row["value"]
        if header:
            text = _masked(examples[row["example"]]).get(header, masking.MASKED)
        most.append((text, row["n"]))
    without = count - totals["have"]
    return {
        "kind": kind, "distinct": totals["distinct"], "without": without, "most": most,
    }  # fmt: skip


def _as_csv(letters: QuerySet[DeadLetter]) -> Iterator[str]:
    """Yield a header line, and then one CSV line for each dead letter. The line shows
    which key, flow and tenant the dead letter affects. The key and the tenant come from
    the message's headers, and are masked. The line contains no body, no error text and
    no other headers."""
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
        yield write([_FORMULA.sub(r"\1'", one) for one in cells])


class _Line:
    """A file for `csv.writer` that returns each line instead of storing it."""

    def write(self, line: str) -> str:
        return line


def _masked(letter: DeadLetter) -> dict[str, str]:
    headers, _ = masking.shown(
        letter.destination, letter.headers, None, letter.content_type
    )
    return {name: str(value) for name, value in headers.items()}
