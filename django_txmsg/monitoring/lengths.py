"""Durations and sizes as text, the same on every page and on the terminal.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import datetime as dt

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


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
