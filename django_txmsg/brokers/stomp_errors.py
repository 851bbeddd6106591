"""Converts errors of the STOMP client into those of relay and consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import jms
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)
from . import refusals

Result = TypeVar("Result")
#: RabbitMQ's plugin sends an error for a message that it refuses, but for a negative
#: confirm its connection process just ends.
_WORDLESS = (
    "RabbitMQ ended the connection without an error, as it does by STOMP when a queue "
    "is full and refuses more:"
)


def asked(question: Callable[[], Result]) -> Result:
    """Return the client's answer. Raises BrokerUnavailable if there is none."""
    try:
        return question()
    except jms.MessagingError as error:
        raise BrokerUnavailable(str(error)) from error


def outcome(
    error: Any, *, alone: bool = False, dialect: str = ""
) -> BrokerError | None:
    """Return the error of one send as the package's own; None if it was stored. `alone`
    means that no other message was in flight."""
    if error is None:
        return None
    if isinstance(error, jms.SendHeldBackError):
        return DispatchHeld(str(error))
    if isinstance(error, jms.SendRejectedError):
        return refusals.by_stomp(error.broker_said, str(error))
    about_the_message = (
        jms.InvalidDestinationError,
        jms.MessageFormatError,
        jms.UnsupportedOperationError,
    )
    if isinstance(error, about_the_message):
        return DispatchRejected(str(error))
    hung_up = isinstance(error, jms.ConnectionLostError) and not error.silent
    written = getattr(error, "written", True)
    if alone and hung_up and written:
        if dialect == "rabbitmq" and not error.broker_said:
            return DestinationUnavailable(f"{_WORDLESS} {error}")
        found = refusals.by_stomp(error.broker_said, str(error))
        if isinstance(found, DestinationUnavailable):
            return found
    return DispatchUnknown(str(error), written=written, hung_up=hung_up)
