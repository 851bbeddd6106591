"""Findings of `reconcile` runs, as stored in the lake and the database."""

from __future__ import annotations

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame
from pyspark.sql import types as t

from ..errors import UsageError
from ..noted import KEY, Noted, Which
from ..results import result_struct
from ..transforms.reconcile import CHANGE, KNOWN, SUMMARY, is_finding, standing
from .reading import WholeLog


def kept_by(log: WholeLog, name: str, struct: t.StructType) -> DataFrame:
    """Return the rows that this service's runs have stored in a table of results."""
    struct = result_struct(struct)
    if log.lake is None:
        return log.spark.createDataFrame([], struct)
    own = [log.spec.service().service]
    return log.lake.table(name, struct).read(log.spark, services=own)


def known_findings(log: WholeLog) -> DataFrame:
    """Return KNOWN: the findings of earlier runs, with operators' notes."""
    names = KNOWN.fieldNames()
    kept = kept_by(log, "verdicts", CHANGE).withColumns(
        {
            "found_at": sf.coalesce("found_at", "recorded_at"),
            "acknowledged_at": sf.lit(None).cast("timestamp"),
        }
    )
    noted = Noted(log.spec.service()).read(Which())
    rows = [[one[name] for name in names] for one in noted]
    return kept.select(*names).unionByName(log.spark.createDataFrame(rows, KNOWN))


def standing_findings(log: WholeLog) -> DataFrame:
    """Return the FINDING rows that stand since the last run of this service."""
    return standing(kept_by(log, "verdicts", CHANGE))


def judged_by(log: WholeLog, run: str = "") -> str:
    """Return the id of a run of `reconcile`, or of the last one that has stored its
    results. Raises UsageError if the lake has none."""
    runs = kept_by(log, "reconciliation", SUMMARY)
    if run:
        runs = runs.where(sf.col("run_id") == run)
    last = runs.orderBy(sf.desc("recorded_at")).select("run_id").first()
    if last is None:
        which = f"the run {run}" if run else "any run"
        raise UsageError(
            f"The lake has no results of {which} of `reconcile` of this service: "
            "reconcile first, without --dry-run."
        )
    return str(last[0])


def found_in(log: WholeLog, run: str, verdict: str) -> DataFrame:
    """Return the ids of messages for which a run has found `verdict`, without
    acknowledged findings: those need no action."""
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
