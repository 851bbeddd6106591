"""The values that a step returns: how its run continues. They have no effect
themselves.

Equal values compare equal, so a step can be tested by calling it.
"""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

from ..envelope.message_type import message_type
from ..sending.answering import Dead as Dead
from ..sending.destination import Destination

Out = TypeVar("Out")


@message_type("txmsg.TimedOut")
@dataclass(frozen=True)
class TimedOut:
    """The argument of `otherwise` if the deadline committed first."""


@message_type("txmsg.Cancelled")
@dataclass(frozen=True)
class Cancelled:
    """The answer of a cancelled run."""

    why: str = ""


class Continuation:
    """How a run continues, if it does not end."""


@dataclass(frozen=True)
class Ask(Continuation):
    """Wait for the answer to a request. It refers to steps by name, like an address."""

    destination: Destination[Any, Any]
    body: Any
    then: str
    undo: Destination[Any, Any] | None = None
    within: dt.timedelta | None = None
    otherwise: str = ""
    key: str | None = None
    #: Whether a flow is asked, which can be cancelled.
    of_flow: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Wait(Continuation):
    """Wait for `resume(token, value)`."""

    then: str
    within: dt.timedelta | None = None
    otherwise: str = ""
    run_id: uuid.UUID = field(default_factory=uuid.uuid4, compare=False, repr=False)
    turn: uuid.UUID = field(default_factory=uuid.uuid4, compare=False, repr=False)

    @property
    def token(self) -> str:
        """The token that resumes the run. Anyone who has it can do so: keep it like a
        password."""
        return ticket(self.run_id, self.turn)


@dataclass(frozen=True)
class Sleep(Continuation):
    """Continue after a time."""

    duration: dt.timedelta
    then: str


@dataclass(frozen=True)
class Later(Continuation):
    """Continue at once, in a transaction of its own."""

    then: str
    value: Any = None


@dataclass(frozen=True)
class HandOver(Continuation):
    """End, and let another flow answer the caller."""

    destination: Destination[Any, Any]
    body: Any


@dataclass(frozen=True)
class Fail(Continuation):
    """Undo everything, newest first, then answer."""

    value: Any
    answer_first: bool = False


#: What a step returns: an answer, or how its run continues.
Next = Union[Out, Continuation]  # noqa: UP007 - mypy takes no TypeVar before `|`


def ticket(run_id: uuid.UUID, turn: uuid.UUID) -> str:
    """Return the ticket that continues a run waiting under this turn."""
    return f"{run_id.hex}.{turn.hex}"


def read_ticket(text: str) -> tuple[uuid.UUID, uuid.UUID]:
    """Return the run and the turn of a ticket. Raises ValueError."""
    run_id, _, turn = text.partition(".")
    if len(run_id) != 32 or len(turn) != 32:
        raise ValueError(text)
    return uuid.UUID(run_id), uuid.UUID(turn)


def deadline_id(turn: uuid.UUID) -> uuid.UUID:
    """Return the id of the message for the passed deadline of a turn."""
    return uuid.uuid5(turn, "deadline")
