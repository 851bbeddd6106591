"""Options of `@stage`: the transaction mode, the database and isolation level of the
transaction, and the rate.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigurationError

TransactionMode = Literal["outbox", "best_effort_1pc", "broker_only", "none"]
TRANSACTION_MODES: tuple[TransactionMode, ...] = get_args(TransactionMode)
ISOLATION_LEVELS = (
    "read uncommitted",
    "read committed",
    "repeatable read",
    "serializable",
)


def check_mode(mode: str) -> None:
    """Raise ConfigurationError unless `mode` is a transaction mode."""
    if mode not in TRANSACTION_MODES:
        raise ConfigurationError(
            f"transaction={mode!r} is not one of {', '.join(TRANSACTION_MODES)}."
        )


@dataclass(frozen=True)
class TransactionDefinition:
    """The database alias and the isolation level of a stage's transaction.

    If `isolation` is None, the transaction has the isolation level of the connection,
    READ COMMITTED by default.
    """

    using: str = "default"
    isolation: str | None = None

    def __post_init__(self) -> None:
        if self.isolation is not None:
            level = self.isolation.lower().replace("_", " ")
            if level not in ISOLATION_LEVELS:
                raise ConfigurationError(
                    f"isolation={self.isolation!r} is not one of "
                    f"{', '.join(ISOLATION_LEVELS)}."
                )
            object.__setattr__(self, "isolation", level)


#: Seconds of each unit.
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
#: The part of a unit by which a slot may be used late. A line that was not used for a
#: while catches up on that much, in up to two places: less than 5 % of a unit.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of messages per second, minute, hour or day."""

    text: str
    #: Seconds from one slot to the next.
    period: float
    #: Seconds by which a slot may be used late.
    tolerance: float

    @classmethod
    def parse(cls, text: object) -> Rate:
        """Return the rate for text such as "900/m". Raises ConfigurationError if the
        text is invalid."""
        found = re.fullmatch(r"([1-9]\d{0,8})/([smhd])", str(text))
        if found is None:
            raise ConfigurationError(
                f"rate={text!r} is not a number of messages in a second, minute, hour "
                f'or day, as "10/s" and "900/m" are.'
            )
        unit = UNITS[found[2]]
        return cls(found[0], unit / int(found[1]), unit * TOLERANCE)

    def __str__(self) -> str:
        return self.text
