"""`manage.py message_status`: prints counts and ages of messages. By default, the exit
code is 1 if messages are stuck or a database does not answer."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from typing import Any

from django.db import router

from ... import conf
from ...conf.schema import BAD, KINDS
from ...models import OutboxMessage
from ...monitoring import alarms, status
from ...monitoring.lengths import duration
from ...monitoring.status import Place, Status
from ...monitoring.turns import at_least
from ...monitoring.waiting import CAP, Waiting, capped
from ..terminal import (
    DatabaseCommand,
    printable,
    read_option,
    require_tables,
    values,
)

#: The kinds of alarms about messages that do not move, or a database that does not
#: answer.
STUCK = frozenset({"database", "newer-code", "order", "outage", "overdue"})


class Command(DatabaseCommand):
    """Print the state of messaging."""

    help = (
        "Prints the number of messages in each state, and the age of the oldest. Exits "
        "with 1 if messages do not move."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument(
            "--fail-on", metavar="KINDS", type=_kinds, default=STUCK,
            help="exit 1 for these kinds of alarms, with commas between them, warnings "
            f"included: {', '.join(KINDS)}; or for all but warnings: bad "
            f"(default: {','.join(sorted(STUCK))}, without warnings)",
        )  # fmt: skip
        parser.add_argument(
            "--database", metavar="ALIAS", help="only this database, not all in use"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        aliases = [] if options["database"] is None else [options["database"]]
        require_tables(*aliases or [router.db_for_write(OutboxMessage)])
        kinds = read_option(options, "fail_on", _kinds)
        picture = status.read(*aliases, sessions=True)
        if options["json"]:
            self.stdout.write(json.dumps(facts(picture), indent=2))
        else:
            self._print(picture)
        for alarm in alarms.of(picture):
            bad = alarm.tone == "bad"
            if alarm.kind in kinds and (bad or kinds is not STUCK):
                sys.exit(1)
            if bad and BAD in kinds:
                sys.exit(1)

    def _print(self, picture: Status) -> None:
        line = self.stdout.write
        now = picture.now
        for title, waiting in (
            ("pending in the outbox", picture.outbox),
            ("queued in the embedded broker", picture.queued),
            ("waiting for an attempt", picture.parked),
        ):
            line(f"{title + ':':<31}{_waiting(waiting, now)}")
        dead = f"{picture.dead:,}"
        if picture.oldest_dead:
            dead += f", oldest {_age(picture.oldest_dead, now)}"
        if picture.muted:
            dead += f", and {picture.muted:,} muted"
        line(f"{'dead letters:':<31}{dead}")
        for name, waiting in sorted(picture.services.items()):
            if name not in ("", conf.get().SERVICE):
                line(f"  of service {name}: {_waiting(waiting, now)}")
        for title, places in (
            ("destination", picture.destinations),
            ("stage", picture.stages),
        ):
            for name, place in sorted(places.items()):
                waits = place.waiting.count or place.line.count
                if waits or place.dead or place.paused_at:
                    line(f"  {title} {printable(name)}: {_place(place, now)}")
        for name, waiting in sorted(picture.queues.items()):
            line(f"  queue {printable(name)}: {_waiting(waiting, now)}")
        for flow in picture.runs:
            line(
                f"  flow {printable(flow.flow)}: {capped(flow.open)} open"
                + (f", {capped(flow.undoing)} undoing" if flow.undoing else "")
                + (f", {capped(flow.stuck)} stuck" if flow.stuck else "")
            )
        if picture.sessions_given_up:
            line(f"{'sessions given up in 24 h:':<31}{picture.sessions_given_up}")
        living = picture.attendance.living
        silent = len(picture.attendance.workers) - len(living)
        line(
            f"{'workers:':<31}{len(living)} at work"
            + (f", {silent} silent" if silent else "")
        )
        for alarm in alarms.of(picture):
            style = self.style.ERROR if alarm.tone == "bad" else self.style.WARNING
            line(style(printable(str(alarm))))
        if alarms.well(picture):
            line(self.style.SUCCESS("All is well."))


def _kinds(text: str) -> frozenset[str]:
    kinds = frozenset(kind.strip() for kind in text.split(","))
    if unknown := kinds - {*KINDS, BAD}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not a kind of alarm")
    return kinds


def facts(picture: Status) -> dict[str, Any]:
    """Return the status as plain values. Ages are in seconds."""
    now = picture.now

    def waiting(one: Waiting) -> dict[str, Any]:
        return {
            "count": min(one.count, CAP),
            "more": one.capped,
            **values(one, "due", "overdue", "in_flight", "retried", "for_rate"),
            "oldest_age": _seconds(one.oldest_due, now),
        }

    def place(one: Place) -> dict[str, Any]:
        return waiting(one.waiting) | {
            **values(one, "name", "database", "dead", "muted"),
            "oldest_dead_age": _seconds(one.oldest_dead, now),
            "last_age": _seconds(one.last, now),
        }

    return {
        "at": now.isoformat(),
        "databases": [*picture.databases, *picture.with_only_queues],
        "unreadable": picture.unreadable,
        "read_only": picture.read_only,
        "well": alarms.well(picture),
        "overdue": picture.overdue,
        "alarms": [str(one) for one in alarms.of(picture)],
        "outbox": waiting(picture.outbox),
        "queued": waiting(picture.queued),
        "redelivering": waiting(picture.parked),
        "dead": {
            "count": picture.dead,
            "oldest_age": _seconds(picture.oldest_dead, now),
            "muted": picture.muted,
        },
        "services": {n: waiting(w) for n, w in picture.services.items()},
        "destinations": {n: place(p) for n, p in picture.destinations.items()},
        "stages": {
            n: place(p)
            | {
                "processing_p95": p.processing,
                "critical_p95": p.critical,
                "paused": p.paused_at is not None,
                "workers": p.workers,
                "needs_newer_code": min(p.newer.count, CAP) if p.newer else 0,
                "blocked": min(p.line.count, CAP),
                "blocked_bytes": p.line.size,
                "blocked_age": _seconds(p.line.since, now),
                "full": p.full_since is not None,
            }
            for n, p in picture.stages.items()
        },
        "held_keys": [
            values(one, "stage", "key", "count", "why")
            | {"age": _seconds(one.since, now), "waits_for": str(one.waits_for)}
            for one in picture.held_keys
        ],
        "queues": {
            label: waiting(one) | values(one, "name", "database")
            for label, one in picture.queues.items()
        },
        "deadlines": {n: waiting(w) for n, w in picture.deadlines.items()},
        "flows": {
            f"{one.flow} of {one.service}": {
                "open": min(one.open, CAP),
                "undoing": min(one.undoing, CAP),
                "undo_stuck": min(one.stuck, CAP),
            }
            for one in picture.runs
        },
        "late_ticks": [one.name for one in picture.late_ticks],
        "outages": [
            values(one, "kind", "name", "error", "processes")
            | {"age": _seconds(one.since, now)}
            for one in picture.attendance.outages
        ],
        "workers": [
            values(worker, "name", "kind", "stages", "in_flight")
            | {"heartbeat_age": _seconds(worker.heartbeat_at, now)}
            for worker in picture.attendance.workers
        ],
        "sessions_given_up": picture.sessions_given_up,
    }


def _waiting(waiting: Waiting, now: dt.datetime) -> str:
    text = f"{capped(waiting.count)} waiting"
    if waiting.for_rate:
        text += f", {capped(waiting.for_rate)} of them for a slot of the rate"
    if waiting.overdue:
        text += f", {capped(waiting.overdue)} of them overdue"
    if waiting.oldest_due is not None:
        text += f", the oldest due for {_age(waiting.oldest_due, now)}"
    return text


def _place(place: Place, now: dt.datetime) -> str:
    parts = []
    if place.waiting.count:
        parts.append(_waiting(place.waiting, now))
    if place.line.count:
        parts.append(
            f"{capped(place.line.count)} blocked behind others of their keys, of "
            f"{at_least(place.line)}"
        )
    if place.full_since is not None:
        parts.append("receives nothing, because too many wait")
    if place.newer is not None:
        parts.append(f"{capped(place.newer.count)} of them need newer code")
    if place.dead:
        parts.append(f"{place.dead} dead")
    if place.paused_at is not None:
        parts.append(f"paused by {place.paused_by or 'unknown'}")
    return "; ".join(parts)


def _seconds(instant: dt.datetime | None, now: dt.datetime) -> float | None:
    if instant is None:
        return None
    return round(max(0.0, (now - instant).total_seconds()), 3)


def _age(instant: dt.datetime | None, now: dt.datetime) -> str:
    return duration(_seconds(instant, now) or 0.0)
