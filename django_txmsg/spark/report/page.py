"""The page of the report: its data, and the values for the template `report.html`.

The page loads nothing from the network.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from .charts import Line, duration, number, over_time, spread


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
        loader=PackageLoader("django_txmsg.spark", "report"),
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
