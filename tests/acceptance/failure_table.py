"""The expected result of every fault at every step, and its table in the docs.

python -m tests.acceptance.failure_table     writes the table
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: The numbered steps of each mode, in order; a process can stand at each of them.
STEPS = {
    "outbox": [
        "received",
        "recorded",
        "begun",
        "handled",
        "before the commit",
        "committed",
        "acknowledged",
    ],
    "best_effort_1pc": [
        "received",
        "begun",
        "handled",
        "broker proven alive",
        "committed",
        "broker committed",
    ],
    "broker_only": ["received", "begun", "handled", "broker committed"],
}


FAULTS = [
    "kill -9 of the worker",
    "connection to the broker cut",
    "broker killed",
    "database backend terminated",
]


@dataclass(frozen=True)
class Outcome:
    """The result for one message that the fault has hit."""

    effects: int
    """Rows that its handler has left in the database."""
    sent: int
    """Different messages that arrived downstream because of it."""
    copies: int
    """Arrivals of them, which the next inbox reduces to `sent`."""
    dead: int = 0


PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "failures.md"
BEGIN = "<!-- the table: written by tests/acceptance/failure_table.py -->"
END = "<!-- the end of the table -->"

#: The message is processed once, and what it sends arrives once.
ONCE = Outcome(effects=1, sent=1, copies=1)
#: The handler ran twice, and both runs left their effect; what it sent, arrived once.
TWICE = Outcome(effects=2, sent=1, copies=1)
#: Both runs' messages arrived, with the same ids: the next inbox drops the copies.
COPIED = Outcome(effects=2, sent=1, copies=2)
#: The same of a stage that uses no database.
SENT_ONCE = Outcome(effects=0, sent=1, copies=1)
SENT_TWICE = Outcome(effects=0, sent=1, copies=2)

WORDS = {
    ONCE: "once",
    TWICE: "**handler's effect twice**, messages sent once",
    COPIED: "**handler's effect twice**, messages sent twice with the same ids",
    SENT_ONCE: "once",
    SENT_TWICE: "messages sent twice with the same ids",
}

#: (mode, fault) → step → the outcomes that may be seen.
EXPECTED: dict[tuple[str, str], dict[str, list[Outcome]]] = {
    (mode, fault): dict.fromkeys(
        STEPS[mode], [SENT_ONCE] if mode == "broker_only" else [ONCE]
    )
    for mode in STEPS
    for fault in FAULTS
}

# Best effort cannot prevent a failure between the database's commit and the broker's.
for fault in FAULTS[:3]:
    EXPECTED["best_effort_1pc", fault]["committed"] = [TWICE]
for fault in FAULTS[1:3]:
    # The broker was proven alive, and died before its own commit.
    EXPECTED["best_effort_1pc", fault]["broker proven alive"] = [TWICE]

#: (mode, fault, step) → an outcome that RabbitMQ permits too. It confirms a COMMIT
#: before the acknowledgements in it are on its disk.
ON_RABBITMQ_ALSO = {
    ("best_effort_1pc", "broker killed", "broker committed"): COPIED,
    ("broker_only", "broker killed", "broker committed"): SENT_TWICE,
}


def expected(mode: str, fault: str, step: str, broker: str) -> list[Outcome]:
    """Return the outcomes that the test accepts on this broker."""
    outcomes = EXPECTED[mode, fault][step]
    also = ON_RABBITMQ_ALSO.get((mode, fault, step))
    return [*outcomes, also] if also and broker.startswith("rabbitmq") else outcomes


def cell(mode: str, fault: str, step: str) -> str:
    """Return the text of this case's table cell in the docs."""
    words = " or ".join(WORDS[one] for one in EXPECTED[mode, fault][step])
    also = ON_RABBITMQ_ALSO.get((mode, fault, step))
    if also is None:
        return words
    return f"{words}. On RabbitMQ a second result is possible: {WORDS[also]}"


def table() -> str:
    """Return the tables as Markdown, with a section for each mode."""
    lines: list[str] = []
    for mode, steps in STEPS.items():
        lines += [
            f"### `{mode}`",
            "",
            f"| step at which it strikes | {' | '.join(FAULTS)} |",
            "|---" * (len(FAULTS) + 1) + "|",
        ]
        for number, step in enumerate(steps, 1):
            cells = [cell(mode, fault, step) for fault in FAULTS]
            lines.append(f"| {number}. {step} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """Return the docs page with the new tables in it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
