"""A Jakarta-Messaging-shaped client for STOMP brokers; needs no Django.

Hop 4 and 6 of a message: the relay sends through it, the consumer receives. ::

    with ConnectionFactory("stomp://localhost:61613").create_connection() as connection:
        with connection.create_session() as session:
            session.create_producer("orders.place").send(Message("text"))
"""

from __future__ import annotations

from django_txmsg.jms.completion import CompletionFuture, CompletionListener
from django_txmsg.jms.connection import Connection
from django_txmsg.jms.consumer import AckMode, MessageConsumer
from django_txmsg.jms.context import Context, ContextProducer
from django_txmsg.jms.delivery import Delivery
from django_txmsg.jms.destination import Destination, Queue, Topic
from django_txmsg.jms.errors import (
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
from django_txmsg.jms.factory import ConnectionFactory, Options
from django_txmsg.jms.message import DeliveryMode, Message
from django_txmsg.jms.producer import MessageProducer
from django_txmsg.jms.restrictions import Policy
from django_txmsg.jms.session import Session

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
