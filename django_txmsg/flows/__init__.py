"""Flows: conversations of several steps between services, undone exactly if they fail.

Names resolve lazily.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOME = {
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
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
