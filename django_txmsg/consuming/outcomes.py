"""Hop 7's interface: an arrival goes in, and one of these outcomes comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..brokers.base import Delivery
from ..envelope.redelivery import Dead, RedeliverAfter


@dataclass(frozen=True, slots=True)
class Processed:
    """The stage's transaction is committed."""

    acknowledged: bool = False
    """Whether the broker's own transaction has acknowledged the delivery already."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """This copy only needs to be dropped."""


@dataclass(frozen=True, slots=True)
class SentBack:
    """A foreign message without a stable identity is in its queue again, with an id of
    ours."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Parked, without counting an attempt: until newer code can read the body, because
    its queue did not take the copy back, or until its slot by the stage's rate."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Parked, without counting an attempt, until its turn among the messages of its
    key."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker is stopping: leave the delivery to the broker, unacknowledged."""


Outcome = (
    Processed
    | Duplicate
    | RedeliverAfter
    | Dead
    | SentBack
    | Postponed
    | Waiting
    | Interrupted
)


def to_acknowledge(
    deliveries: Sequence[Delivery], outcomes: Sequence[Outcome]
) -> list[Delivery]:
    """Return the deliveries that are settled by an acknowledgement: all but those that
    are settled already, and those that are left to the broker."""
    return [
        delivery
        for delivery, outcome in zip(deliveries, outcomes, strict=True)
        if not isinstance(outcome, Interrupted)
        and not (isinstance(outcome, Processed) and outcome.acknowledged)
    ]
