"""The report of `analyze`: its data, and the numbers and positions that the template
`report.html` shows.

The page loads nothing from the network. Charts are inline SVG, and their colours are
CSS variables of the page. Every mark has a title. Browsers show it on hovering, and
screen readers read it.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ..monitoring.lengths import duration


@dataclass
class Findings:
    """All data of the report, as plain values."""

    services: Sequence[str]
    since: dt.datetime
    until: dt.datetime
    #: When the last `reconcile` began, if there was one.
    judged_at: dt.datetime | None = None
    #: Its counts.
    verdicts: dict[str, int] = field(default_factory=dict)
    #: Its findings, unacknowledged ones first.
    lost: Sequence[dict[str, Any]] = ()
    #: How many of them are not acknowledged.
    unseen: int = 0
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
    buried = [one or None for one in found.throughput.get("buried", ())]
    return _page().render(found=found, buried=buried)


@cache
def _page() -> Template:
    environment = Environment(
        loader=PackageLoader("django_txmsg.spark", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "number": number, "duration": duration, "pieces": _pieces,
        "px": lambda pixels: f"{pixels:.1f}",
        "stamp": lambda instant: (
            f"{instant.astimezone(dt.timezone.utc):%d %b %H:%M}" if instant else "?"
        ),
    }  # fmt: skip
    environment.globals["scales"] = _scales
    return environment.get_template("report.html")


def number(value: float) -> str:
    """Return a number as short text: 1,234 or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:,.1f}".rstrip("0").rstrip(".") + letter
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


#: Width and height of a chart on a desktop and on a phone. The page contains both and
#: shows one, because the labels of a chart shrink with it.
_SIZES = {"desk": (920, 260), "phone": (360, 220)}


@dataclass(frozen=True)
class Scale:
    """The instants, the axis and the size of a chart. It computes positions, in pixels
    from the upper left corner. With `seconds`, the values are durations, and the axis
    is logarithmic."""

    instants: Sequence[dt.datetime]
    axis: Sequence[float]
    seconds: bool
    width: int
    height: int
    left, top = 58, 14

    @property
    def right(self) -> int:
        """The right end of the lines."""
        return self.width - 12

    @property
    def bottom(self) -> int:
        """The lower end of the lines."""
        return self.height - 30

    @property
    def step(self) -> float:
        """The distance between two instants."""
        return (self.right - self.left) / max(1, len(self.instants) - 1)

    def text(self, value: float) -> str:
        """Return a value as short text."""
        return duration(value) if self.seconds else number(value)

    def x(self, index: int) -> float:
        """Return the position of an instant."""
        count = len(self.instants)
        share = 0.5 if count == 1 else index / (count - 1)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the position of a value."""
        low, high = self.axis[0], self.axis[-1]
        if self.seconds:
            value, low, high = (math.log10(max(v, low)) for v in (value, low, high))
        share = (value - low) / ((high - low) or 1)
        return self.bottom - share * (self.bottom - self.top)

    def points(self, piece: Sequence[tuple[int, float]]) -> str:
        """Return the positions of a line's values, as SVG writes them."""
        return " ".join(f"{self.x(i):.1f},{self.y(v):.1f}" for i, v in piece)

    def days(self) -> list[tuple[int, str]]:
        """Return the indexes and labels of days, or of hours if the chart covers at
        most two days."""
        span = self.instants[-1] - self.instants[0]
        room = self.width / 115  # labels that fit
        every = max(1, math.ceil(span / dt.timedelta(hours=1) / room))
        if span > dt.timedelta(days=2):
            every = 24 * max(1, math.ceil(span / dt.timedelta(days=1) / room))
        form = "%d %b" if every >= 24 else "%H:%M"
        return [
            (index, instant.strftime(form))
            for index, instant in enumerate(self.instants)
            if int(instant.timestamp() // 3600) % every == 0
        ]


def _scales(
    instants: Sequence[dt.datetime],
    lines: Sequence[Sequence[float | None]],
    seconds: bool,
) -> dict[str, Scale]:
    """Return the scale of a chart with these lines for each of _SIZES. Returns {} if
    there is nothing to show."""
    values = [v for line in lines for v in line if v is not None]
    if not instants or not any(values):
        return {}
    axis = _log_axis(values) if seconds else _axis(max(values))
    return {
        name: Scale(instants, axis, seconds, *size) for name, size in _SIZES.items()
    }


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
