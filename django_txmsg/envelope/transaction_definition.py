"""The options of a stage's transaction: mode, database, isolation level.

Pure: no Django, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigurationError

TransactionMode = Literal["outbox", "best_effort_1pc", "broker_only", "none"]
TRANSACTION_MODES: tuple[TransactionMode, ...] = (
    "outbox",
    "best_effort_1pc",
    "broker_only",
    "none",
)
ISOLATION_LEVELS = (
    "read uncommitted",
    "read committed",
    "repeatable read",
    "serializable",
)


def check_mode(mode: str) -> None:
    """Raise ConfigurationError unless this is a transaction mode."""
    if mode not in TRANSACTION_MODES:
        raise ConfigurationError(
            f"transaction={mode!r} is not one of {', '.join(TRANSACTION_MODES)}."
        )


@dataclass(frozen=True)
class TransactionDefinition:
    """The database transaction of a stage: its alias and its isolation level.

    If `isolation` is None, the connection's own level applies, READ COMMITTED by
    default.
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
