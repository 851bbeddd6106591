"""Durations and sizes as text, the same on every page and on the terminal. Also reads
the durations and numbers that operators give as options, and makes texts printable.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
#: Days of the longest duration. A database cannot store every earlier instant.
LONGEST = 36_500
#: The largest number of an option: an integer of a JVM and of a database.
MOST = 2**31 - 1


def duration(seconds: float | dt.timedelta | None) -> str:
    """Return a duration as text, in its two largest units: "0.4 ms", "2 min 5 s"."""
    if seconds is None:
        return "-"
    if isinstance(seconds, dt.timedelta):
        seconds = seconds.total_seconds()
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.01:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for unit, size in _UNITS:
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
            if len(parts) == 2:
                break
        elif parts:
            break
    return " ".join(parts)


def amount(size: int) -> str:
    """Return a number of bytes as text, in its largest unit: "300 bytes", "1.5 MB"."""
    if size < 1000:
        return f"{size} byte{'s' * (size != 1)}"
    for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1):
        if size < 1000 ** (power + 1) or unit == "TB":
            break
    return f"{size / 1000**power:.1f} {unit}"


def whole_number(text: str) -> int:
    """Return the value of an option. Refuse anything but a whole number of at least
    0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive(text: str) -> int:
    """Return the value of an option. Refuse anything but a whole number from 1 to
    MOST."""
    if not 1 <= whole_number(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be 1 or more, up to {MOST:,}")
    return int(text)


def read_age(text: str) -> dt.timedelta:
    """Return the value of an option, a duration like 45s, 30m, 12h, 7d or 2w. Refuse
    any other form, and a duration of more than a hundred years."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: write one like 30m, 12h or 7d"
        )
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
    days = float(match[1]) * units[match[2]] / units["d"]
    if days > LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too long: at most {LONGEST}d are possible"
        )
    return dt.timedelta(days=days)


def printable(text: str) -> str:
    """Escape control characters as in Python, so that the text cannot move the cursor,
    clear the screen or forge a line."""
    return "".join(
        one
        if one.isprintable() or one == " "
        else one.encode("unicode_escape").decode()
        for one in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines without control characters, except line ends and
    tabs."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in lines)
