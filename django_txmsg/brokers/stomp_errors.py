"""What the STOMP client raises, as the errors that relay and consumer know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import jms
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)

Result = TypeVar("Result")


def asked(question: Callable[[], Result]) -> Result:
    """Return the client's answer. Raises BrokerUnavailable when it has none."""
    try:
        return question()
    except jms.MessagingError as error:
        raise BrokerUnavailable(str(error)) from error


def outcome(error: Any) -> BrokerError | None:
    """Return the error of one send as the package's own; None where it was stored."""
    if error is None:
        return None
    if isinstance(error, jms.SendHeldBackError):
        return DispatchHeld(str(error))
    about_the_message = (
        jms.SendRejectedError,
        jms.InvalidDestinationError,
        jms.MessageFormatError,
        jms.UnsupportedOperationError,
    )
    if isinstance(error, about_the_message):
        return DispatchRejected(str(error))
    return DispatchUnknown(
        str(error),
        written=getattr(error, "written", True),
        hung_up=isinstance(error, jms.ConnectionLostError),
    )
