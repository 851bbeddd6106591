"""Hops 4 to 6 in the abstract: the interface of a broker for the relay and the
consumer.

A Broker is an address. A Session is one connection to it, owned by one thread. Every
broker passes `django_txmsg.testing.broker_suite`; yours must, too.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .. import wire
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send. `delay` and `time_to_live` are in seconds. After its time to
    live, a broker may drop a message that was not consumed."""

    destination: str
    headers: Mapping[str, str]
    body: bytes
    delay: float = 0.0
    time_to_live: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One arrival of a message.

    `headers` are the raw headers as text. `handle` belongs to the session, which needs
    it to acknowledge. `problem` describes what could not be read of the headers, or is
    "". `id_stays` says whether a redelivery has the same `broker_message_id`.
    """

    destination: str
    headers: Mapping[str, str]
    body: bytes
    redelivered: bool
    broker_message_id: str
    handle: Any = None
    problem: str = ""
    id_stays: bool = True


class Session(abc.ABC):
    """One connection to a broker. Not thread-safe.

    All methods raise BrokerUnavailable if the connection is lost; then close the
    session and open another one. Unacknowledged deliveries arrive again. A destination
    is the name of a queue, or "topic:" and the name of a topic.
    """

    @abc.abstractmethod
    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        """Send a batch, by the fastest way that proves that each message is stored.

        Returns one outcome for each message: None (a receipt came), DispatchRejected
        (the broker never takes this message), DestinationUnavailable (the destination
        takes no messages now), DispatchUnknown (no answer), or DispatchHeld (an earlier
        message of its key is not stored). `isolate` sends one at a time, to find the
        message on which a broker hangs up. `timeout`, in seconds, limits how long each
        step waits for receipts, if the broker gives any; by default it comes from the
        URL.
        """

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        """Send messages that the broker holds back for their `delay`, and wait for the
        receipts. In a transacted session, these messages are not part of its
        transaction."""
        return self.send(batch)

    @abc.abstractmethod
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        """Start to receive from a destination. `subscriber` makes a topic's
        subscription durable under that name. Called once per session, before the first
        receive()."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> Delivery | None:
        """Return the next delivery, or None if none arrived in `timeout` seconds;
        always None while `prefetch` deliveries are unacknowledged.

        Minutes may pass between two calls, while a handler runs: the session still
        holds its deliveries.
        """

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge without waiting for a receipt, because a lost acknowledgement
        only costs a duplicate.

        In a transacted session, call it only while nothing is enlisted: it uses a
        transaction of its own.
        """

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        """Store a copy with other headers in the queue that the delivery came from,
        wait for the receipt, and acknowledge the delivery; do not call `ack()` for it.

        Raises DispatchRejected or DestinationUnavailable, with the delivery still
        unacknowledged, if the broker does not take the copy.
        """
        copy = Outgoing(delivery.destination, headers, delivery.body)
        for error in self.send_delayed([copy]):
            if isinstance(error, DispatchRejected | DestinationUnavailable):
                raise error
            if error is not None:
                raise BrokerUnavailable(str(error)) from error
        self.ack([delivery])

    @abc.abstractmethod
    def enlist(self, outgoing: Outgoing) -> None:
        """Send within the broker's transaction; the first call begins it.

        For transacted sessions only, like commit() and rollback().
        """

    @abc.abstractmethod
    def commit(self, acks: Sequence[Delivery]) -> None:
        """Acknowledge `acks` and commit, with a receipt.

        Raises BrokerError if the transaction was rolled back or its outcome is unknown.
        """

    @abc.abstractmethod
    def rollback(self) -> None:
        """Discard what the open transaction sends. Its deliveries stay unacknowledged,
        and can be acknowledged or used in another transaction."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Return when the broker has answered a request."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises. Unacknowledged deliveries go back to the
        broker."""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Broker(abc.ABC):
    """An address of a message server, by alias.

    It is thread-safe, and holds no connection, nor anything else that a fork must not
    share. Many sessions can be open at once. The attributes declare what it can do. A
    class sets them, or its `__init__` does.
    """

    #: The alias of the Django database in which it stores its messages, or None for a
    #: server. A send is then part of the transaction that is open on that alias in the
    #: same thread: it commits with it or not at all.
    stored_in: str | None = None
    #: Whether sessions receive. A broker that only sends has its consumers elsewhere.
    consumable: bool = True
    #: The kind of server: "activemq", "artemis", "rabbitmq", "database" or "celery" for
    #: ours, "" if only a connection could tell, and any other word for your own.
    kind: str = ""
    #: The scheme for TLS, if the URL's connection is not encrypted.
    tls_scheme: str = ""

    def __init__(self, alias: str, url: str) -> None:
        """`url` comes from TXMSG["BROKERS"]; it is "" if there is none. This connects
        to nothing, imports nothing and raises nothing: check() reports errors."""
        self.alias = alias
        self._url = url

    @abc.abstractmethod
    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> Session:
        """Return a new Session. Raises BrokerUnavailable if there is no answer.

        `subscriber` names a durable subscriber of topics, if the broker must know it
        when connecting.
        """

    def hurried(self, timeout: float) -> Broker:
        """Return this broker with all time-outs limited to `timeout` seconds, unless
        its URL sets them; the same broker if that is not supported."""
        return self

    @abc.abstractmethod
    def shares_topics(self) -> bool | None:
        """Return whether several sessions can share a topic's subscription; None if
        that is not known without a connection."""

    @abc.abstractmethod
    def unsubscribe(self, topic: str, subscriber: str) -> None:
        """Delete a durable subscription with its messages, if it exists.

        Raises BrokerError if the broker refuses, for example while the subscription is
        in use.
        """

    def dead_letter_cause(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the reason and the original destination of a message in the broker's
        own dead-letter queue, from its headers; "" for what they do not contain."""
        return "", ""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Return descriptions of what is wrong with the URL. Connects to nothing."""

    def __repr__(self) -> str:
        # The URL may hold a password.
        return f"<{type(self).__name__} {self.alias!r}>"


def one_by_one(
    batch: Sequence[Outgoing], send: Callable[[Outgoing], BrokerError | None]
) -> list[BrokerError | None]:
    """Send messages one at a time. If one is not stored, hold back the later messages
    of its key. Returns the outcomes."""
    outcomes: list[BrokerError | None] = []
    refused: set[str] = set()
    for one in batch:
        key = one.headers.get(wire.KEY, "")
        outcome = (
            DispatchHeld("an earlier message of its key was refused")
            if key in refused
            else send(one)
        )
        if outcome is not None and key:
            refused.add(key)
        outcomes.append(outcome)
    return outcomes
