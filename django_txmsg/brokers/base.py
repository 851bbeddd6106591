"""Hops 4 to 6: the abstract interface of a broker, which the relay and the consumer
use.

A Broker is the address of a message server. A Session is one connection to that server,
owned by one thread. Every broker class must pass `django_txmsg.testing.broker_suite`.
"""

from __future__ import annotations

import abc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import wire
from ..envelope.key_order import KeyOrder
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. `delay` and `time_to_live` are in seconds. A broker may drop a
    message that was not consumed within its time to live."""

    destination: str
    headers: Mapping[str, str]
    body: bytes
    delay: float = 0.0
    time_to_live: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a message by a broker.

    `headers` are the raw headers as text. `handle` identifies the delivery when the
    session acknowledges it. `problem` describes a fault of the headers or the body, or
    is "". `cut` means that `body` is only the beginning of a body that is too long.
    `id_stays` is true if a redelivery has the same `broker_message_id`.
    """

    destination: str
    headers: Mapping[str, str]
    body: bytes
    redelivered: bool
    broker_message_id: str
    handle: Any = None
    problem: str = ""
    id_stays: bool = True
    cut: bool = False

    @property
    def came_before(self) -> bool:
        """Whether the message was delivered before: the broker reports a redelivery, or
        a stage has sent this copy of the message back to the queue."""
        return self.redelivered or wire.FAILED_ATTEMPT in self.headers


