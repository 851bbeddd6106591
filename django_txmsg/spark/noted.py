"""The findings in a service's database, with their ages and operators' notes.

Plain SQL on the table of `models.py`, for PostgreSQL and SQLite. The lake's table
`verdicts` has the findings of all runs. The database has only those that operators work
on.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .connection import Connection, connect_plain, read_instant, read_json
from .errors import UsageError
from .spec import SourceSpec

_TABLE = "django_txmsg_finding"
#: The runs of a job that were no dry runs.
_RUNS = (
    "FROM django_txmsg_pipelinerun WHERE job = %s AND service = %s"
    " AND CAST(options AS text) NOT LIKE '%%\"dry_run\":%%' AND "
)
#: The runs that have stored their findings, in the order in which they ended.
_ENDED = "state IN ('clean', 'findings') ORDER BY finished_at"
#: Most unacknowledged findings: a run without one of the consuming services in its
#: specification finds all of that one's messages lost.
MOST = 10_000
#: The columns by which the next run recognises a finding.
KEY = ("message_id", "destination", "consumer", "verdict")
COLUMNS = (
    "verdict", "message_id", "destination", "sender", "consumer", "sent_at", "found_at",
    "seen_at", "acknowledged_at", "acknowledged_by", "note",
)  # fmt: skip


@dataclass(frozen=True)
class Which:
    """A selection of findings: those that match all given values."""

    verdict: str = ""
    destination: str = ""
    message_ids: tuple[uuid.UUID, ...] = ()
    acknowledged: bool | None = None


@dataclass(frozen=True)
class LastRun:
    """The stored record of a run. It has no `finished_at` while it is in progress."""

    state: str
    error: str
    started_at: dt.datetime
    finished_at: Any
    counts: dict[str, int]


def last_run(
    connection: Connection, source: SourceSpec, job: str, *, ended: bool = False
) -> LastRun | None:
    """Return the last run of a job that was no dry run, or None if there is none. A
    clock that was ahead may have left runs in the future, which do not count. With
    `ended`, return the run that was the last to end and has stored its findings."""
    begun = "started_at <= %s ORDER BY started_at"
    values = () if ended else (connection.clock(),)
    rows = connection.rows(
        "SELECT state, error, started_at, finished_at, counts"
        f" {_RUNS}{_ENDED if ended else begun} DESC LIMIT 1",
        job, source.service, *values,
    )  # fmt: skip
    for state, error, began, over, counts in rows:
        times = read_instant(began), read_instant(over)
        return LastRun(state, error, *times, read_json(counts))
    return None


class Noted:
    """The findings of one service."""

    def __init__(self, source: SourceSpec) -> None:
        self.source = source

    def read(self, which: Which) -> list[dict[str, Any]]:
        """Return findings, newest first: sorted by the time when they were first
        found."""
        where, values = self._where(which)
        with connect_plain(self.source) as connection:
            rows = connection.rows(
                f"SELECT {', '.join(COLUMNS)} FROM {_TABLE} WHERE {where}"
                " ORDER BY found_at DESC, verdict, sent_at, id",
                *values,
            )
        return [
            dict(zip(COLUMNS, map(_plain, COLUMNS, row), strict=True)) for row in rows
        ]

    def standing(self) -> list[dict[str, Any]]:
        """Return the findings that stood after the last run, and unacknowledged ones
        that an early release with `--since` did not judge again. A finding that only a
        run without an end has found has neither an age nor an acknowledgement."""
        last = self.last_run()
        found = self.read(Which())
        for one in found:
            if last is None or one["found_at"] > last.finished_at:
                one["found_at"] = one["acknowledged_at"] = None
        return [
            one
            for one in found
            if one["acknowledged_at"] is None
            or last is None
            or one["seen_at"] >= last.started_at
        ]

    def keep(
        self,
        findings: Iterable[dict[str, Any]],
        seen_at: dt.datetime,
        former: Iterable[str] = (),
    ) -> None:
        """Store the findings of a run. An earlier finding is deleted if this run has
        not found it again, or if the service had one of the `former` names. (The run
        has stored it under the present name.) Acknowledged findings stay. But a finding
        that comes back is no longer acknowledged, and counts as new."""
        names = ("id", "service", *COLUMNS[:8], "counted")
        update = "sender", "sent_at", "found_at", "seen_at"
        notes = "acknowledged_at", "acknowledged_by", "note"
        changes = [f"{name} = excluded.{name}" for name in update]
        changes += [
            f"{name} = CASE WHEN excluded.found_at < excluded.seen_at THEN old.{name}"
            f" ELSE excluded.{name} END"
            for name in notes
        ]
        # One that was there before, and was left out since, is not new.
        changes.append("counted = old.counted AND excluded.counted")
        lines = [
            (
                uuid.uuid5(uuid.NAMESPACE_OID, self._digest(one)), self.source.service,
                one["verdict"], uuid.UUID(one["message_id"]), one["destination"] or "",
                one["sender"] or "", one["consumer"] or "", one["sent_at"],
                one["found_at"], seen_at, one["found_at"] < seen_at,
            )
            for one in findings
        ]  # fmt: skip
        with connect_plain(self.source) as connection, connection.transaction():
            if lines:
                connection.many(
                    f"INSERT INTO {_TABLE} AS old ({', '.join(names)},"
                    " acknowledged_by, note)"
                    f" VALUES ({', '.join(['%s'] * len(names))}, '', '')"
                    f" ON CONFLICT (id) DO UPDATE SET {', '.join(changes)}",
                    lines,
                )
            for service in (self.source.service, *former):
                connection.execute(
                    f"DELETE FROM {_TABLE} WHERE service = %s AND acknowledged_at IS"
                    " NULL AND seen_at < %s",
                    service, seen_at,
                )  # fmt: skip

    def acknowledge(self, which: Which, by: str, note: str) -> int:
        """Acknowledge findings with a note, and return how many were acknowledged.
        Raises UsageError if the note is empty."""
        if not note.strip():
            raise UsageError("Say why: an acknowledgement needs a note.")
        now = dt.datetime.now(dt.timezone.utc)
        return self._set(replace(which, acknowledged=False), now, by, note)

    def reopen(self, which: Which) -> int:
        """Remove the acknowledgements of findings. Returns their number."""
        return self._set(replace(which, acknowledged=True), None, "", "")

    def last_run(self) -> LastRun | None:
        """Return the last finished `reconcile` that has stored its findings."""
        with connect_plain(self.source) as connection:
            return last_run(connection, self.source, "reconcile", ended=True)

    def judged_until(self, services: Collection[str]) -> dt.datetime | None:
        """Return the instant up to which runs of `reconcile` have judged all messages
        of these services. A run does not count if it has left out messages: if it had
        fewer of these services than an earlier run, or a `--since` after the instant
        that earlier runs had reached. The first run in the records, and the first one
        with a service, are assumed to have left out none."""
        with connect_plain(self.source) as connection:
            sql = f"SELECT options {_RUNS}{_ENDED}"
            rows = connection.rows(sql, "reconcile", self.source.service)
        runs = [ran for (text,) in rows if "judged_until" in (ran := read_json(text))]
        recorded = {one for ran in runs for one in ran["services"]}
        # No run has judged a service that was added since.
        ever = recorded.intersection(services) or {*services}
        until: dt.datetime | None = None
        judged: set[str] = set()
        for ran in runs:
            own = ever.intersection(ran["services"])
            since = ran.get("since")
            begin = dt.datetime.fromisoformat(since) if since else None
            whole = until is None or begin is None or begin <= until
            if own and judged <= own and whole:
                until, judged = dt.datetime.fromisoformat(ran["judged_until"]), own
        return until

    def _set(self, which: Which, at: dt.datetime | None, by: str, note: str) -> int:
        where, values = self._where(which)
        with connect_plain(self.source) as connection:
            return connection.execute(
                f"UPDATE {_TABLE} SET acknowledged_at = %s, acknowledged_by = %s,"
                f" note = %s WHERE {where}",
                at, by[:255], note.strip(), *values,
            )  # fmt: skip

    def _where(self, which: Which) -> tuple[str, list[Any]]:
        where = ["service = %s"]
        values: list[Any] = [self.source.service]
        for name in ("verdict", "destination"):
            if value := getattr(which, name):
                where.append(f"{name} = %s")
                values.append(value)
        if which.message_ids:
            marks = ", ".join(["%s"] * len(which.message_ids))
            where.append(f"message_id IN ({marks})")
            values += which.message_ids
        if which.acknowledged is not None:
            verb = "IS NOT" if which.acknowledged else "IS"
            where.append(f"acknowledged_at {verb} NULL")
        return " AND ".join(where), values

    def _digest(self, finding: dict[str, Any]) -> str:
        return json.dumps([self.source.service, *(finding[name] for name in KEY)])


def _plain(name: str, value: Any) -> Any:
    if name == "message_id":
        return str(uuid.UUID(str(value)))
    return read_instant(value) if name.endswith("_at") else value
