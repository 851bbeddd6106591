"""`findings`: lists what runs of `reconcile` have found, with operators' notes. Does
not start Spark."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt

from ..errors import UsageError
from ..noted import Noted, Which
from ..runs import Run, run_by
from ..spec import JobSpec
from .outcome import Outcome

#: Most findings listed for people. `--json` has them all.
SHOWN = 50


def run_findings(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """List findings, acknowledge them, or reopen them. Raises UsageError if a change
    selects none."""
    noted = Noted(spec.service())
    which = Which(given.verdict, given.destination, tuple(given.message_id))
    changes = given.reopen or given.acknowledge is not None
    if not changes:
        return _listed(noted, which, bool(given.all), run)
    if which == Which() and not given.all:
        raise UsageError(
            "Which findings? Give --verdict, --destination or --message-id, or --all."
        )
    if given.dry_run:
        there = dataclasses.replace(which, acknowledged=bool(given.reopen))
        run.rows = sum(noted.count(there).values())
        said = "would be"
    elif given.reopen:
        run.rows, said = noted.reopen(which), "are"
    else:
        run.rows, said = noted.acknowledge(which, run_by(), given.acknowledge), "are"
    word = "open again" if given.reopen else "acknowledged"
    return Outcome([f"{run.rows:,} findings {said} {word}."])


def _listed(noted: Noted, which: Which, everything: bool, run: Run) -> Outcome:
    which = dataclasses.replace(which, acknowledged=None if everything else False)
    found = noted.read(which)
    now = dt.datetime.now(dt.timezone.utc)
    lines = []
    for one in found[:SHOWN]:
        line = (
            f"{one['verdict']}: {one['message_id']} to {one['destination']} from "
            f"{one['sender'] or 'an unknown sender'} at "
            f"{one['consumer'] or 'no consumer'}, "
            f"found {_age(now - one['found_at'])} ago"
        )
        if one["acknowledged_at"]:
            line += (
                f"; acknowledged by {one['acknowledged_by']} "
                f"{_age(now - one['acknowledged_at'])} ago: {one['note']}"
            )
        lines.append(line)
    if len(found) > SHOWN:
        lines.append(f"… and {len(found) - SHOWN:,} more: --json lists all.")
    run.rows, run.counts = len(found), noted.count(which)
    return Outcome(lines, {"findings": found})


def _age(age: dt.timedelta) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age.total_seconds() >= size:
            return f"{age.total_seconds() / size:.0f} {unit}"
    return f"{max(0, age.total_seconds()):.0f} s"
