"""Parses values of the command line: a duration, an instant, a name with its value."""

from __future__ import annotations

import argparse
import datetime as dt
import re


def duration(text: str) -> dt.timedelta:
    """Return the duration of a text such as 30d, 12h, 15m or 45s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([dhms])", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: write 30d, 12h, 15m or 45s"
        )
    unit = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[found[2]]
    return dt.timedelta(**{unit: float(found[1])})


def positive(text: str) -> int:
    """Return a number that is 1 or more."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def pause(text: str) -> dt.timedelta:
    """Return a duration above zero."""
    if not (found := duration(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above zero")
    return found


def instant(text: str) -> dt.datetime:
    """Return an instant: ISO 8601, in UTC by default, or a duration ago."""
    if re.fullmatch(r"\d+(?:\.\d+)?[dhms]", text.strip()):
        return dt.datetime.now(dt.timezone.utc) - duration(text)
    try:
        given = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither 2026-01-31T12:00 nor a duration such as 7d"
        ) from error
    return given if given.tzinfo else given.replace(tzinfo=dt.timezone.utc)


def pair(text: str) -> tuple[str, str]:
    """Return the two sides of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
