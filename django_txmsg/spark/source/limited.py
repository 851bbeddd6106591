"""A stream whose micro-batches are limited, as PySpark asks for it since 4.2."""

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
    """A stream that is told from where to read and how much, and that stands by what
    was there when `trigger(availableNow=True)` began."""

    target: dict[str, Any] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to `maxRowsPerBatch`, when given."""
        return ReadMaxRows(self.most) if self.most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of what this run reads."""
        self.target = self.end()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Return how far may be read within the limit."""
        end = self.target or self.end()
        self.insist_on_one_cluster(start, end)
        first, last = int(start["position"]), int(end["position"])
        if self.postgres and first >= last:
            self.tell_standstill(last)
        if isinstance(limit, ReadMaxRows):
            last = min(last, self.after(first, last, limit.max_rows))
        return {"position": str(max(first, last)), "cluster": end["cluster"]}
