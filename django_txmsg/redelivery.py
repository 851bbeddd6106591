"""The side track: what becomes of a message whose stage failed.

Pure: `decide(policy, attempt, error)` says either when to try again or that the message
is dead. The defaults are ActiveMQ's maximum, 1 delivery and 6 redeliveries.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import DecodeError, Redeliver, Refuse

Mode = Literal["blocking", "non_blocking", "broker"]
MODES: tuple[Mode, ...] = ("blocking", "non_blocking", "broker")


@dataclass(frozen=True, kw_only=True)
class RedeliveryPolicy:
    """How often, and with which pauses, a failing message is tried again.

    Attempt n that failed is followed, after `initial_delay * backoff ** (n - 1)`
    seconds, at most `max_delay`, spread by ± `jitter` of it, by attempt n + 1, up to
    `max_redeliveries` + 1 attempts in all. `refuse_on` names exception types (or
    their subtypes) that no repetition can mend.
    """

    max_redeliveries: int = 6
    initial_delay: float = 1.0
    backoff: float = 2.0
    max_delay: float = 300.0
    jitter: float = 0.15
    mode: Mode = "non_blocking"
    refuse_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_redeliveries", "initial_delay", "max_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"RedeliveryPolicy: {name} must not be negative")
        if self.backoff < 1:
            raise ValueError("RedeliveryPolicy: backoff must be 1 or more")
        if not 0 <= self.jitter <= 1:
            raise ValueError("RedeliveryPolicy: jitter must be between 0 and 1")
        if self.mode not in MODES:
            raise ValueError(f"RedeliveryPolicy: mode must be one of {MODES}")
        object.__setattr__(self, "refuse_on", tuple(self.refuse_on))

    @property
    def max_attempts(self) -> int:
        """Executions in all: the delivery and its redeliveries."""
        return self.max_redeliveries + 1

    def delay(self, attempt: int, rand: Callable[[], float] = random.random) -> float:
        """Return the seconds between failed attempt `attempt` and the next one."""
        try:
            pause = self.initial_delay * self.backoff ** (attempt - 1)
        except OverflowError:
            pause = self.max_delay
        pause = min(pause, self.max_delay)
        return max(0.0, pause * (1 + self.jitter * (2 * rand() - 1)))


@dataclass(frozen=True)
class RedeliverAfter:
    """Try again in `delay` seconds, counted by the database's clock."""

    delay: float


@dataclass(frozen=True)
class Dead:
    """Bury the message. `reason` is a short code kept with the dead letter."""

    reason: str


def decide(
    policy: RedeliveryPolicy,
    attempt: int,
    error: BaseException,
    rand: Callable[[], float] = random.random,
) -> RedeliverAfter | Dead:
    """Return what follows from `error` in the `attempt`-th execution (from 1)."""
    if isinstance(error, (Refuse, *policy.refuse_on)):
        return Dead("refused")
    if isinstance(error, DecodeError):
        return Dead(error.reason)
    if attempt >= policy.max_attempts:
        return Dead("attempts_exhausted")
    if isinstance(error, Redeliver):
        return RedeliverAfter(error.after)
    return RedeliverAfter(policy.delay(attempt, rand))
