"""The stage of `benchmarks.limits`. Django finds it in this module."""

from __future__ import annotations

from ._workers_tasks import rated

__all__ = ["rated"]
