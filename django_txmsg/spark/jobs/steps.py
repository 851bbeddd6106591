"""The steps of a job's protocol, between which it may be killed, as the tests do."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of the completed step.
Step = Callable[[str], None]


def no_step(step: str) -> None:
    """Do nothing between the steps of the protocol."""
