"""The options of `replay` and `send`: which messages, and how a dataset's rows become
messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ReplayOptions:
    """Which messages are sent again, in which form, and how fast."""

    where: str = ""
    table: Literal["outbox", "dead_letters"] = "outbox"
    mode: Literal["same", "copy"] = "same"
    rate: float = 0
    limit: int = 0
    name: str = ""
    replayed: bool = False
    """Whether messages stored by a replay or a redelivery may be selected as well."""
    verdict: str = ""
    """Only messages for which a `reconcile` has found this."""
    found_by: str = ""
    """That run's id; empty: the last one that has stored its results."""
    dry_run: bool = False


@dataclass(frozen=True)
class SendOptions:
    """The dataset and how each of its rows becomes a message."""

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
