"""Draws a run as a sequence diagram of three lines. The left line is the caller, the
middle line is the flow, and the right line is all other participants. Each step is a
box that shows how the state changed. Three lines fit the screen of a phone."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import wire
from ..dead_letters import masking
from ..flows.going import BACK
from ..models import FlowStep, OutboxMessage, Run
from . import display

#: Most steps that are drawn, the newest; lines of a box; and characters of a line and
#: of an arrow's label.
MOST, LINES, LINE, LABEL = 100, 12, 44, 24
#: Heights, in the units of the drawing, which is WIDTH wide.
WIDTH, ARROW, HEAD, ROW, GAP = 340, 26, 22, 14, 8
CALLER, FLOW, OTHERS = 12, 170, 328


@dataclass
class Arrow:
    """A message from one line to another, or from the flow to itself."""

    y: int
    text: str
    start: int
    end: int

    @property
    def label(self) -> str:
        """The text, shortened to fit."""
        return display.cut(self.text, LABEL)

    @property
    def middle(self) -> float:
        """The horizontal centre of the arrow."""
        return (self.start + self.end) / 2


@dataclass
class Box:
    """The box of one step, with the changes of the state."""

    y: int
    step: str
    at: dt.datetime
    message_id: uuid.UUID
    left: bool
    lines: list[tuple[str, str]]
    arrows: list[Arrow] = field(default_factory=list)

    @property
    def height(self) -> int:
        """The height of the box."""
        return HEAD + ROW * len(self.lines) + (GAP if self.lines else 0)

    @property
    def texts(self) -> Iterator[tuple[int, str, str]]:
        """Yield the lines in the box, each with its vertical position and kind."""
        for number, (kind, text) in enumerate(self.lines, 1):
            yield self.y + HEAD + number * ROW - 4, kind, display.cut(text, LINE)


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
    waits, y, boxes = before[0].then if before else "", ARROW, list[Box]()
    for step in steps:
        lines: list[tuple[str, str]] = []
        if states:
            after = masking.of_run(run.flow, step.state)
            lines, state = difference(state, after), after
        box = Box(
            y + ARROW, step.step, step.created_at, step.message_id, step.left, lines
        )
        came = _came(step, waits, types, signals, first=not boxes and not before)
        box.arrows.append(_arrow(y + ARROW - GAP, came, inward=True))
        y = box.y + box.height
        waits = step.then or waits
        if step.then not in ("", "itself"):
            y += ARROW
            box.arrows.append(_arrow(y - GAP, _leaves(waits), inward=False))
        boxes.append(box)
    return Sequence(boxes, y + ARROW, rows.count() - len(steps))


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
) -> tuple[int, str]:
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


def _leaves(then: str) -> tuple[int, str]:
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


def _arrow(y: int, told: tuple[int, str], *, inward: bool) -> Arrow:
    place, text = told
    ends = (place, FLOW) if inward else (FLOW, place)
    return Arrow(y, text, *ends)
