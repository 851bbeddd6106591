"""The report's page: its data, and around the plots the headline numbers, sections, and
light and dark styles. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .charts import Line, bars, duration, number, over_time, spark, spread


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


_LIGHT = """--back:#f6f7f9;--card:#fff;--text:#1c2330;--soft:#5d6878;--rule:#e3e7ed;
--blue:#2f6fdb;--green:#1a8f5f;--orange:#d1761b;--violet:#7b55c7;--red:#c4314b;
color-scheme:light"""
_DARK = """--back:#12161d;--card:#1b212b;--text:#e6eaf0;--soft:#98a4b5;--rule:#2c3542;
--blue:#6ca4ff;--green:#4cc38a;--orange:#f0a04b;--violet:#b295f0;--red:#ff7a8e;
color-scheme:dark"""

STYLE = (
    f":root{{{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f':root[data-theme="light"]{{{_LIGHT}}}:root[data-theme="dark"]{{{_DARK}}}'
    """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main,footer{max-width:1000px;margin:0 auto;padding:0 20px}
header{display:flex;justify-content:space-between;align-items:start;padding-top:28px}
h1{font-size:24px;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0}
p{margin:2px 0 12px;color:var(--soft)}
button{background:var(--card);color:var(--soft);border:1px solid var(--rule);
border-radius:8px;padding:6px 12px;font:inherit;font-size:13px;cursor:pointer}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;
margin:18px 0}
.tile,section{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:25px;font-weight:650;line-height:1.2;
font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.tile.bad b{color:var(--red)}.tile.good b{color:var(--green)}
.summary{margin:0 0 18px;padding:0 0 0 20px;color:var(--soft)}
.summary b,.summary q{color:var(--text);font-weight:600}.summary li{margin:3px 0}
.summary q{overflow-wrap:anywhere}
section{padding:18px 20px;margin:0 0 16px;overflow-x:auto}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--rule);stroke-width:1}
.tick{fill:var(--soft);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.area{opacity:.14}
.hover{fill:transparent}.hover:hover{fill:var(--soft);opacity:.12}
.keys{display:flex;flex-wrap:wrap;gap:16px;font-size:13px;color:var(--soft);
margin-bottom:6px}
.key i{display:inline-block;width:18px;height:3px;border-radius:2px;margin-right:6px;
vertical-align:middle}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:8px 10px 8px 0;border-top:1px solid var(--rule);
vertical-align:top;font-weight:400}
thead th{border-top:0;color:var(--soft);font-size:13px}
tbody th{overflow-wrap:anywhere;max-width:420px}
small{color:var(--soft)}
thead th{white-space:nowrap}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.bars th{width:38%}.bars .bar{width:44%;vertical-align:middle}
.bars i{display:block;height:12px;border-radius:3px;min-width:2px}
.spread{display:block;position:relative;width:150px;height:18px}
.spread i{position:absolute;border-radius:3px}
.spread .far{top:7px;height:4px;background:var(--orange)}
.spread .near{top:4px;height:10px;background:var(--blue);min-width:3px}
.spark{width:120px;height:24px}.spark rect{fill:var(--red)}
.none{color:var(--soft);margin:6px 0}
footer{color:var(--soft);font-size:13px;padding-bottom:32px}
svg.phone{display:none}
@media(max-width:640px){svg.phone{display:block}svg.desk{display:none}
header,main,footer{padding-left:12px;padding-right:12px}section{padding:14px}
.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:22px}
tbody th{min-width:130px}.bars th{width:45%}.bars .bar{width:25%}}
@media print{button{display:none}section{break-inside:avoid}}
"""
)

SCRIPT = """
document.getElementById("theme").addEventListener("click", function () {
  var root = document.documentElement;
  var dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""


def render(found: Findings) -> str:
    """Return the whole page."""
    names = ", ".join(map(escape, found.services))
    title = f"Message log of {names}"
    span = f"{found.since:%d %b %Y %H:%M} to {found.until:%d %b %Y %H:%M} UTC"
    sections = [
        _section(
            "Lost and doubled",
            "What was sent against what was received, message by message.",
            _verdicts(found),
        ),
        _section(
            "Throughput",
            "Messages per hour: stored in the outbox, dispatched to the broker, "
            "processed by their stages.",
            over_time(
                found.hours,
                [
                    Line("stored", found.throughput.get("stored", ()), "blue", True),
                    Line("dispatched", found.throughput.get("dispatched", ()), "green"),
                    Line("processed", found.throughput.get("processed", ()), "orange"),
                    *_buried(found),
                ],
                label="Messages per hour",
            ),
        ),
        _section(
            "Critical time",
            "From stored to processed, over all stages; the axis is logarithmic.",
            over_time(
                found.hours,
                [
                    Line(
                        "half are faster than", found.critical.get("p50", ()), "green"
                    ),
                    Line("95 %", found.critical.get("p95", ()), "blue"),
                    Line("99 %", found.critical.get("p99", ()), "orange"),
                ],
                label="Critical time per hour",
                seconds=True,
            ),
        ),
        _section(
            "Backlog",
            "Messages stored and not yet dispatched, at the end of each hour.",
            over_time(
                found.hours,
                [Line("waiting in the outbox", found.backlog, "violet", True)],
                label="Backlog per hour",
            ),
        ),
        _section(
            "Stages", "Times in which half, 95 % and 99 % are done.", _stages(found)
        ),
        _section(
            "Redeliveries", "Messages that needed more than one try.", _again(found)
        ),
        _section(
            "Dead letters",
            "Grouped by what killed them; growth over the time shown.",
            _groups(found),
        ),
        _section("Senders", "Who sends most, and to where.", _senders(found)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><header>"
        f'<div><h1>{title}</h1><p>{span}</p></div><button type="button" id="theme">'
        f"Light / dark</button></header><main>{_tiles(found)}{_summary(found)}"
        f"{''.join(sections)}</main>"
        f"<footer>django_txmsg analyze · times in UTC</footer>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _tiles(found: Findings) -> str:
    totals = found.totals
    again = totals.get("redelivered", 0) / (totals.get("received", 0) or 1)
    bad = [
        ("findings to see to", number(found.unseen), "bad" if found.unseen else "good")
    ]
    tiles = [
        *(bad if found.judged_at else []),
        ("stored", number(totals.get("stored", 0)), ""),
        ("processed", number(totals.get("processed", 0)), ""),
        ("95 % processed within", duration(totals.get("p95", 0)), ""),
        ("needed another try", f"{again:.2%}", ""),
        ("largest backlog", number(totals.get("backlog", 0)), ""),
        ("open dead letters", number(totals.get("open", 0)),
         "bad" if totals.get("open") else "good"),
    ]  # fmt: skip
    return '<div class="tiles">' + "".join(
        f'<div class="tile {tone}"><b>{value}</b><span>{name}</span></div>'
        for name, value, tone in tiles
    ) + "</div>"  # fmt: skip


def _buried(found: Findings) -> list[Line]:
    """Return a line about the hours in which messages were buried; "" if there are
    none."""
    buried = found.throughput.get("buried", ())
    if not any(buried):
        return []
    return [Line("given up on", [one or None for one in buried], "red")]


def _summary(found: Findings) -> str:
    """Return the most important facts, for a reader who reads nothing else."""
    facts = []
    counts = [
        f"<b>{number(found.verdicts[kind])}</b> {word}"
        for kind, word in (
            ("never_received", "never received"),
            ("processed_twice", "processed twice"),
        )
        if found.verdicts.get(kind)
    ]
    if counts:
        facts.append(f"Messages were lost or doubled: {', '.join(counts)}.")
    waiting = [one or 0 for one in found.backlog]
    if waiting and (most := max(waiting)) > 0:
        hour = found.hours[waiting.index(most)]
        facts.append(
            f"Most messages waited to be dispatched on {_at(hour)}: "
            f"<b>{number(most)}</b>."
        )
    slow = [one or 0 for one in found.critical.get("p95", ())]
    if slow and (longest := max(slow)) > 0:
        hour = found.hours[slow.index(longest)]
        facts.append(
            f"Slowest were those processed in the hour from {_at(hour)}: 95 % within "
            f"<b>{duration(longest)}</b>, against {duration(found.totals['p95'])} over "
            "all."
        )
    again = max(found.stages, key=lambda row: row["redelivered"], default=None)
    if again and again["redelivered"]:
        facts.append(
            f"Most messages that needed another try were those of "
            f"{escape(again['stage'])}: <b>{number(again['redelivered'])}</b>."
        )
    open_groups = [row for row in found.groups if row["open"]]
    if open_groups:
        worst = max(open_groups, key=lambda row: row["open"])
        error = worst["exception"].partition("\n")[0][:120] or worst["reason"]
        facts.append(
            f"<b>{number(worst['open'])}</b> open dead letters have one cause: "
            f"<q>{escape(error)}</q>."
        )
    if not facts:
        return ""
    return f'<ul class="summary">{"".join(f"<li>{one}</li>" for one in facts)}</ul>'


def _at(hour: dt.datetime) -> str:
    return f"{hour:%a %d %b, %H:%M}"


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>{content}</section>"


def _verdicts(found: Findings) -> str:
    if found.judged_at is None:
        return '<p class="none">Not compared yet: <code>pipeline reconcile</code>.</p>'
    counts = ", ".join(
        f"{number(count)} {escape(kind.replace('_', ' '))}"
        for kind, count in sorted(found.verdicts.items(), key=lambda one: -one[1])
    )
    judged = (
        f'<p class="none">Compared on {_stamp(found.judged_at)}: '
        f"{counts or 'nothing was there'}.</p>"
    )
    if not found.lost:
        return judged
    body = "".join(
        f'<tr><th scope="row">{escape(row["verdict"].replace("_", " "))}<br><small>'
        f"{escape(row['message_id'])}</small></th>"
        f"<td>{escape(row['sender'] or 'unknown sender')} → "
        f"{escape(row['destination'])}<br><small>{escape(row['consumer'])}</small></td>"
        f"<td>{_stamp(row['sent_at'])}</td>"
        f'<td class="n">{duration((found.until - row["found_at"]).total_seconds())}'
        f"</td><td>{_note(row)}</td></tr>"
        for row in found.lost
    )
    return (
        f"{judged}<table><thead><tr><th>finding and message</th><th>way</th>"
        "<th>sent</th><th>age</th><th>acknowledged</th></tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _stamp(instant: dt.datetime | None) -> str:
    return f"{instant.astimezone(dt.timezone.utc):%d %b %H:%M}" if instant else "?"


def _note(row: dict[str, Any]) -> str:
    if not row["acknowledged_at"]:
        return "no"
    return (
        f"{escape(row['note'])}<br><small>{escape(row['acknowledged_by'])}, "
        f"{_stamp(row['acknowledged_at'])}</small>"
    )


def _stages(found: Findings) -> str:
    if not found.stages:
        return '<p class="none">No stage has processed anything in this time.</p>'
    ends = {
        "least": min(max(row["p50"], 0.0) for row in found.stages),
        "most": max(row["p99"] for row in found.stages),
    }
    body = "".join(
        f'<tr><th scope="row">{escape(row["receiver"])}<br><small>'
        f"{escape(row['stage'])}</small></th>"
        f'<td class="n">{number(row["messages"])}</td>'
        f'<td class="n">{duration(row["p50"])}</td>'
        f'<td class="n">{duration(row["p95"])}</td>'
        f'<td class="n">{duration(row["p99"])}</td>'
        f"<td>{spread(row['p50'], row['p95'], row['p99'], **ends)}</td>"
        f'<td class="n">{duration(row["handler_p95"])}</td></tr>'
        for row in found.stages
    )
    clocks = sum(row["negative"] for row in found.stages)
    note = (
        f'<p class="none">{number(clocks)} messages were processed before they were '
        "stored, by their clocks: those machines' clocks disagree.</p>"
        if clocks
        else ""
    )
    return (
        "<table><thead><tr><th>service and stage</th><th>messages</th><th>50 %</th>"
        "<th>95 %</th><th>99 %</th><th>spread</th><th>handler, 95 %</th></tr></thead>"
        f"<tbody>{body}</tbody></table>{note}"
    )


def _again(found: Findings) -> str:
    rows = [
        (
            f"{row['receiver']}: {row['stage']}",
            row["redelivered"],
            f"{number(row['redelivered'])} of {number(row['received'])}",
        )
        for row in sorted(found.stages, key=lambda row: -row.get("redelivered", 0))
        if row.get("redelivered")
    ]
    if not rows:
        return '<p class="none">None: every message was processed at the first try.</p>'
    return bars(rows[:15], "orange")


def _groups(found: Findings) -> str:
    if not found.groups:
        return '<p class="none">No dead letters in this time.</p>'
    body = "".join(
        f'<tr><th scope="row">{escape(row["exception"][:160] or row["reason"])}<br>'
        f"<small>{escape(row['receiver'])}: {escape(row['stage'] or 'relay')} · "
        f"{escape(row['reason'])}</small></th>"
        f'<td class="n">{number(row["letters"])}</td>'
        f'<td class="n">{number(row["open"])}</td>'
        f"<td>{escape(row['first_seen'])}<br>{escape(row['last_seen'])}</td>"
        f"<td>{spark(row['growth'], 'growth of this group')}</td></tr>"
        for row in found.groups
    )
    return (
        "<table><thead><tr><th>error</th><th>letters</th><th>open</th>"
        f"<th>first and last seen</th><th>growth</th></tr></thead><tbody>{body}</tbody>"
        "</table>"
    )


def _senders(found: Findings) -> str:
    rows = [
        (
            f"{row['sender']} → {row['destination']}",
            row["messages"],
            number(row["messages"]),
        )
        for row in found.senders
    ]
    return bars(rows, "blue") if rows else '<p class="none">No messages were sent.</p>'
