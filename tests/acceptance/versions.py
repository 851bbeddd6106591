"""Three versions of one service's code, for the processes that run them side by side.

The second version adds a field with a default, and old code reads its messages. The
third version changes the meaning of a field. It upgrades old bodies, and its own
messages wait if only old code runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django_txmsg import Message, message_type, stage, upgrade
from tests.app.models import Effect

NAME = "versions.Order"


@message_type(NAME)
@dataclass
class First:
    number: str
    cents: int


@message_type(NAME, version=2, readable_from=1)
@dataclass
class Second:
    number: str
    cents: int
    currency: str = "EUR"


@message_type(NAME, version=3, readable_from=3)
@dataclass
class Third:
    number: str
    amount: Decimal
    currency: str = "EUR"


def from_cents(body: dict[str, Any]) -> dict[str, Any]:
    """Convert a body of version 2 to version 3."""
    return body | {"amount": str(Decimal(body.pop("cents")) / 100)}


def done(version: int, order: Any, message: Message) -> None:
    Effect.objects.create(name=f"{version} {order}", message_id=str(message.id))


def first() -> None:
    """Declare the stage of version 1."""

    @stage(os.environ["VERSIONS"])
    def place(order: First, message: Message) -> None:
        done(1, order, message)


def second() -> None:
    """Declare the stage of version 2."""

    @stage(os.environ["VERSIONS"])
    def place(order: Second, message: Message) -> None:
        done(2, order, message)


def third() -> None:
    """Declare the stage of version 3."""
    upgrade(NAME, from_version=2)(from_cents)

    @stage(os.environ["VERSIONS"])
    def place(order: Third, message: Message) -> None:
        done(3, order, message)
