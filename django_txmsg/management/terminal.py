"""Prints instants, and texts that others wrote, on a terminal."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone


def printable(text: str) -> str:
    """Return a text that moves no cursor, clears no screen and forges no line: control
    characters are written as Python writes them."""
    return "".join(
        one
        if one.isprintable() or one == " "
        else one.encode("unicode_escape").decode()
        for one in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines likewise, with its line ends and tabs."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def local(instant: dt.datetime) -> str:
    """Return an instant to the second, in `TIME_ZONE`, followed by that zone's name."""
    return f"{timezone.localtime(instant):%Y-%m-%d %H:%M:%S %Z}"
