"""A stream with micro-batches of limited size. It needs PySpark 4.2 or newer."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from .stream import LogStream


class LimitedStream(LogStream, SupportsTriggerAvailableNow):
    """A stream to which Spark passes the start and the limit of each micro-batch. With
    `trigger(availableNow=True)`, it reads only rows that existed when the query
    started."""

    target: dict[str, Any] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit `maxRowsPerBatch` if the option is set; otherwise no
        limit."""
        return ReadMaxRows(self.most) if self.most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Record the end of the log at this moment as the end of the query."""
        self.target = self.end()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch, within the limit."""
        end = self.target or self.end()
        self.insist_on_one_cluster(start, end)
        first, last = int(start["position"]), int(end["position"])
        if self.postgres and first >= last:
            self.tell_standstill(last)
        if isinstance(limit, ReadMaxRows):
            last = min(last, self.after(first, last, limit.max_rows))
        return {"position": str(max(first, last)), "cluster": end["cluster"]}
