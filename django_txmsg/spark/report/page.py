"""The page around the plots: headline numbers, sections, light and dark."""

from __future__ import annotations

import datetime as dt
from html import escape
from typing import Any

from .charts import Line, bars, duration, number, over_time, spark, spread
from .findings import Findings
from .style import SCRIPT, STYLE


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
        f"Light / dark</button></header><main>{_tiles(found)}{_told(found)}"
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
    """A line about the hours in which messages were buried, if there are any."""
    buried = found.throughput.get("buried", ())
    if not any(buried):
        return []
    return [Line("given up on", [one or None for one in buried], "red")]


def _told(found: Findings) -> str:
    """The most important facts, for a reader who reads nothing else."""
    said = []
    counts = [
        f"<b>{number(found.verdicts[kind])}</b> {word}"
        for kind, word in (
            ("never_received", "never received"),
            ("processed_twice", "processed twice"),
        )
        if found.verdicts.get(kind)
    ]
    if counts:
        said.append(f"Messages were lost or doubled: {', '.join(counts)}.")
    waiting = [one or 0 for one in found.backlog]
    if waiting and (most := max(waiting)) > 0:
        hour = found.hours[waiting.index(most)]
        said.append(
            f"Most messages waited to be dispatched on {_at(hour)}: "
            f"<b>{number(most)}</b>."
        )
    slow = [one or 0 for one in found.critical.get("p95", ())]
    if slow and (longest := max(slow)) > 0:
        hour = found.hours[slow.index(longest)]
        said.append(
            f"Slowest were those processed in the hour from {_at(hour)}: 95 % within "
            f"<b>{duration(longest)}</b>, against {duration(found.totals['p95'])} over "
            "all."
        )
    again = max(found.stages, key=lambda row: row["redelivered"], default=None)
    if again and again["redelivered"]:
        said.append(
            f"Most messages that needed another try were those of "
            f"{escape(again['stage'])}: <b>{number(again['redelivered'])}</b>."
        )
    open_groups = [row for row in found.groups if row["open"]]
    if open_groups:
        worst = max(open_groups, key=lambda row: row["open"])
        error = worst["exception"].partition("\n")[0][:120] or worst["reason"]
        said.append(
            f"<b>{number(worst['open'])}</b> open dead letters have one cause: "
            f"<q>{escape(error)}</q>."
        )
    if not said:
        return ""
    return f'<ul class="told">{"".join(f"<li>{one}</li>" for one in said)}</ul>'


def _at(hour: dt.datetime) -> str:
    return f"{hour:%a %d %b, %H:%M}"


def _section(title: str, said: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{said}</p>{content}</section>"


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
