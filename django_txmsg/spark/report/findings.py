"""The report's data, from the jobs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """All data of the report, as plain values."""

    services: Sequence[str]
    since: dt.datetime
    until: dt.datetime
    judged_at: dt.datetime | None = None
    """When the last `reconcile` began, if there was one."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """Its counts."""
    lost: Sequence[dict[str, Any]] = ()
    """Its findings, unacknowledged ones first."""
    unseen: int = 0
    """How many of them are not acknowledged."""
    hours: Sequence[dt.datetime] = ()
    throughput: dict[str, Sequence[float | None]] = field(default_factory=dict)
    backlog: Sequence[float | None] = ()
    critical: dict[str, Sequence[float | None]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    stages: Sequence[dict[str, Any]] = ()
    senders: Sequence[dict[str, Any]] = ()
    groups: Sequence[dict[str, Any]] = ()
