"""Judges runs of flows for `reconcile`: whether a run is stuck, and whether a failed
run has undone all of its work. For that, it reads the rows of the runs' requests in the
message log.

A healthy run has no verdict. Its messages are judged like all others.
"""

from __future__ import annotations

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame

from ..noted import MOST
from ..schemas import FLOW_RUNS, FLOW_UNDOS
from ..transforms import timestamp
from ..transforms.reconcile import VERDICT, Judgement, of_service
from .journeys import Journeys
from .reading import WholeLog, day_of

#: The verdicts of runs.
OF_RUNS = ("undo_without_request", "unanswered", "not_undone")

#: The rows of the database that can have a verdict, and the undos of these runs.
_LIVE = (
    "(t.ended_at IS NULL OR t.outcome = 'failed'"
    " OR (t.outcome = 'answered' AND CAST(t.caller AS text) <> '{{}}'))"
)
_LIVE_UNDOS = f"t.run_id IN (SELECT t.id FROM {FLOW_RUNS.relation} t WHERE {_LIVE})"
#: These runs, and one run of each flow that has handed over to another flow. There may
#: be many of the latter, and only their flow's name is read.
LIVE_RUNS = (
    f"({_LIVE} OR t.id IN (SELECT max(h.id) FROM {FLOW_RUNS.relation} h"
    " WHERE h.outcome = 'handed_over' GROUP BY h.service, h.flow))"
)

#: The columns that are read of runs and of undos.
RUN = FLOW_RUNS.narrow((
    "service", "message_id", "flow", "waits_for", "asked", "request_id", "since",
    "due_at", "result", "caller", "created_at", "ended_at",
))  # fmt: skip
UNDO = FLOW_UNDOS.narrow((
    "service", "message_id", "destination", "request_id", "created_at", "confirmed_at",
))  # fmt: skip


class Flows:
    """The runs that can have a verdict, with their undos and requests, of all services:
    open runs, runs that undo or have undone their work, and runs whose answer was not
    delivered. They are read while the snapshots of the databases are open. Archived
    runs that began before `by.since` are left out, unless there is a finding about a
    run."""

    def __init__(self, log: WholeLog, by: Judgement) -> None:
        self._by, self._stuck = by, timestamp(by.stuck_before)
        # A run may register an undo long after it began, never before.
        found = any(verdict in OF_RUNS for _, verdict in by.standing)
        day = None if by.since is None or found else day_of(by.since)
        runs = log.read("flow_runs", RUN, since=day, where=LIVE_RUNS)
        undos = log.read("flow_undos", UNDO, since=day, where=_LIVE_UNDOS)
        alive = _undoing() | sf.col("ended_at").isNull() | _undelivered()
        self._runs = runs.where(alive)
        # The lake also has runs that have answered: their callers wait in vain.
        names = runs.where(alive | (sf.col("result") == "handed_over"))
        self._names = names.select(sf.col("flow").alias("name")).distinct()
        failed = self._runs.where(_undoing())
        failed = failed.select("service", "message_id", "flow", "ended_at")
        self._undos = undos.join(failed, ["service", "message_id"])
        waiting = _waits_for("answer", "undo") & (sf.col("since") < self._stuck)
        ids = self._runs.where(waiting).select("request_id")
        ids = ids.unionByName(self._undos.select("request_id")).distinct()
        self._ids = ids.where("request_id IS NOT NULL")
        # With more than MOST, all messages are read.
        self.requests = [row[0] for row in self._ids.limit(MOST + 1).collect()]

    def verdicts(self, rest: DataFrame, journeys: Journeys) -> DataFrame | None:
        """Return the VERDICT rows of runs of flows. Returns None if no run can have a
        verdict. `rest` has the steps that are not in `journeys`."""
        if self._runs.isEmpty():
            return None
        asked = self._asked(rest, journeys)
        found = rest.sparkSession.createDataFrame([], VERDICT)
        for one in (self._of_runs(asked), self._of_undos(asked)):
            one = one.where("verdict IS NOT NULL")
            found = found.unionByName(one, allowMissingColumns=True)
        return found

    def _asked(self, rest: DataFrame, journeys: Journeys) -> DataFrame:
        """Return what the message log has about requests, and about the undos for which
        runs wait: whether they were stored, when they were due, and when they were
        processed."""
        known = journeys.read() if self.requests else None
        told = rest if known is None else rest.unionByName(known)
        wanted = self._ids.withColumnRenamed("request_id", "message_id")
        told = told.join(wanted, "message_id", "left_semi")
        return told.groupBy(sf.col("message_id").alias("request_id")).agg(
            (sf.sum("stored") > 0).alias("was_sent"),
            sf.max("due_again_at").alias("left_at"),
            sf.max("processed_at").alias("processed_at"),
        )

    def _of_runs(self, asked: DataFrame) -> DataFrame:
        waits = self._runs.join(asked, "request_id", "left").join(
            sf.broadcast(self._names), sf.col("asked") == sf.col("name"), "left"
        )
        late = sf.col("since") < self._stuck
        # A flow may work for long after it has processed its request; a stage answers
        # then.
        answerless = (
            _waits_for("answer")
            & sf.col("name").isNull()
            & (sf.col("processed_at") < self._stuck)
            & late
        )
        overdue = sf.col("due_at") < self._stuck
        idle = _waits_for("itself") & late
        unanswered = overdue | idle | answerless | _undelivered()
        # The undo of a foreign request waits until the request has expired.
        begun = sf.coalesce(sf.col("left_at") < self._stuck, sf.lit(True))
        return waits.select(
            "message_id",
            sf.col("flow").alias("destination"),
            "due_at",
            sf.when(_waits_for("undo") & late & begun, "not_undone")
            .when(sf.coalesce(unanswered, sf.lit(False)), "unanswered")
            .alias("verdict"),
            *_of_each(),
        )

    def _of_undos(self, asked: DataFrame) -> DataFrame:
        start = of_service(sf.col("service"), self._by.outbox_from)
        unasked = (
            sf.col("request_id").isNotNull()
            & ~sf.coalesce("was_sent", sf.lit(False))
            & (sf.col("created_at") < timestamp(self._by.horizon))
            & (start.isNull() | (sf.col("created_at") >= start))
        )
        forgotten = sf.col("ended_at").isNotNull() & sf.col("confirmed_at").isNull()
        return self._undos.join(asked, "request_id", "left").select(
            sf.coalesce("request_id", "message_id").alias("message_id"),
            "destination",
            sf.when(unasked, "undo_without_request")
            .when(forgotten, "not_undone")
            .alias("verdict"),
            *_of_each(),
        )


def _of_each() -> list[Column]:
    """Return the columns that the verdicts of runs and of undos have in common."""
    return [
        sf.col("service").alias("sender"),
        sf.concat_ws("/", "service", "flow").alias("consumer"),
        sf.col("created_at").alias("sent_at"),
        sf.lit(0).alias("deliveries"),
        sf.lit(0).alias("times_processed"),
    ]


def _undoing() -> Column:
    return _waits_for("undo") | (sf.col("result") == "failed")


def _waits_for(*what: str) -> Column:
    return sf.col("ended_at").isNull() & sf.col("waits_for").isin(*what)


def _undelivered() -> Column:
    """Return a condition: the run has ended, and its answer was not sent to the
    caller."""
    answered = sf.col("result").isin("answered", "failed")
    return sf.coalesce(answered & (sf.col("caller") != "{}"), sf.lit(False))
