"""`findings`: lists the findings of `reconcile` with operators' notes, and acknowledges
them.

Findings are stored in the lake and in the database. The job does not start Spark.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame
from pyspark.sql import types as t

from ...monitoring.lengths import duration
from ..errors import UsageError
from ..noted import KEY, Noted, Which
from ..results import result_struct
from ..runs import RUN, Run, run_by
from ..spec import JobSpec
from ..transforms.reconcile import (
    CHANGE,
    FINDINGS,
    KNOWN,
    SUMMARY,
    is_finding,
    standing,
)
from .reading import WholeLog


def kept_by(log: WholeLog, name: str, struct: t.StructType) -> DataFrame:
    """Return the rows of a table of results that were stored by this service's pipeline
    runs. Without a lake, there are no such rows."""
    struct = result_struct(struct)
    if log.lake is None:
        return log.spark.createDataFrame([], struct)
    own = [log.spec.service().service]
    return log.lake.table(name, struct).read(log.spark, services=own)


def ended_runs(log: WholeLog) -> DataFrame:
    """Return the rows of this service's finished runs of `reconcile` in the lake. These
    runs have stored their results, because dry runs are left out."""
    ended = kept_by(log, "runs", RUN).where("state IN ('clean', 'findings')")
    real = ~sf.col("options").contains('"dry_run":')
    return ended.where(real & (sf.col("job") == "reconcile"))


def standing_findings(log: WholeLog) -> DataFrame:
    """Return the FINDING rows of the lake that were unresolved after the last run of
    this service. In a finding that only a run without an end has found, `found_at` is
    null."""
    ended = ended_runs(log).select("run_id", sf.lit(True).alias("ended"))
    ended = sf.broadcast(ended)
    journal = kept_by(log, "verdicts", CHANGE).join(ended, "run_id", "left")
    found_at = sf.when(sf.col("ended"), sf.col("found_at"))
    return standing(journal.withColumn("found_at", found_at))


def known_findings(log: WholeLog, standing: DataFrame) -> DataFrame:
    """Return KNOWN rows: the standing findings of the lake, and those of the database
    with operators' notes."""
    names = KNOWN.fieldNames()
    noted = Noted(log.spec.service()).standing()
    rows = [[one[name] for name in names] for one in noted]
    kept = standing.withColumn("acknowledged_at", sf.lit(None).cast("timestamp"))
    return kept.select(*names).unionByName(log.spark.createDataFrame(rows, KNOWN))


def insist_on_a_finding(verdict: str) -> None:
    """Raise UsageError if a verdict is given that is not a finding."""
    if verdict and verdict not in FINDINGS:
        raise UsageError(
            f"{verdict!r} is not a finding; there are {', '.join(FINDINGS)}."
        )


def judged_by(log: WholeLog, run: str = "") -> str:
    """Return the id of a run of `reconcile` whose results are in the lake: the given
    run, or by default the last one. Raises UsageError if there is none."""
    runs = kept_by(log, "reconciliation", SUMMARY)
    if run:
        runs = runs.where(sf.col("run_id") == run)
    last = runs.orderBy(sf.desc("recorded_at")).select("run_id").first()
    if last is None:
        which = f"the run {run}" if run else "any run"
        raise UsageError(
            f"The lake has no results of {which} of `reconcile` for this service. "
            "To reconcile first, run `pipeline reconcile` without --dry-run."
        )
    return str(last[0])


def found_in(log: WholeLog, run: str, verdict: str) -> DataFrame:
    """Return the ids of the messages that had this verdict after a run. Acknowledged
    findings are left out, because they need no action."""
    judged = kept_by(log, "reconciliation", SUMMARY).where(sf.col("run_id") == run)
    ended = judged.agg(sf.max("recorded_at").alias("ended_at"))
    journal = kept_by(log, "verdicts", CHANGE).where(sf.col("verdict") == verdict)
    until = journal.crossJoin(sf.broadcast(ended)).where("recorded_at <= ended_at")
    # A run of an early release has written all that it has found.
    early = journal.where((sf.col("run_id") == run) & sf.col("change").isNull())
    found = standing(until).select(*KEY).unionByName(early.select(*KEY))
    noted = Noted(log.spec.service()).read(Which(verdict, acknowledged=True))
    rows = [[one[name] for name in KEY] for one in noted]
    settled = log.spark.createDataFrame(
        rows, t.StructType([t.StructField(f"of_{n}", t.StringType()) for n in KEY])
    )
    found = found.join(sf.broadcast(settled), is_finding("of_"), "left_anti")
    return found.select("message_id").distinct()


#: Most findings listed for people. `--json` has them all.
SHOWN = 50


def findings_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """List findings, acknowledge them, or reopen them. Raises UsageError if the
    verdict is unknown, or if findings are to be changed and no option says which."""
    insist_on_a_finding(given.verdict)
    noted = Noted(spec.service())
    which = Which(given.verdict, given.destination, tuple(given.message_id))
    changes = given.reopen or given.acknowledge is not None
    if not changes:
        if not given.all:
            which = dataclasses.replace(which, acknowledged=False)
        _list(noted, which, run)
        return
    if which == Which() and not given.all:
        raise UsageError(
            "Which findings? Give --verdict, --destination or --message-id, or --all."
        )
    if given.dry_run:
        there = dataclasses.replace(which, acknowledged=bool(given.reopen))
        run.rows, verb = len(noted.read(there)), "would be"
    elif given.reopen:
        run.rows, verb = noted.reopen(which), "are"
    else:
        run.rows, verb = noted.acknowledge(which, run_by(), given.acknowledge), "are"
    word = "open again" if given.reopen else "acknowledged"
    run.lines.append(f"{run.rows:,} findings {verb} {word}.")


def described(finding: Mapping[str, Any]) -> str:
    """Return the verdict of a finding, its message and their places, as text."""
    return (
        f"{finding['verdict']}: {finding['message_id']} to {finding['destination']} "
        f"from {finding['sender'] or 'an unknown sender'} at "
        f"{finding['consumer'] or 'no consumer'}"
    )


def _list(noted: Noted, which: Which, run: Run) -> None:
    found = noted.read(which)
    now = dt.datetime.now(dt.timezone.utc)

    def age(since: dt.datetime) -> str:
        return duration(max(0.0, (now - since).total_seconds()))

    for one in found[:SHOWN]:
        line = f"{described(one)}, found {age(one['found_at'])} ago"
        if one["acknowledged_at"]:
            line += (
                f"; acknowledged by {one['acknowledged_by']} "
                f"{age(one['acknowledged_at'])} ago: {one['note']}"
            )
        run.lines.append(line)
    if len(found) > SHOWN:
        run.lines.append(f"… and {len(found) - SHOWN:,} more: --json lists all.")
    run.rows, run.counts = len(found), Counter(one["verdict"] for one in found)
    run.facts["findings"] = found