class Session(abc.ABC):
    """One connection to a broker. Not thread-safe.

    All methods raise BrokerUnavailable if the connection is lost. Then close the
    session and open a new session. The broker redelivers unacknowledged messages. A
    destination is the name of a queue, or "topic:" and the name of a topic.
    """

    @abc.abstractmethod
    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        """Send a batch of messages as fast as possible, and wait for the receipt of
        each message.

        Returns one outcome for each message:

        - None: the broker has sent a receipt;
        - DispatchRejected: the broker will never accept this message;
        - DestinationUnavailable: the destination cannot accept messages now;
        - DispatchUnknown: the broker has not answered;
        - DispatchHeld: an earlier message of the same key is not stored, so this
          message was not sent.

        With `isolate`, send one message at a time, to find the message that makes the
        broker close the connection. If the broker sends receipts, `timeout` limits each
        wait for them, in seconds. The default comes from the URL.
        """

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        """Send messages that the broker delivers after their `delay`, and wait for the
        receipts. In a transacted session, these messages do not belong to the
        transaction."""
        return self.send(batch)

    @abc.abstractmethod
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        """Start to receive from a destination. For a topic, `subscriber` names a
        durable subscription. Call this once per session, before the first receive()."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> Delivery | None:
        """Return the next delivery, or None if no message arrives within `timeout`
        seconds. Return None while `prefetch` deliveries are unacknowledged.

        Minutes may pass between two calls while a handler runs. During that time the
        broker must not give the session's deliveries to another consumer.
        """

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries without waiting for a receipt. If an acknowledgement
        is lost, the only consequence is a duplicate.

        A transacted session acknowledges in a separate transaction. So do not call
        ack() between enlist() and commit() or rollback().
        """

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        """Send a copy of a delivery, with these headers, to the queue of the delivery.
        Wait for the receipt, then acknowledge the delivery. The caller must not call
        `ack()` for this delivery.

        Raises DispatchRejected or DestinationUnavailable if the broker does not accept
        the copy. The delivery is then still unacknowledged.
        """
        copy = Outgoing(delivery.destination, headers, delivery.body)
        for error in self.send_delayed([copy]):
            insist(error)
        self.ack([delivery])

    @abc.abstractmethod
    def enlist(self, outgoing: Outgoing) -> None:
        """Send a message within the broker's transaction. The first call begins the
        transaction.

        Only a transacted session supports enlist(), commit() and rollback().
        """

    @abc.abstractmethod
    def commit(self, acks: Sequence[Delivery]) -> None:
        """Acknowledge the deliveries `acks`, commit the transaction, and wait for the
        receipt. Never acknowledge before the broker has stored the messages: a broker
        without such transactions must store them first.

        Raises BrokerError if the transaction was rolled back or its outcome is unknown.
        """

    @abc.abstractmethod
    def rollback(self) -> None:
        """Discard the messages that were enlisted in the open transaction. Deliveries
        stay unacknowledged. The caller can acknowledge them later, with or without a
        transaction."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Send a request to the broker, and wait for the answer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection. Never raises. The broker redelivers unacknowledged
        messages."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Broker(abc.ABC):
    """The address of a message server, under an alias.

    A broker is thread-safe. It holds no connection and no other object that is unsafe
    after a fork. Many sessions can be open at the same time. The attributes declare the
    broker's abilities. A subclass sets them in its body or in `__init__`.
    """

    #: The alias of the Django database in which it stores its messages, or None for a
    #: server. A send is then part of the transaction that is open on that alias in the
    #: same thread: it commits with it or not at all.
    stored_in: str | None = None
    #: Whether sessions receive. A broker that only sends has its consumers elsewhere.
    consumable: bool = True
    #: Whether a refusal by a destination holds for all its messages. If not, as where a
    #: destination is a task's name and has several queues, only the refused messages
    #: wait.
    pauses_destinations: bool = True
    #: The kind of server: "activemq", "artemis", "rabbitmq", "database" or "celery" for
    #: ours, "" if only a connection could tell, and any other word for your own.
    kind: str = ""
    #: The scheme for TLS, if the URL's connection is not encrypted.
    tls_scheme: str = ""

    def __init__(self, alias: str, url: str) -> None:
        """`url` comes from TXMSG["BROKERS"]. If no URL is set there, `url` is "".

        The constructor must not connect, import a client library or raise. The method
        check() reports errors of the URL.
        """
        self.alias = alias
        self._url = url

    @abc.abstractmethod
    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> Session:
        """Return a new Session. Raises BrokerUnavailable if the broker does not answer.

        `subscriber` names a durable subscriber of topics. Some brokers need this name
        when the session connects.
        """

    def hurried(self, timeout: float) -> Broker:
        """Return this broker with its default time-outs limited to `timeout` seconds.
        Time-outs that the URL sets are not changed. A broker without time-outs returns
        itself."""
        return self

    @abc.abstractmethod
    def shares_topics(self) -> bool | None:
        """Return True if several sessions can share one subscription to a topic. Return
        None if the answer requires a connection."""

    @abc.abstractmethod
    def unsubscribe(self, topic: str, subscriber: str) -> None:
        """Delete a durable subscription with its messages, if it exists.

        Raises BrokerError if the broker refuses, for example while the subscription is
        in use. May raise BrokerError if the subscription does not exist.
        """

    def dead_letter_cause(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Read the headers of a message in the broker's own dead-letter queue. Return
        the reason and the original destination. Either is "" if the headers do not
        contain it."""
        return "", ""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Return a description of each error in the URL, without connecting."""

    def __repr__(self) -> str:
        # The URL may hold a password.
        return f"<{type(self).__name__} {self.alias!r}>"


#: Longest time, in seconds, for which acknowledgements are gathered.
LONGEST_GROUP = 1.0


def acknowledges_now(gathered: int, *, prefetch: int, since: float) -> bool:
    """Return True if a consumer must now send the acknowledgements that it has
    gathered. `since` is the monotonic time of its last acknowledgement.

    A busy consumer acknowledges in groups. A crash then causes more duplicates. A slow
    consumer acknowledges each delivery immediately, because some brokers close the
    connection of a consumer that leaves a delivery unacknowledged for too long.
    """
    slow = time.monotonic() - since > LONGEST_GROUP
    return slow or gathered * 2 >= prefetch


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def unstorable(headers: Mapping[str, str]) -> str:
    """Return what is wrong with headers that PostgreSQL cannot store, or ""."""
    found = _UNSTORABLE.search("".join([*headers, *headers.values()]))
    return "its headers have a NUL or half of a surrogate pair" if found else ""


def faults(read: Callable[[], object]) -> list[str]:
    """Call `read`, which reads the URL of a broker. Return the text of the error that
    it raises, if any."""
    try:
        read()
    except (OSError, ValueError, ConfigurationError) as error:
        return [str(error)]
    return []


def insist(error: BrokerError | None) -> None:
    """Raise the error, unless it is None. DispatchRejected and DestinationUnavailable
    are raised unchanged. Any other error is raised as BrokerUnavailable."""
    if isinstance(error, DispatchRejected | DestinationUnavailable):
        raise error
    if error is not None:
        raise BrokerUnavailable(str(error)) from error


def one_by_one(
    batch: Sequence[Outgoing], send: Callable[[Outgoing], BrokerError | None]
) -> list[BrokerError | None]:
    """Send messages one at a time, and return their outcomes. If a message is not
    stored, do not send the later messages of its key."""
    outcomes: list[BrokerError | None] = [None] * len(batch)
    keys = [one.headers.get(wire.KEY, "") for one in batch]
    order = KeyOrder(range(len(batch)), keys, outcomes, DispatchHeld)
    for index, one in enumerate(batch):
        if index in order.open:
            order.settle(index, send(one))
    return outcomes
