"""Ages in the options of commands."""

from __future__ import annotations

import datetime as dt
import re

from django.core.management.base import CommandError


def read_age(text: str) -> dt.timedelta:
    """Return an age like 30m, 12h or 7d. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise CommandError(f"{text!r} is no age: write one like 30m, 12h or 7d.")
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    return dt.timedelta(**{units[match[2]]: float(match[1])})
