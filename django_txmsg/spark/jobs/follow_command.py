"""`follow` as a command: its options, its end, and its dry run."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Mapping
from typing import Any

from .. import measures
from ..connection import connect_plain
from ..schemas import TABLES
from ..spec import JobSpec
from ..webhook import Webhook
from .archive_command import ages, waiting
from .follow import Follower
from .follow_options import FollowOptions
from .outcome import Outcome
from .stopping import run_until_stopped


def run_follow(
    spec: JobSpec, given: argparse.Namespace, recorded: Mapping[str, Any]
) -> Outcome:
    """Follow until stopped, or for one round. Raises PipelineError."""
    options = _options(spec, given)
    spec.lake_spec()
    if given.dry_run:
        return _would(spec, options)
    webhook = Webhook.from_environment(given.webhook_env)
    # Tasks and child processes of ours do not need it.
    os.environ.pop(given.webhook_env, None)
    stop = threading.Event()
    follower = Follower(spec, options, webhook, stop, recorded_options=recorded)
    run_until_stopped(follower.work, stop, follower.reconciling.stop)
    run = follower.run
    counts = run.counts if run else {}
    rows = run.rows if run else 0
    code = 1 if given.once and follower.firing else 0
    lines = [f"{one.name}: {one.summary}" for one in follower.firing]
    said = f"follow: {rows:,} rows in {counts.get('rounds', 0)} rounds since its run"
    facts = {
        "job": "follow", "run": run.id if run else None, "rows": rows,
        "counts": counts, "firing": [one.name for one in follower.firing],
        "exit_code": code,
    }  # fmt: skip
    return Outcome([*lines, f"{said} began; {len(lines)} alerts fire."], facts, code)


def _options(spec: JobSpec, given: argparse.Namespace) -> FollowOptions:
    words = ["--since", f"{given.since.total_seconds()}s"]
    words += ["--grace", f"{given.grace.total_seconds()}s"]
    for name in given.external:
        words += ["--external", name]
    for name in given.external_sender:
        words += ["--external-sender", name]
    for key, value in given.conf:
        words += ["--conf", f"{key}={value}"]
    return FollowOptions(
        ages=ages(spec, given),
        every=given.every,
        batch_rows=given.batch_rows,
        lag=given.lag,
        dead_letters=given.dead_letters,
        window=given.window,
        away=given.away,
        stuck_after=given.stuck_after,
        reconcile_every=given.reconcile_every,
        reconcile=tuple(words),
        sweep_every=given.sweep_every,
        once=given.once,
    )


def _would(spec: JobSpec, options: FollowOptions) -> Outcome:
    """Print what a round would find."""
    source = spec.service()
    outcome = Outcome()
    for name, age in options.ages.items():
        rows, held = waiting(source, TABLES[name], age)
        outcome.facts[name] = rows
        outcome.lines.append(f"{name}: {rows:,} rows would move.")
        if held.rows:
            outcome.lines.append(f"{name}: {held.rows:,} rows wait for {held.whom}.")
    connection = connect_plain(source)
    try:
        lag = measures.lag(connection, source)
        dead = measures.dead_letters(connection, source, options.window)
    finally:
        connection.close()
    outcome.facts |= {"lag": lag, "dead_letters": dead}
    outcome.lines += [
        f"The oldest message has been due for {lag:,.0f} s.",
        f"{dead:,} messages died in the last {options.window}.",
    ]
    return outcome
