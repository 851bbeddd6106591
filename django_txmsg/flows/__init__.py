"""Flows: conversations of several steps between services. A flow that fails undoes its
work.

The names of this package are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_imports import lazy_names

if TYPE_CHECKING:
    from ..errors import AlreadyResumed, AlreadyRunning
    from ..sending.answering import Dead
    from .flow import Flow, signal, step
    from .sending import cancel, resume
    from .starting import FlowView, aask, ask, batch, start
    from .values import (
        Answers,
        Ask,
        BatchEnded,
        Cancelled,
        Fail,
        Gather,
        HandOver,
        Later,
        Next,
        Request,
        Sleep,
        TimedOut,
        Wait,
    )

__all__ = [
    "AlreadyResumed",
    "AlreadyRunning",
    "Answers",
    "Ask",
    "BatchEnded",
    "Cancelled",
    "Dead",
    "Fail",
    "Flow",
    "FlowView",
    "Gather",
    "HandOver",
    "Later",
    "Next",
    "Request",
    "Sleep",
    "TimedOut",
    "Wait",
    "aask",
    "ask",
    "batch",
    "cancel",
    "resume",
    "signal",
    "start",
    "step",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".values": __all__,
        "..errors": ["AlreadyResumed", "AlreadyRunning"],
        ".flow": ["Flow", "signal", "step"],
        ".sending": ["cancel", "resume"],
        ".starting": ["FlowView", "aask", "ask", "batch", "start"],
    },
)
