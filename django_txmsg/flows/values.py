"""The values that a step returns to say how its run continues. Creating such a value
has no effect.

Two values with the same content are equal, so a test can call a step and compare its
result.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Union

from .. import wire
from ..envelope.message_type import message_type
from ..sending.answering import Cancelled as Cancelled
from ..sending.answering import Dead as Dead
from ..sending.destination import Destination

Out = TypeVar("Out")
Reply = TypeVar("Reply")


@message_type("txmsg.TimedOut")
@dataclass(frozen=True)
class TimedOut:
    """The argument of `otherwise` if the deadline was committed before the answer."""


@message_type("txmsg.BatchEnded")
@dataclass(frozen=True)
class BatchEnded:
    """The message at the end of a batch. It has the run's id, and four counts: all
    messages, answered messages, messages that were given up, and messages without an
    answer at that time."""

    run_id: str
    total: int
    answered: int
    failed: int
    left: int


#: Our own answer types, which any step may get, by name.
OURS: dict[str, Any] = {
    "txmsg.TimedOut": TimedOut,
    "txmsg.Dead": Dead,
    "txmsg.Cancelled": Cancelled,
}


class Continuation:
    """The base class of values that say how a run continues after a step."""


@dataclass(frozen=True)
class Request(Generic[Reply]):
    """A request of a flow, which a gather may send with others."""

    destination: Destination[Any, Reply]
    body: Any
    undo: Destination[Any, Any] | None = None
    key: str | None = None
    #: Whether a flow is asked, which can be cancelled.
    of_flow: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Ask(Request[Any], Continuation):
    """Send a request and wait for its answer. `then` and `otherwise` are names of
    steps."""

    then: str
    within: dt.timedelta | None = None
    otherwise: str = ""


@dataclass(frozen=True)
class Gather(Continuation):
    """Send several requests and wait for their answers."""

    requests: tuple[Request[Any], ...]
    then: str
    enough: int | None = None
    within: dt.timedelta | None = None
    at_once: int | None = None


class Answers(Generic[Reply]):
    """The answers to a gather, one for each request, in the order of the requests. The
    answer is Dead for a request that was given up, TimedOut for a request that had no
    answer at the end of the gather, and Cancelled for a flow that was cancelled.

    A test of a step creates this object from a list. A run reads the answers from the
    database, a thousand at a time.
    """

    def __init__(self, values: Collection[Reply | TimedOut | Dead | Cancelled]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Reply | TimedOut | Dead | Cancelled]:
        return iter(self._values)


@dataclass(frozen=True)
class Wait(Continuation):
    """Wait until `resume(token, value)` is called."""

    then: str
    within: dt.timedelta | None = None
    otherwise: str = ""
    run_id: uuid.UUID = field(default_factory=uuid.uuid4, compare=False, repr=False)
    turn: uuid.UUID = field(default_factory=uuid.uuid4, compare=False, repr=False)

    @property
    def token(self) -> str:
        """The token that resumes the run. Keep it secret like a password, because
        anyone who has the token can resume the run."""
        return wire.ticket(self.run_id, self.turn)


@dataclass(frozen=True)
class Sleep(Continuation):
    """After `duration`, continue with the step `then`."""

    duration: dt.timedelta
    then: str


@dataclass(frozen=True)
class Later(Continuation):
    """Continue immediately with the step `then`, in a separate transaction."""

    then: str
    value: Any = None


@dataclass(frozen=True)
class HandOver(Continuation):
    """End the run, and let a run of another flow answer the caller."""

    destination: Destination[Any, Any]
    body: Any


@dataclass(frozen=True)
class Fail(Continuation):
    """Execute the run's undos, newest first, and then answer."""

    value: Any
    answer_first: bool = False


#: What a step returns: an answer, or how its run continues.
Next = Union[Out, Continuation]  # noqa: UP007 - mypy takes no TypeVar before `|`


def deadline_id(turn: uuid.UUID) -> uuid.UUID:
    """Return the id of the message which reports that a turn's deadline has passed."""
    return uuid.uuid5(turn, "deadline")
