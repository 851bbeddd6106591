"""Plots as inline SVG, drawn from plain numbers. Colours are the page's variables.

Every mark has a title, which browsers show on hovering and screen readers read.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 920, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 30


@dataclass(frozen=True)
class Line:
    """A named series over the chart's instants; None is a gap."""

    name: str
    values: Sequence[float | None]
    colour: str
    filled: bool = False


def number(value: float) -> str:
    """Return a count as people read it: 1,234 or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:,.1f}".rstrip("0").rstrip(".") + letter
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Return a time as people read it: 12 ms, 3.4 s, 2 h."""
    size = abs(seconds)
    if size < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    for limit, unit, name in ((119.5, 1, "s"), (7170, 60, "min"), (172_000, 3600, "h")):
        if size < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} d"


def over_time(
    instants: Sequence[dt.datetime],
    lines: Sequence[Line],
    *,
    label: str,
    seconds: bool = False,
) -> str:
    """Return a chart of `lines` over time. Times in seconds get a logarithmic axis."""
    values = [v for line in lines for v in line.values if v is not None]
    if not instants or not any(values):
        return '<p class="none">Nothing in this time.</p>'
    show = duration if seconds else number
    axis = _log_axis(values) if seconds else _axis(max(values))
    low, high = axis[0], axis[-1]

    def x(index: int) -> float:
        share = 0.5 if len(instants) == 1 else index / (len(instants) - 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        if seconds:
            value, bottom, top = (math.log10(max(v, low)) for v in (value, low, high))
        else:
            bottom, top = low, high
        share = (value - bottom) / ((top - bottom) or 1)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(y(tick), show(tick)) for tick in axis]
    parts += _days(instants, x)
    for line in lines:
        for piece in _pieces(line.values):
            points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in piece)
            style = f"stroke:var(--{line.colour})"
            if line.filled:
                base = y(low)
                ends = (f"{x(piece[end][0]):.1f},{base:.1f}" for end in (0, -1))
                area = f" {points} ".join(ends)
                parts.append(
                    f'<polygon points="{area}" class="area" '
                    f'style="fill:var(--{line.colour})"/>'
                )
            parts.append(f'<polyline points="{points}" class="line" style="{style}"/>')
            if len(piece) == 1:
                place, only = piece[0]
                parts.append(
                    f'<circle cx="{x(place):.1f}" cy="{y(only):.1f}" r="3" '
                    f'style="fill:var(--{line.colour})"/>'
                )
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(instants) - 1)
    for index, instant in enumerate(instants):
        said = [f"{instant:%a %d %b %H:%M} UTC"]
        said += [
            f"{line.name}: {show(value)}"
            for line in lines
            if (value := line.values[index]) is not None
        ]
        parts.append(
            f'<rect x="{x(index) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}" class="hover"><title>'
            f"{escape(chr(10).join(said))}</title></rect>"
        )
    keys = "".join(
        f'<span class="key"><i style="background:var(--{line.colour})"></i>'
        f"{escape(line.name)}</span>"
        for line in lines
    )
    return (
        f'<div class="keys">{keys}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def bars(rows: Sequence[tuple[str, float, str]], colour: str) -> str:
    """Return horizontal bars of (name, value, what to write beside it)."""
    most = max((value for _, value, _ in rows), default=0) or 1
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td class="bar"><i style="width:'
        f'{100 * value / most:.1f}%;background:var(--{colour})"></i></td>'
        f'<td class="n">{escape(said)}</td></tr>'
        for name, value, said in rows
    ]
    return f'<table class="bars">{"".join(lines)}</table>'


def spark(values: Sequence[float], label: str) -> str:
    """Return a small column chart without axes."""
    most = max(values, default=0) or 1
    width = 120 / max(1, len(values))
    columns = "".join(
        f'<rect x="{i * width:.1f}" y="{24 - 22 * v / most:.1f}" '
        f'width="{max(1.0, width - 1):.1f}" height="{22 * v / most:.1f}"/>'
        for i, v in enumerate(values)
        if v
    )
    label = escape(label)
    return (
        f'<svg class="spark" viewBox="0 0 120 24" role="img" aria-label="{label}">'
        f"<title>{label}</title>{columns}</svg>"
    )


def spread(low: float, middle: float, high: float, longest: float) -> str:
    """Return a bar over the 50th, 95th and 99th percentile, on a logarithmic axis."""
    floor = 0.001

    def place(value: float) -> float:
        top = math.log10(max(longest, floor * 10) / floor)
        return 100 * max(0.0, math.log10(max(value, floor) / floor)) / top

    a, b, c = place(low), place(middle), place(high)
    return (
        f'<span class="spread"><i class="far" style="left:{a:.1f}%;width:{c - a:.1f}%">'
        f'</i><i class="near" style="left:{a:.1f}%;width:{b - a:.1f}%"></i></span>'
    )


def _axis(most: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(most, 1)))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if most / s <= 5)
    step = max(step, 1)
    return [step * i for i in range(math.ceil(most / step) + 1)]


_TIMES = (
    *(1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0),
    *(3600.0, 6 * 3600.0, 86_400.0, 10 * 86_400.0, 100 * 86_400.0, 1e9),
)


def _log_axis(values: Sequence[float]) -> list[float]:
    """Times that people know, from below the least value to above the greatest."""
    least = max(min((v for v in values if v > 0), default=0.001), _TIMES[0])
    most = max([*values, least])
    first = max(i for i, tick in enumerate(_TIMES) if tick <= least)
    last = next(i for i, tick in enumerate(_TIMES) if tick >= most or i == 13)
    return list(_TIMES[first : max(last, first + 1) + 1])


def _grid(y: float, text: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
        f'class="grid"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" class="tick" '
        f'text-anchor="end">{text}</text>'
    )


def _days(instants: Sequence[dt.datetime], x: object) -> list[str]:
    """Mark days, or hours where all is within two days."""
    span = instants[-1] - instants[0]
    every = max(1, math.ceil(span / dt.timedelta(hours=1) / 8))
    if span > dt.timedelta(days=2):
        every = 24 * max(1, math.ceil(span / dt.timedelta(days=9)))
    marks = []
    for index, instant in enumerate(instants):
        hours = int(instant.timestamp() // 3600)
        if hours % every:
            continue
        text = f"{instant:%d %b}" if every >= 24 else f"{instant:%H:%M}"
        assert callable(x)
        marks.append(
            f'<text x="{x(index):.1f}" y="{HEIGHT - 8}" class="tick" '
            f'text-anchor="middle">{text}</text>'
        )
    return marks


def _pieces(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((index, value))
    return [piece for piece in pieces if piece]
