"""What the report shows, as the jobs have found it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """All that the report shows, as plain values."""

    services: Sequence[str]
    since: dt.datetime
    until: dt.datetime
    judged_at: dt.datetime | None = None
    """When the last `reconcile` began, if there was one."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """What it has counted."""
    lost: Sequence[dict[str, Any]] = ()
    """Its findings, those first that nobody has acknowledged."""
    unseen: int = 0
    """How many of them nobody has acknowledged."""
    hours: Sequence[dt.datetime] = ()
    throughput: dict[str, Sequence[float | None]] = field(default_factory=dict)
    backlog: Sequence[float | None] = ()
    critical: dict[str, Sequence[float | None]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    stages: Sequence[dict[str, Any]] = ()
    senders: Sequence[dict[str, Any]] = ()
    groups: Sequence[dict[str, Any]] = ()
