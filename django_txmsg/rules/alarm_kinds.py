"""The kinds of alarms, worst first: what `--fail-on` and `ALERTS["KINDS"]` may name."""

from __future__ import annotations

KINDS = (
    "database", "no-worker", "outage", "overdue", "newer-code", "undo-stuck", "order",
    "silent", "dead", "unconsumed", "paused", "subscription",
)  # fmt: skip

#: All alarms but warnings.
BAD = "bad"
