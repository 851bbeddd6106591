"""The stage of `benchmarks.limits`, where Django looks for it."""

from __future__ import annotations

from ._workers_tasks import rated

__all__ = ["rated"]
