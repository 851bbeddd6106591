"""What a stranger wrote, on a terminal: an error, a header, a body, a name."""

from __future__ import annotations


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
