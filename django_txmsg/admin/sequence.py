"""Draws a run as a sequence diagram of three lines. The left line is the caller, the
middle line is the flow, and the right line is all other participants. Each step is a
box that shows how the state changed. Three lines fit the screen of a phone."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .. import wire
from ..dead_letters import masking
from ..flows.going import BACK
from ..models import FlowStep, OutboxMessage, Run

#: Most steps that are drawn, the newest; and most lines of a box.
MOST, LINES = 100, 12
#: Heights, in the units of the drawing: from a box to the end of its arrow, of a box's
#: head, of one of its lines, and below the last line.
ARROW, HEAD, ROW, GAP = 26, 22, 14, 8
CALLER, FLOW, OTHERS = "caller", "flow", "others"


@dataclass
class Box:
    """The box of one step, with the changes of the state, and the messages that come to
    it and leave it. A message has the line at the other end of its arrow, and a
    label."""

    step: FlowStep
    y: int
    lines: list[tuple[str, str]]
    came: tuple[str, str]
    leaves: tuple[str, str] | None

    @property
    def height(self) -> int:
        """The height of the box."""
        return HEAD + ROW * len(self.lines) + (GAP if self.lines else 0)

    @property
    def end(self) -> int:
        """Where the box ends, with the arrow below it."""
        return self.y + self.height + (ARROW if self.leaves else 0)


@dataclass
class Sequence:
    """The diagram."""

    boxes: list[Box]
    height: int
    more: int
    """How many earlier steps are not drawn."""


def sequence(run: Run, *, signals: Collection[str], states: bool) -> Sequence:
    """Return the diagram of a run. `signals` are the names of the flow's signals. The
    boxes show the state only if `states` is true."""
    using = run._state.db
    rows = FlowStep.objects.using(using).filter(run=run).order_by("-pk")
    newest = list(rows[: MOST + 1])
    steps, before = newest[:MOST][::-1], newest[MOST:]
    sent = OutboxMessage.objects.using(using).filter(
        message_id__in=[one.message_id for one in steps]
    )
    types = {
        one.message_id: one.headers.get(wire.TYPE, "") for one in sent.defer("body")
    }
    state: Any = masking.of_run(run.flow, before[0].state) if before and states else {}
    waits, end, boxes = before[0].then if before else "", ARROW, list[Box]()
    for step in steps:
        lines: list[tuple[str, str]] = []
        if states:
            after = masking.of_run(run.flow, step.state)
            lines, state = difference(state, after), after
        came = _came(step, waits, types, signals, first=not boxes and not before)
        waits = step.then or waits
        leaves = _leaves(waits) if step.then not in ("", "itself") else None
        boxes.append(Box(step, end + ARROW, lines, came, leaves))
        end = boxes[-1].end
    return Sequence(boxes, end + ARROW, rows.count() - len(steps))


def difference(before: Any, after: Any) -> list[tuple[str, str]]:
    """Return the fields that differ between two states, as the lines of a diff. Each
    line has its kind ("added", "removed" or "place")."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return [] if before == after else [("added", f"+ {_text(after)}")]
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name in before and name in after and before[name] == after[name]:
            continue
        if name in before:
            lines.append(("removed", f"- {name}: {_text(before[name])}"))
        if name in after:
            lines.append(("added", f"+ {name}: {_text(after[name])}"))
    more = len(lines) - LINES
    return lines if more <= 0 else [*lines[:LINES], ("place", f"and {more} more lines")]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _came(
    step: FlowStep,
    waits: str,
    types: Mapping[uuid.UUID, str],
    signals: Collection[str],
    *,
    first: bool,
) -> tuple[str, str]:
    """Return two values for the message that started a step: the line of the diagram
    at which the message's arrow begins, and the label of the arrow."""
    kind, _, place = waits.partition(" ")
    of = types.get(step.message_id, "")
    if first:
        return CALLER, "start"
    if step.step == BACK:
        return CALLER, "an operator"
    if step.step in signals:
        return CALLER, "signal"
    if of.startswith("txmsg.TimedOut"):
        return FLOW, "deadline passed"
    if of.startswith("txmsg.Dead"):
        return OTHERS, "given up"
    if of.startswith("txmsg.Cancelled"):
        return CALLER, "cancelled"
    return {
        "answer": (OTHERS, f"answer of {place}"),
        "join": (OTHERS, "all answers"),
        "resume": (CALLER, "resumed"),
        "time": (FLOW, "time is up"),
        "undo": (OTHERS, f"done: {place}"),
    }.get(kind, (FLOW, "goes on"))


def _leaves(then: str) -> tuple[str, str]:
    """Return two values for the message that a step sends: the line of the diagram at
    which the message's arrow ends, and the label of the arrow."""
    kind, _, place = then.partition(" ")
    return {
        "answer": (OTHERS, f"asks {place}"),
        "join": (OTHERS, "asks many"),
        "undo": (OTHERS, f"undo by {place}"),
        "resume": (FLOW, "waits for a person"),
        "time": (FLOW, "sleeps"),
        "answered": (CALLER, "answers"),
        "failed": (CALLER, "fails, undone"),
        "handed_over": (OTHERS, "hands over"),
    }.get(kind, (FLOW, then))
