"""Instants in headers: RFC 3339 in UTC."""

from __future__ import annotations

import datetime as dt


def format_instant(instant: dt.datetime) -> str:
    """Return an aware instant as RFC 3339 in UTC, with microseconds."""
    return instant.astimezone(dt.timezone.utc).isoformat(timespec="microseconds")


def parse_instant(text: str) -> dt.datetime:
    """Return the aware instant of an RFC 3339 text.

    Raises ValueError if the text is malformed, the instant is naive, or the instant is
    so close to an end of the calendar that another time zone cannot express it.
    """
    instant = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if instant.tzinfo is None:
        raise ValueError(f"instant without a time zone: {text!r}")
    if not dt.MINYEAR < instant.year < dt.MAXYEAR:
        raise ValueError(f"instant at an end of the calendar: {text!r}")
    return instant
