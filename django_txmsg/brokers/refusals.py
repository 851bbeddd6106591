"""Decides whether a broker refused a message because of the message itself, or because
of the state of its destination.

An operator can repair a destination: a full queue, a missing permission, a queue of the
wrong type. The broker then accepts the message. If the message itself is at fault (too
large, say, or with a header of the wrong type), the broker will always refuse it.
"""

from __future__ import annotations

import re

from ..errors import (
    BrokerError,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)

#: AMQP's codes for states of a destination: access refused, not found, locked.
_CODES = (403, 404, 405)
_PRECONDITION_FAILED = 406
#: RabbitMQ's texts, with that code, about a queue rather than a message.
_OF_A_QUEUE = re.compile(r"inequivalent arg|queue limit in", re.I)
#: The texts of the brokers over STOMP.
_OVER_STOMP = re.compile(
    r"ResourceAllocationException|is not authorized to"  # ActiveMQ
    # Artemis: no permission (for a queue), full, disk full, missing, another type
    r"|AMQ(229032|229213|229102|229119|339001|339041):"
    r"|ACCESS_REFUSED|NOT_FOUND|RESOURCE_LOCKED|" + _OF_A_QUEUE.pattern,
    re.I,
)
#: RabbitMQ's text over STOMP for a failure of its own. If it refuses one of several
#: messages in flight, the next one can meet the channel that has just ended.
_OF_THE_SERVER = re.compile(r"Processing error")
#: The text for a negative confirm.
NACK = (
    "the broker could not store it: its queue is full and refuses more, is only being "
    "made, or has lost the majority of its replicas"
)


def by_amqp(code: int, text: str) -> BrokerError:
    """Return the outcome of a message that made RabbitMQ close the channel. `code` and
    `text` are RabbitMQ's reason."""
    of_a_queue = code == _PRECONDITION_FAILED and _OF_A_QUEUE.search(text)
    if code in _CODES or of_a_queue:
        return DestinationUnavailable(text)
    return DispatchRejected(text)


def by_stomp(short: str, text: str) -> BrokerError:
    """Return the outcome of a message after an ERROR frame. `short` is the frame's
    short text, and `text` is its full text. Return DispatchUnknown if the ERROR is not
    about a message."""
    if _OVER_STOMP.search(short):
        return DestinationUnavailable(short.partition("\n")[0])
    if _OF_THE_SERVER.match(short):
        return DispatchUnknown(text, hung_up=True)
    return DispatchRejected(text)
