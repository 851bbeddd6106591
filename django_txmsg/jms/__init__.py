"""A STOMP client with the API of Jakarta Messaging. It works without Django.

Hops 4 and 6 of a message: the relay sends through this client, and the consumer
receives through it. ::

    with ConnectionFactory("stomp://localhost:61613").create_connection() as connection:
        with connection.create_session() as session:
            session.create_producer("orders.place").send(Message("text"))
"""

from __future__ import annotations

from .completion import CompletionFuture, CompletionListener
from .connection import Connection, ConnectionFactory, Context, ContextProducer
from .consumer import AckMode, MessageConsumer
from .destination import Destination, Queue, Topic
from .errors import (
    ConnectionFailedError,
    ConnectionLostError,
    IllegalStateError,
    InvalidDestinationError,
    MessageFormatError,
    MessageNotAccessibleError,
    MessagingError,
    RequestRejectedError,
    RequestTimeoutError,
    SendHeldBackError,
    SendOutcomeUnknownError,
    SendRejectedError,
    SendTimeoutError,
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnsupportedOperationError,
    WindowFullError,
)
from .message import Delivery, DeliveryMode, Message
from .options import Options, Policy
from .producer import MessageProducer
from .session import Session

__all__ = [
    "AckMode",
    "CompletionFuture",
    "CompletionListener",
    "Connection",
    "ConnectionFactory",
    "ConnectionFailedError",
    "ConnectionLostError",
    "Context",
    "ContextProducer",
    "Delivery",
    "DeliveryMode",
    "Destination",
    "IllegalStateError",
    "InvalidDestinationError",
    "Message",
    "MessageConsumer",
    "MessageFormatError",
    "MessageNotAccessibleError",
    "MessageProducer",
    "MessagingError",
    "Options",
    "Policy",
    "Queue",
    "RequestRejectedError",
    "RequestTimeoutError",
    "SendHeldBackError",
    "SendOutcomeUnknownError",
    "SendRejectedError",
    "SendTimeoutError",
    "Session",
    "Topic",
    "TransactionInDoubtError",
    "TransactionRolledBackError",
    "UnsupportedOperationError",
    "WindowFullError",
]
