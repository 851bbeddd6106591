"""Hops 4 to 6 in the abstract: what the relay and the consumer ask of any broker.

A Broker is an address; a Session is one conversation with it, owned by one thread.
Every implementation passes `django_txmsg.testing.broker_suite`, those of others too.
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
    """A message as it goes on the wire. `delay` is in seconds, as is `time_to_live`,
    after which a broker may drop a message that was not consumed."""

    destination: str
    headers: Mapping[str, str]
    body: bytes
    delay: float = 0.0
    time_to_live: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One arrival of a message.

    `headers` are the raw ones as text, `handle` is the session's own and is needed to
    acknowledge. `problem` says what could not be read of the header block, or "".
    `id_stays` says whether a redelivery has the same `broker_message_id`.
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
    """One conversation with a broker. Not thread-safe.

    All methods raise BrokerUnavailable when the conversation is over; then close it
    and open another one. What was received and not acknowledged arrives again.
    A destination is the name of a queue, or "topic:" and the name of a topic.
    """

    @abc.abstractmethod
    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        """Hand over a batch, by the fastest way that proves each message stored.

        Returns one outcome a message: None (a receipt came), DispatchRejected (never
        this message), DestinationUnavailable (not there, not now), DispatchUnknown (no
        answer), or DispatchHeld (an earlier one of its key is not stored).
        `isolate` sends one at a time, to find the message that makes a broker hang up.
        `timeout`, in seconds, is for each step's receipts, where a broker gives such;
        without it the URL says how long.
        """

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        """Hand over messages that the broker itself holds back for their `delay`, with
        proof; also in a transacted session, outside its transaction."""
        return self.send(batch)

    @abc.abstractmethod
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        """Begin to receive from a destination; `subscriber` makes a topic's
        subscription durable under that name. Called once in a session's life, before
        the first receive()."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> Delivery | None:
        """Return the next delivery, or None when none came in `timeout` seconds, as
        none does while `prefetch` of them are unacknowledged.

        Minutes may pass between two calls, while a handler works: what was received
        stays this session's all the same.
        """

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge, without waiting for proof: a lost ack costs a duplicate.

        In a transacted session, where nothing is enlisted then, in a transaction of
        its own.
        """

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        """Store a copy with other headers where the delivery came from, with proof,
        and acknowledge the delivery at once; `ack()` need not do so any more.

        Raises DispatchRejected or DestinationUnavailable, with the delivery still
        unacknowledged, when the broker does not take the copy.
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
        """Send within the broker's transaction, which the first one begins.

        For transacted sessions only, as are commit() and rollback().
        """

    @abc.abstractmethod
    def commit(self, acks: Sequence[Delivery]) -> None:
        """Acknowledge `acks` and commit, with a receipt.

        Raises BrokerError when the transaction was rolled back or its end is unknown.
        """

    @abc.abstractmethod
    def rollback(self) -> None:
        """Forget the open transaction's sends; what was received stays
        unacknowledged, and can be acknowledged or used in another transaction."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Return once the broker has proved to be alive."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the conversation; never raises. Unacknowledged deliveries go back."""

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
    """An address of a message server, by alias. Thread-safe; holds no connection,
    and nothing else that a fork must not share. Many sessions work at once.

    The attributes say what it can do. A class sets them, or its `__init__` does.
    """

    #: The alias of the Django database in which it keeps its messages, or None for a
    #: server. What a session sends is then part of the transaction that is open on
    #: that alias in the same thread: it commits with it or not at all.
    stored_in: str | None = None
    #: Whether sessions receive. A broker that only sends has consumers elsewhere.
    consumable: bool = True
    #: What it is: "activemq", "artemis", "rabbitmq", "database" or "celery" of ours,
    #: "" while only a connection could tell, and any other word for one of your own.
    kind: str = ""
    #: The scheme to use for TLS, where the URL asks for a connection in the clear.
    tls_scheme: str = ""

    def __init__(self, alias: str, url: str) -> None:
        """`url` is what TXMSG["BROKERS"] says for the alias, "" where it says none.
        Nothing is connected or imported by this, and nothing raised: check() tells."""
        self.alias = alias
        self._url = url

    @abc.abstractmethod
    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> Session:
        """Return a new Session. Raises BrokerUnavailable without an answer.

        `subscriber` names a durable subscriber of topics, where the broker has to
        know it at the connection already.
        """

    def hurried(self, timeout: float) -> Broker:
        """Return this broker, told to give up whatever it does after `timeout` seconds
        unless its URL says otherwise; the same one where it cannot be told."""
        return self

    @abc.abstractmethod
    def shares_topics(self) -> bool | None:
        """Return whether several sessions can share a topic's subscription; None when
        only a connection could tell."""

    @abc.abstractmethod
    def unsubscribe(self, topic: str, subscriber: str) -> None:
        """Delete a durable subscription, and what waits in it. None that is there is
        no error.

        Raises BrokerError when the broker refuses that, as while it is in use.
        """

    def dead_letter_cause(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return why the broker gave up on a message, and the destination that it was
        sent to, as far as the headers tell that it has in the broker's own dead
        letters; "" for what they do not tell."""
        return "", ""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Return what is wrong with the URL, in words; nothing is connected."""

    def __repr__(self) -> str:
        # The URL may hold a password.
        return f"<{type(self).__name__} {self.alias!r}>"


def one_by_one(
    batch: Sequence[Outgoing], send: Callable[[Outgoing], BrokerError | None]
) -> list[BrokerError | None]:
    """Send each message by itself, and hold back what follows a refused one of its
    key. Returns the outcomes."""
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
