"""What goes out: which messages a replay takes, and what a dataset's rows become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ReplayOptions:
    """Which messages go out again, as what, and how fast."""

    where: str = ""
    table: Literal["outbox", "dead_letters"] = "outbox"
    mode: Literal["same", "copy"] = "same"
    rate: float = 0
    limit: int = 0
    name: str = ""
    replayed: bool = False
    """Whether what a replay or a redelivery has stored may be chosen as well."""
    verdict: str = ""
    """Only messages of which a `reconcile` has found this."""
    found_by: str = ""
    """That run's id; empty: the last one that has kept its results."""
    dry_run: bool = False


@dataclass(frozen=True)
class SendOptions:
    """The dataset and what becomes of each of its rows."""

    path: str
    destination: str
    template: str
    name: str
    format: str = ""
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    identity: str = ""
    rate: float = 0
    broker: str = "default"
    dry_run: bool = False
