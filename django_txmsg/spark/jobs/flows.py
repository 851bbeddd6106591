"""Reads runs of flows for `reconcile`, with the rows of their requests in the message
log."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from functools import reduce

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame

from ..transforms.flows import (
    REQUEST,
    RUN,
    UNDO,
    flow_verdicts,
    judged,
    requests_of,
)
from ..transforms.reconcile import Judgement
from .journeys import Journeys
from .reading import WholeLog


class Flows:
    """The runs and undos of all services. They are read while the snapshots of the
    databases are open."""

    def __init__(self, log: WholeLog, since: dt.datetime | None) -> None:
        # A run may register an undo long after it began, never before.
        day = None if since is None else since.date()
        self._runs = log.read("flow_runs", RUN, since=day)
        self._undos = log.read("flow_undos", UNDO, since=day)
        self._known_from = _known_from(log)

    def verdicts(
        self, rest: DataFrame, journeys: Journeys, by: Judgement
    ) -> DataFrame | None:
        """Return the VERDICT rows of runs of flows. Returns None if no run can have a
        verdict. `rest` has the steps that are not in `journeys`."""
        runs = judged(self._runs, by)
        if runs.isEmpty():
            return None
        ids = requests_of(runs, self._undos, by).localCheckpoint()
        requests = rest.sparkSession.createDataFrame([], REQUEST)
        if not ids.isEmpty():
            sides = [rest, journeys.read()]
            told = reduce(
                DataFrame.unionByName,
                [
                    one.select("message_id", "stored", "processed_at")
                    for one in sides
                    if one is not None
                ],
            )
            wanted = ids.withColumnRenamed("request_id", "message_id")
            requests = (
                told.join(wanted, "message_id", "left_semi")
                .groupBy("message_id")
                .agg(
                    (sf.sum("stored") > 0).alias("was_sent"),
                    sf.max("processed_at").alias("processed_at"),
                )
            )
        return flow_verdicts(runs, self._undos, requests, by, self._known_from)


def _known_from(log: WholeLog) -> Mapping[str, dt.datetime]:
    """Return the instant from which each service's log is complete. With a lake, this
    is the service's first day in the lake. Without one, it follows from the
    retention."""
    days: dict[str, dt.date] = {}
    for one in log.files_of("outbox")[1]:
        days[one.service] = min(one.day, days.get(one.service, one.day))
    kept = log.spec.retention.get("outbox")
    found = {}
    for live in log.live:
        if live.service in days:
            start = dt.datetime.combine(days[live.service], dt.time(), dt.timezone.utc)
            found[live.service] = start
        elif kept is not None:
            found[live.service] = live.taken - dt.timedelta(days=kept)
    return found
