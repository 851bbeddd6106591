"""Decides whether a message is redelivered or dead after its stage has failed.

`decide(policy, attempt, error)` is pure. It returns a `RedeliverAfter` with the delay
until the next attempt, or `Dead`. The default number of attempts is the same as in
ActiveMQ: 1 delivery and 6 redeliveries.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import MAX_SECONDS, DecodeError, Redeliver, Refuse

Mode = Literal["blocking", "non_blocking", "broker"]
MODES: tuple[Mode, ...] = get_args(Mode)


MAX_REDELIVERIES = 1_000_000


def problems(**values: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid value of a policy, with the rule that the value
    breaks."""
    for name, value in values.items():
        low, high = _BOUNDS.get(name, (None, None))
        if name == "mode":
            if value not in MODES:
                yield name, f"must be one of {', '.join(MODES)}, not {value!r}"
        elif name in ("max_redeliveries", "lost_workers") and (
            not isinstance(value, int) or isinstance(value, bool)
        ):
            yield name, f"must be an integer, not {value!r}"
        elif not isinstance(value, int | float) or isinstance(value, bool):
            yield name, f"must be a number, not {value!r}"
        # Written so that NaN fails: every comparison with NaN is false.
        elif not low <= value <= high:
            yield name, f"must be between {low:g} and {high:g}, not {value!r}"


_BOUNDS: dict[str, Any] = {
    "max_redeliveries": (0, MAX_REDELIVERIES),
    "lost_workers": (0, MAX_REDELIVERIES),
    "initial_delay": (0.0, MAX_SECONDS),
    "backoff": (1.0, 1e6),
    "max_delay": (0.0, MAX_SECONDS),
    "jitter": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class RedeliveryPolicy:
    """How many times a failing message is redelivered, and after which delays.

    After failed attempt n the message waits `initial_delay * backoff ** (n - 1)`
    seconds, at most `max_delay`. This delay is changed at random by up to ± `jitter`
    times the delay. There are at most `max_redeliveries` + 1 attempts. After an
    exception of a type in `refuse_on`, no other attempt follows. An attempt whose
    worker died counts as failed, except the first `lost_workers` such attempts.
    """

    max_redeliveries: int = 6
    initial_delay: float = 1.0
    backoff: float = 2.0
    max_delay: float = 300.0
    jitter: float = 0.15
    mode: Mode = "non_blocking"
    refuse_on: tuple[type[BaseException], ...] = ()
    lost_workers: int = 0

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("mode", *_BOUNDS)}
        for name, problem in problems(**values):
            raise ValueError(f"RedeliveryPolicy: {name} {problem}")
        given: Any = self.refuse_on
        kinds = tuple(given) if isinstance(given, Iterable) else (None,)
        if not all(isinstance(one, type) for one in kinds):
            raise ValueError(
                f"RedeliveryPolicy: refuse_on must be types of exceptions, like "
                f"(ValueError,), not {given!r}"
            )
        object.__setattr__(self, "refuse_on", kinds)

    @property
    def max_attempts(self) -> int:
        """The maximum number of counted attempts: the first delivery and the
        redeliveries."""
        return self.max_redeliveries + 1

    @property
    def max_begun(self) -> int:
        """The maximum number of attempts that may begin: `max_attempts`, and
        `lost_workers` additional attempts, because the first `lost_workers` attempts
        whose worker died do not count as failed."""
        return self.max_attempts + self.lost_workers

    def delay(self, attempt: int, rand: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait between failed attempt number `attempt` and the
        next attempt."""
        if not self.initial_delay:
            return 0.0
        try:
            pause = self.initial_delay * self.backoff ** (attempt - 1)
        except OverflowError:
            pause = self.max_delay
        pause = min(pause, self.max_delay)
        return max(0.0, pause * (1 + self.jitter * (2 * rand() - 1)))


@dataclass(frozen=True)
class RedeliverAfter:
    """The decision to redeliver the message after `delay` seconds of the database's
    clock."""

    delay: float


@dataclass(frozen=True)
class Dead:
    """The decision to make the message a dead letter. `reason` is a short code that is
    stored with the dead letter."""

    reason: str


def decide(
    policy: RedeliveryPolicy, attempt: int, error: BaseException
) -> RedeliverAfter | Dead:
    """Return what follows after attempt number `attempt` (from 1) has failed with
    `error`. If the error is an exception group, the policy is applied to each exception
    in the group."""
    errors = list(_flat(error))
    if any(isinstance(one, (Refuse, *policy.refuse_on)) for one in errors):
        return Dead("refused")
    if isinstance(error, DecodeError):
        return Dead(error.reason)
    if attempt >= policy.max_attempts:
        return Dead("attempts_exhausted")
    pauses = [one.after for one in errors if isinstance(one, Redeliver)]
    return RedeliverAfter(max(pauses, default=policy.delay(attempt)))


def _flat(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, _GROUP):
        for one in error.exceptions:
            yield from _flat(one)


#: What a TaskGroup raises; Python 3.10 has none.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
