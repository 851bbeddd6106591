"""A condition on the rows of one table, which any SQL statement can ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter


@dataclass(frozen=True)
class Rule:
    """SQL with names in braces: columns of the row, and values that who asks gives.

    Rules are joined by `&`, `|` and `~`. A text whose outermost word is OR stands in
    parentheses.
    """

    text: str

    def sql(self, row: str = "", **values: str) -> str:
        """Return the condition on the row that a statement calls `row`, with `values`
        as SQL: an instant's is a clock, a literal or a parameter."""
        of = f"{row}." if row else ""
        return "".join(
            text + (values.get(name, f"{of}{name}") if name else "")
            for text, name in self.parts()
        )

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield the pieces of text, each with the name that follows it, or ""."""
        for text, name, _, _ in Formatter().parse(self.text):
            yield text, name or ""

    def __and__(self, other: Rule) -> Rule:
        return Rule(f"{self.text} AND {other.text}")

    def __or__(self, other: Rule) -> Rule:
        return Rule(f"({self.text} OR {other.text})")

    def __invert__(self) -> Rule:
        return Rule(f"NOT ({self.text})")
