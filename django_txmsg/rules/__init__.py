"""The states of rows, defined once in SQL, for the app and for its pipeline.

A rule is a condition on the rows of a table, for use in any SQL statement. The
conditions for a lease are here, because several tables have leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True)
class Rule:
    """A condition in SQL. Each name in braces is a column of the row, or a value that
    the caller supplies.

    Combine rules with `&`, `|` and `~`. Put parentheses around a text whose outermost
    operator is OR.
    """

    text: str

    def sql(self, row: str = "", **values: str) -> str:
        """Return the condition for the row with the alias `row`. `values` maps a name
        to the SQL that replaces it: the clock, a literal, or a parameter."""
        of = f"{row}." if row else ""
        return "".join(
            text + (values.get(name, f"{of}{name}") if name else "")
            for text, name in self.parts()
        )

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield the text in pieces, each with the name that follows the piece, or with
        "" if none follows."""
        for text, name, _, _ in Formatter().parse(self.text):
            yield text, name or ""

    def __and__(self, other: Rule) -> Rule:
        return Rule(f"{self.text} AND {other.text}")

    def __or__(self, other: Rule) -> Rule:
        return Rule(f"({self.text} OR {other.text})")

    def __invert__(self) -> Rule:
        return Rule(f"NOT ({self.text})")


#: A worker holds it.
LEASED = Rule("{lease_until} >= {now}")

#: No worker holds it, or the worker's lease has ended.
NOT_LEASED = Rule("({lease_until} IS NULL OR {lease_until} < {now})")
