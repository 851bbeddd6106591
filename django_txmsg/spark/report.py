"""The report of `analyze`: its data, its charts, and the values for the template
`report.html`.

The page loads nothing from the network. Charts are inline SVG, and their colours are
CSS variables of the page. Every mark has a title. Browsers show it on hovering, and
screen readers read it.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup


@dataclass
class Findings:
    """All data of the report, as plain values."""

    services: Sequence[str]
    since: dt.datetime
    until: dt.datetime
    judged_at: dt.datetime | None = None
    """When the last `reconcile` began, if there was one."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """Its counts."""
    lost: Sequence[dict[str, Any]] = ()
    """Its findings, unacknowledged ones first."""
    unseen: int = 0
    """How many of them are not acknowledged."""
    hours: Sequence[dt.datetime] = ()
    throughput: dict[str, Sequence[float | None]] = field(default_factory=dict)
    backlog: Sequence[float | None] = ()
    critical: dict[str, Sequence[float | None]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    stages: Sequence[dict[str, Any]] = ()
    senders: Sequence[dict[str, Any]] = ()
    groups: Sequence[dict[str, Any]] = ()
    usage: Sequence[dict[str, Any]] = ()


def render(found: Findings) -> str:
    """Return the whole page."""
    return _page().render(
        found=found,
        tiles=_tiles(found),
        facts=_facts(found),
        counts=sorted(found.verdicts.items(), key=lambda one: -one[1]),
        charts=_charts(found),
        spread=partial(
            spread,
            least=min((max(row["p50"], 0.0) for row in found.stages), default=0.0),
            most=max((row["p99"] for row in found.stages), default=0.0),
        ),
        again=[
            (
                f"{row['receiver']}: {row['stage']}",
                row["redelivered"],
                f"{number(row['redelivered'])} of {number(row['received'])}",
            )
            for row in sorted(found.stages, key=lambda row: -row.get("redelivered", 0))
            if row.get("redelivered")
        ][:15],
        senders=[
            (
                f"{row['sender']} → {row['destination']}",
                row["messages"],
                number(row["messages"]),
            )
            for row in found.senders
        ],
    )


@cache
def _page() -> Template:
    environment = Environment(
        loader=PackageLoader("django_txmsg.spark", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "duration": duration,
        "hour": lambda instant: f"{instant:%a %d %b, %H:%M}",
        "plain": lambda verdict: verdict.replace("_", " "),
        "stamp": lambda instant: (
            f"{instant.astimezone(dt.timezone.utc):%d %b %H:%M}" if instant else "?"
        ),
    }
    return environment.get_template("report.html")


def _charts(found: Findings) -> list[tuple[str, str, str]]:
    stored, dispatched, processed, buried = (
        found.throughput.get(name, ())
        for name in ("stored", "dispatched", "processed", "buried")
    )
    lines = [
        Line("stored", stored, "blue", True),
        Line("dispatched", dispatched, "green"),
        Line("processed", processed, "orange"),
    ]
    if any(buried):
        lines.append(Line("given up on", [one or None for one in buried], "red"))
    times = [
        Line(name, found.critical.get(key, ()), colour)
        for name, key, colour in (
            ("half are faster than", "p50", "green"),
            ("95 %", "p95", "blue"),
            ("99 %", "p99", "orange"),
        )
    ]
    waiting = [Line("waiting in the outbox", found.backlog, "violet", True)]
    return [
        (
            "Throughput",
            "Messages per hour: stored in the outbox, dispatched to the broker, "
            "processed by their stages.",
            over_time(found.hours, lines, label="Messages per hour"),
        ),
        (
            "Critical time",
            "From stored to processed, over all stages; the axis is logarithmic.",
            over_time(found.hours, times, label="Critical time per hour", seconds=True),
        ),
        (
            "Backlog",
            "Messages stored and not yet dispatched, at the end of each hour.",
            over_time(found.hours, waiting, label="Backlog per hour"),
        ),
    ]


def _tiles(found: Findings) -> list[tuple[str, str, str]]:
    totals = found.totals
    again = totals.get("redelivered", 0) / (totals.get("received", 0) or 1)
    bad = [
        ("findings to see to", number(found.unseen), "bad" if found.unseen else "good")
    ]
    return [
        *(bad if found.judged_at else []),
        ("stored", number(totals.get("stored", 0)), ""),
        ("processed", number(totals.get("processed", 0)), ""),
        ("95 % processed within", duration(totals.get("p95", 0)), ""),
        ("needed another try", f"{again:.2%}", ""),
        ("largest backlog", number(totals.get("backlog", 0)), ""),
        ("open dead letters", number(totals.get("open", 0)),
         "bad" if totals.get("open") else "good"),
    ]  # fmt: skip


def _facts(found: Findings) -> dict[str, Any]:
    """Return the most important facts, for the top of the page."""
    lost = [
        (found.verdicts[kind], word)
        for kind, word in (
            ("never_received", "never received"),
            ("processed_twice", "processed twice"),
        )
        if found.verdicts.get(kind)
    ]
    again = max(found.stages, key=lambda row: row["redelivered"], default=None)
    worst = max(found.groups, key=lambda row: row["open"], default=None)
    facts = {
        "lost": lost,
        "busiest": _highest(found.hours, found.backlog),
        "slowest": _highest(found.hours, found.critical.get("p95", ())),
        "again": again if again and again["redelivered"] else None,
        "worst": worst if worst and worst["open"] else None,
    }
    return facts if any(facts.values()) else {}


def _highest(
    hours: Sequence[dt.datetime], values: Sequence[float | None]
) -> tuple[dt.datetime, float] | None:
    """Return the first hour with the highest value, and this value. Returns None if no
    value is above 0."""
    known = [one or 0 for one in values]
    most = max(known, default=0)
    return (hours[known.index(most)], most) if most > 0 else None


#: Width and height of a chart on a desktop and on a phone: each shows the one that
#: fits.
SIZES = {"desk": (920, 260), "phone": (400, 240)}
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 30


@dataclass(frozen=True)
class Line:
    """A named series of values, one for each instant of the chart. The line has a gap
    where a value is None."""

    name: str
    values: Sequence[float | None]
    colour: str
    filled: bool = False


def number(value: float) -> str:
    """Return a number as short text: 1,234 or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:,.1f}".rstrip("0").rstrip(".") + letter
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Return a duration as short text: 12 ms, 3.4 s, 2 h."""
    size = abs(seconds)
    if size < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    for limit, unit, name in ((119.5, 1, "s"), (3599, 60, "min"), (172_000, 3600, "h")):
        if size < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} d"


def over_time(
    instants: Sequence[dt.datetime],
    lines: Sequence[Line],
    *,
    label: str,
    seconds: bool = False,
) -> Markup:
    """Return a line chart. With `seconds`, the values are durations, and the axis is
    logarithmic."""
    values = [v for line in lines for v in line.values if v is not None]
    if not instants or not any(values):
        return Markup('<p class="none">Nothing in this time.</p>')
    axis = _log_axis(values) if seconds else _axis(max(values))
    keys = "".join(
        f'<span class="key"><i style="background:var(--{line.colour})"></i>'
        f"{escape(line.name)}</span>"
        for line in lines
    )
    charts = "".join(
        f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">'
        f"{_Chart(instants, axis, width, height, seconds).draw(lines)}</svg>"
        for name, (width, height) in SIZES.items()
    )
    # Every text in it is escaped above.
    return Markup(f'<div class="keys">{keys}</div>{charts}')  # noqa: S704


@dataclass(frozen=True)
class _Chart:
    """The instants, axis and size of a chart. It computes positions."""

    instants: Sequence[dt.datetime]
    axis: Sequence[float]
    width: int
    height: int
    seconds: bool

    def draw(self, lines: Sequence[Line]) -> str:
        parts = [self._grid(tick) for tick in self.axis]
        parts += self._days()
        for line in lines:
            for piece in _pieces(line.values):
                parts += self._line(line, piece)
        step = (self.width - _LEFT - _RIGHT) / max(1, len(self.instants) - 1)
        for index, instant in enumerate(self.instants):
            shown = [f"{instant:%a %d %b %H:%M} UTC"]
            shown += [
                f"{line.name}: {self._show(value)}"
                for line in lines
                if (value := line.values[index]) is not None
            ]
            parts.append(
                f'<rect x="{self._x(index) - step / 2:.1f}" y="{_TOP}" '
                f'width="{step:.1f}" height="{self.height - _TOP - _BOTTOM}" '
                f'class="hover"><title>{escape(chr(10).join(shown))}</title></rect>'
            )
        return "".join(parts)

    def _show(self, value: float) -> str:
        return duration(value) if self.seconds else number(value)

    def _x(self, index: int) -> float:
        count = len(self.instants)
        share = 0.5 if count == 1 else index / (count - 1)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        low, high = self.axis[0], self.axis[-1]
        if self.seconds:
            value, low, high = (math.log10(max(v, low)) for v in (value, low, high))
        share = (value - low) / ((high - low) or 1)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def _line(self, line: Line, piece: Sequence[tuple[int, float]]) -> list[str]:
        points = " ".join(f"{self._x(i):.1f},{self._y(v):.1f}" for i, v in piece)
        colour = f"var(--{line.colour})"
        parts = [f'<polyline points="{points}" class="line" style="stroke:{colour}"/>']
        if line.filled:
            base = self._y(self.axis[0])
            first, last = self._x(piece[0][0]), self._x(piece[-1][0])
            area = f"{first:.1f},{base:.1f} {points} {last:.1f},{base:.1f}"
            parts.append(
                f'<polygon points="{area}" class="area" style="fill:{colour}"/>'
            )
        if len(piece) == 1:
            place, only = piece[0]
            parts.append(
                f'<circle cx="{self._x(place):.1f}" cy="{self._y(only):.1f}" r="3" '
                f'style="fill:{colour}"/>'
            )
        return parts

    def _grid(self, tick: float) -> str:
        y = self._y(tick)
        return (
            f'<line x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'class="grid"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" class="tick" '
            f'text-anchor="end">{self._show(tick)}</text>'
        )

    def _days(self) -> list[str]:
        """Return labels for the days, or for hours if the chart covers at most two
        days."""
        span = self.instants[-1] - self.instants[0]
        room = self.width / 115  # marks that fit
        every = max(1, math.ceil(span / dt.timedelta(hours=1) / room))
        if span > dt.timedelta(days=2):
            every = 24 * max(1, math.ceil(span / dt.timedelta(days=1) / room))
        marks = []
        for index, instant in enumerate(self.instants):
            hours = int(instant.timestamp() // 3600)
            if hours % every:
                continue
            text = f"{instant:%d %b}" if every >= 24 else f"{instant:%H:%M}"
            marks.append(
                f'<text x="{self._x(index):.1f}" y="{self.height - 8}" class="tick" '
                f'text-anchor="middle">{text}</text>'
            )
        return marks


def spread(row: Mapping[str, float], *, least: float, most: float) -> Markup:
    """Return a bar that shows the 50th, 95th and 99th percentile of a row, on a
    logarithmic axis from `least` to `most`."""

    def place(value: float) -> float:
        bottom = max(least, 1e-6)
        share = math.log10(max(value, bottom) / bottom)
        return 100 * share / math.log10(max(most / bottom, 10))

    a, b, c = place(row["p50"]), place(row["p95"]), place(row["p99"])
    return Markup(  # noqa: S704 — of numbers
        f'<span class="spread"><i class="far" style="left:{a:.1f}%;width:{c - a:.1f}%">'
        f'</i><i class="near" style="left:{a:.1f}%;width:{b - a:.1f}%"></i></span>'
    )


def _axis(most: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(most, 1)))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if most / s <= 5)
    step = max(step, 1)
    return [step * i for i in range(math.ceil(most / step) + 1)]


_TIMES = (
    *(1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0),
    *(6 * 3600.0, 86_400.0, 10 * 86_400.0, 100 * 86_400.0, 1000 * 86_400.0, 1e9),
)


def _log_axis(values: Sequence[float]) -> list[float]:
    """Return ticks at round durations that enclose all values."""
    least = max(min((v for v in values if v > 0), default=0.001), _TIMES[0])
    most = max([*values, least])
    first = max(i for i, tick in enumerate(_TIMES) if tick <= least)
    last = next(i for i, tick in enumerate(_TIMES) if tick >= most or tick == 1e9)
    return list(_TIMES[first : max(last, first + 1) + 1])


def _pieces(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((index, value))
    return [piece for piece in pieces if piece]
