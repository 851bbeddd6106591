"""Flows: conversations of several steps between services, undone exactly if they fail.

Names resolve lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from ..errors import AlreadyResumed, AlreadyRunning
    from ..sending.answering import Dead
    from .flow import Flow, signal, step
    from .sending import cancel, resume
    from .starting import start
    from .values import (
        Ask,
        Cancelled,
        Fail,
        HandOver,
        Later,
        Next,
        Sleep,
        TimedOut,
        Wait,
    )

__all__ = [
    "AlreadyResumed",
    "AlreadyRunning",
    "Ask",
    "Cancelled",
    "Dead",
    "Fail",
    "Flow",
    "HandOver",
    "Later",
    "Next",
    "Sleep",
    "TimedOut",
    "Wait",
    "cancel",
    "resume",
    "signal",
    "start",
    "step",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AlreadyResumed": "..errors",
        "AlreadyRunning": "..errors",
        "Ask": ".values",
        "Cancelled": ".values",
        "Dead": ".values",
        "Fail": ".values",
        "Flow": ".flow",
        "HandOver": ".values",
        "Later": ".values",
        "Next": ".values",
        "Sleep": ".values",
        "TimedOut": ".values",
        "Wait": ".values",
        "cancel": ".sending",
        "resume": ".sending",
        "signal": ".flow",
        "start": ".starting",
        "step": ".flow",
    },
)
