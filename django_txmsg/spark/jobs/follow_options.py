"""How the pipeline follows a database: interval, ages, alert bounds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FollowOptions:
    """Interval, ages, and the bounds above which alerts fire."""

    ages: Mapping[str, dt.timedelta]
    """The age at which settled rows of a table leave."""
    every: dt.timedelta = dt.timedelta(minutes=5)
    batch_rows: int = 100_000
    lag: dt.timedelta = dt.timedelta(minutes=15)
    dead_letters: int = 10
    """In `window`."""
    window: dt.timedelta = dt.timedelta(hours=1)
    away: dt.timedelta = dt.timedelta(minutes=5)
    stuck_after: dt.timedelta = dt.timedelta(hours=6)
    reconcile_every: dt.timedelta = dt.timedelta(hours=1)
    reconcile: tuple[str, ...] = ()
    """The arguments of its command line."""
    sweep_every: dt.timedelta = dt.timedelta(days=1)
    once: bool = False
