"""Formats counts, ages, states and errors for all pages.

Values from messages go through `format_html`, never through `mark_safe`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import wire
from ..monitoring.lengths import amount as amount
from ..monitoring.lengths import duration as duration
from ..monitoring.turns import at_least as at_least
from ..monitoring.waiting import capped as capped

#: The states by the colour of their badge. The word is always shown too. Other words
#: are quiet.
_WORDS = {
    "wait": "pending, received, waiting, waits for its rate",
    "busy": "in flight, running",
    "good": "alive, answered, dispatched, done, handed over, processed, redelivered, "
    "replaced, resolved",
    "warn": "blocked, failed, going back, needs newer code, new, paused, redelivering, "
    "undoing",
    "bad": "dead, failed again, firing, full, no consumer, open, overdue, silent, "
    "undo stuck",
}
TONES = {word: tone for tone, words in _WORDS.items() for word in words.split(", ")}


def column(title: str, show: Callable[[Any], object], of: str = "") -> Any:
    """Return a column for an admin list. For each row, the column shows the attribute
    `of`, by default the row itself, formatted by `show`. None is shown as "-"."""

    @admin.display(description=title)
    def shown(_: object, row: object) -> object:
        value = getattr(row, of) if of else row
        return "-" if value is None else show(value)

    return shown


def badge(word: object) -> SafeString:
    """Return a state as a coloured badge."""
    text = str(word)
    return format_html(
        '<span class="txmsg-badge txmsg-{}">{}</span>', TONES.get(text, "quiet"), text
    )


def exact(count: int) -> str:
    """Return a count with separators: "1,234"."""
    return f"{count:,}"


def moment(instant: dt.datetime) -> str:
    """Return a time with milliseconds, in the local time zone."""
    here = timezone.localtime(instant)
    shown = date_format(here, "Y-m-d H:i:s")
    return f"{shown}.{here.microsecond // 1000:03d} {here.tzname()}"


def age(instant: dt.datetime | None, now: dt.datetime | None = None) -> SafeString:
    """Return the age of an instant as a `<time>` element: "5 min". The element's title
    is the instant."""
    if instant is None:
        return format_html("{}", "-")
    length = (now or timezone.now()) - instant
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        instant.isoformat(),
        moment(instant),
        f"in {duration(-length)}" if length < dt.timedelta() else duration(length),
    )


def ago(instant: dt.datetime | None, now: dt.datetime | None = None) -> SafeString:
    """Return the age of an instant with "ago": "5 min ago"."""
    if instant is None:
        return format_html("{}", "never")
    now = now or timezone.now()
    return format_html("{}{}", age(instant, now), "" if instant > now else " ago")


def mono(text: object, title: object = "") -> SafeString:
    """Return a text as monospaced HTML."""
    return format_html('<code class="txmsg-id" title="{}">{}</code>', title, text)


def mono_cut(text: str, most: int) -> SafeString:
    """Return at most `most` characters of a text as monospaced HTML. Its title is the
    whole text."""
    return mono(cut(text, most), text)


def as_json(value: object) -> SafeString:
    """Return a value as indented JSON."""
    return format_html("<pre>{}</pre>", json.dumps(value, indent=2))


def short_id(message_id: Any) -> SafeString:
    """Return the end of a message id. The beginning would not help, because ids that
    are made within minutes of each other begin alike."""
    text = str(message_id)
    return mono(f"…{text[-12:]}", text)


def first_line(text: str, at: int = 0) -> str:
    """Return the first nonempty line, shortened. With `at`, return the nonempty line
    with this index."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return cut(lines[at]) if lines else ""


def last_line(text: str) -> str:
    """Return the last nonempty line, shortened. In a traceback, this line is the
    error."""
    return first_line(text, -1)


def tried(attempts: str, error: str) -> SafeString:
    """Return a number of attempts. Below it, show the last line of the error."""
    if not error:
        return format_html("{}", attempts)
    return format_html(
        '{}<small class="txmsg-error">{}</small>', attempts, last_line(error)
    )


def task(row: Any) -> str:
    """Return the dotted path of the task from a row's headers, or "" if the row is not
    a task."""
    headers = row.headers or {}
    return str(headers.get(wire.TASK, "")) if wire.is_task(row.destination) else ""


def named(place: str, task: str | None) -> SafeString:
    """Return the name of a place. If the message is a task, show the task's name
    below."""
    if not task:
        return format_html("{}", place)
    return format_html("{}<br><small>{}</small>", place, cut(task))


def cut(text: str, most: int = 140) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
