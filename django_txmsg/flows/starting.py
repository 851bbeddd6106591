"""`start()`: stores a run, and the message that begins it, in the caller's
transaction."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from ..errors import ConfigurationError
from ..models import Run
from .flow import Flow
from .sending import start_run

In = TypeVar("In")


def start(
    flow: type[Flow[In, Any]],
    body: In,
    *,
    key: str | None = None,
    on_conflict: Literal["error", "skip"] = "error",
    answer_to: str | None = None,
) -> Run:
    """Start a run, if and only if the open transaction commits, and return its row.

    Only one run of a `key` is open at a time. If there is one, `on_conflict` "skip"
    returns it and stores nothing. `answer_to` is a destination that gets the answer.

    Raises AlreadyRunning, TransactionRequired, InvalidMessage for a body that the flow
    does not take, and FlowError in a stage whose messages are not stored in its
    transaction, such as one with transaction="none".
    """
    if on_conflict not in ("error", "skip"):
        raise ConfigurationError(
            f'on_conflict={on_conflict!r} is neither "error" nor "skip".'
        )
    return start_run(
        flow._declaration,
        body,
        key=key,
        on_conflict=on_conflict,
        answer_to=answer_to,
    )
