"""The OPTIONS of a backend, and their errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..envelope.redelivery import MAX_REDELIVERIES


@dataclass(frozen=True)
class Options:
    """OPTIONS of a backend in the TASKS setting."""

    TRANSACTION: Literal["outbox", "none"] = "outbox"
    """"outbox": a task and its result commit together, once. "none": a task runs
    outside of any transaction, for minutes if necessary, and again if its worker is
    lost."""
    MAX_REDELIVERIES: int = 0
    """How often a failed task is tried again, with the pauses of TXMSG["REDELIVERY"],
    before it is FAILED."""
    CONCURRENCY: int = 1
    """How many tasks of a queue one process runs at the same time."""
    BROKER: str = "default"
    """The alias in TXMSG["BROKERS"] that tasks travel through."""
    USING: str | None = None
    """The alias of the database with tasks and results; None: the outbox's."""
    MODULES: Sequence[str] | None = None
    """The modules and packages of the tasks that may be enqueued and run here; a worker
    imports them. None: any package that this process has imported."""

    def allows(self, path: str) -> bool:
        """Return whether this backend accepts the task of this path."""
        return self.MODULES is None or self.names(path)

    def names(self, path: str) -> bool:
        """Return whether MODULES include the task of this path."""
        return any(path.startswith(f"{one}.") for one in self.MODULES or ())


def problems(given: object) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid option, and why."""
    if not isinstance(given, Mapping):
        yield "", f"must be a dict, not {type(given).__name__}"
        return
    known = Options.__dataclass_fields__
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(str(name).upper(), known, 1, 0.5)
            hint = f'did you mean "{close[0]}"?' if close else "known: "
            yield str(name), f"is not an option; {hint}{'' if close else _names(known)}"
        elif why := _why_not(name, value):
            yield name, f"must be {why}, not {value!r}"


def _why_not(name: str, value: Any) -> str:
    if name == "TRANSACTION":
        return "" if value in ("outbox", "none") else '"outbox" or "none"'
    if name in ("MAX_REDELIVERIES", "CONCURRENCY"):
        low = int(name == "CONCURRENCY")
        number = isinstance(value, int) and not isinstance(value, bool)
        if number and low <= value <= MAX_REDELIVERIES:
            return ""
        return f"an integer from {low} to {MAX_REDELIVERIES}"
    if name in ("USING", "MODULES") and value is None:
        return ""
    if name == "MODULES":
        listed = isinstance(value, list | tuple) and bool(value)
        if listed and all(isinstance(one, str) and one for one in value):
            return ""
        return 'a list of modules, such as ["shop.tasks"]'
    return "" if isinstance(value, str) and value else "an alias"


def _names(known: Any) -> str:
    return ", ".join(sorted(known))
