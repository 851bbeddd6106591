"""What a broker's refusal is about: a message, or the state of its destination.

A full queue, a missing permission or a queue of another kind pass, or an operator ends
them. A message that is too large or has a header of a wrong type is refused each time.
"""

from __future__ import annotations

import re

from ..errors import BrokerError, DestinationUnavailable, DispatchRejected

#: AMQP's codes of what is no message's fault: access refused, not found, locked.
_CODES = (403, 404, 405)
_PRECONDITION_FAILED = 406
#: What RabbitMQ says, with that code, of a queue and not of a message.
_OF_A_QUEUE = re.compile(r"inequivalent arg|queue limit in vhost", re.I)
#: What the two brokers say over STOMP.
_OVER_STOMP = re.compile(
    r"ResourceAllocationException|is not authorized to"  # ActiveMQ
    r"|ACCESS_REFUSED|NOT_FOUND|RESOURCE_LOCKED|" + _OF_A_QUEUE.pattern,
    re.I,
)
#: Of a confirm that says no.
NACK = (
    "the broker could not store it: its queue is full and refuses more, is only being "
    "made, or has lost the majority of its replicas"
)


def by_amqp(code: int, text: str) -> BrokerError:
    """Return what RabbitMQ means when it closes a channel on one message."""
    of_a_queue = code == _PRECONDITION_FAILED and _OF_A_QUEUE.search(text)
    if code in _CODES or of_a_queue:
        return DestinationUnavailable(text)
    return DispatchRejected(text)


def by_stomp(said: str, text: str) -> BrokerError:
    """Return what an ERROR frame on one message means. `said` is the broker's word,
    `text` the whole of what is known."""
    if _OVER_STOMP.search(said):
        return DestinationUnavailable(said.partition("\n")[0])
    return DispatchRejected(text)
