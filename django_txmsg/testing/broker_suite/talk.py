"""Helpers of the suite: sessions that are closed at the end of a test, and functions
that make and receive messages."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ...brokers.base import Broker, Delivery, Outgoing, Session

#: More seconds than any broker needs to answer, on a busy machine.
SOON = 30.0

_HOLDER = """
import importlib, sys
module, name, url, destination = sys.argv[1:]
kind = getattr(importlib.import_module(module), name)
session = kind("held", url).open()
session.subscribe(destination, prefetch=2)
for _ in range(2):
    assert session.receive({soon}) is not None
print("holds 2", flush=True)
sys.stdin.read()
"""


class Talk:
    """One broker, with helpers for tests."""

    #: The sessions that end with the test.
    stack: ExitStack

    def broker(self) -> Broker:
        """Return the broker under test."""
        raise NotImplementedError

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> Session:
        """Return a session that is closed at the end of the test."""
        session = self.broker().open(transacted=transacted, subscriber=subscriber)
        return self.stack.enter_context(session)

    def consumer(
        self,
        destination: str,
        *,
        prefetch: int = 10,
        transacted: bool = False,
        subscriber: str | None = None,
    ) -> Session:
        """Return a session subscribed to the destination."""
        session = self.open(transacted=transacted, subscriber=subscriber)
        session.subscribe(destination, prefetch=prefetch, subscriber=subscriber)
        return session

    def send(self, *messages: Outgoing) -> None:
        """Send messages with a new session. Fail unless the broker confirms each
        message."""
        with self.broker().open() as session:
            assert session.send(messages) == [None] * len(messages)

    def rest(self, destination: str) -> list[bytes]:
        """Receive and acknowledge all messages of a queue, and return their bodies. The
        method first sends a marker message, to detect the end of the queue."""
        end = uuid.uuid4().bytes
        self.send(Outgoing(destination, {}, end))
        found: list[bytes] = []
        with self.broker().open() as session:
            session.subscribe(destination, prefetch=100)
            in_hand: list[Delivery] = []
            while end not in found:
                in_hand += take(session, 1)
                found.append(in_hand[-1].body)
                if len(in_hand) == 50 or found[-1] == end:
                    session.ack(in_hand)
                    in_hand = []
        return found[:-1]

    @contextmanager
    def held_elsewhere(self, destination: str) -> Iterator[None]:
        """Start a child process that receives two messages without acknowledging them.
        Kill the child process at the end of the block."""
        broker = self.broker()
        kind = type(broker)
        code = _HOLDER.format(soon=SOON)
        arguments = [kind.__module__, kind.__qualname__, broker._url, destination]
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "holds 2\n"
                yield
            finally:
                process.kill()


def take(session: Session, count: int) -> list[Delivery]:
    """Receive and return `count` deliveries. Fail if fewer arrive in time."""
    found: list[Delivery] = []
    for _ in range(count):
        delivery = session.receive(SOON)
        assert delivery is not None, f"only {len(found)} of {count} came"
        found.append(delivery)
    return found


def settle(session: Session, count: int) -> list[Delivery]:
    """Receive, acknowledge and return `count` deliveries."""
    deliveries = take(session, count)
    session.ack(deliveries)
    return deliveries


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    """Return the bodies of these deliveries."""
    return [delivery.body for delivery in deliveries]


def numbered(destination: str, count: int) -> list[Outgoing]:
    """Return `count` messages, each with its number as its body."""
    return [Outgoing(destination, {}, str(number).encode()) for number in range(count)]


def numbers(count: int) -> list[bytes]:
    """Return the bodies of `count` numbered messages."""
    return [str(number).encode() for number in range(count)]


# Whether a broker's declared capabilities are true.


class Capabilities(Talk):
    """Tests of the attributes by which a broker declares its abilities."""

    def test_its_capabilities_are_of_their_types(self) -> None:
        broker = self.broker()
        assert broker.consumable is True  # the suite receives
        assert isinstance(broker.kind, str)
        assert broker.stored_in is None or isinstance(broker.stored_in, str)

    def test_what_is_stored_in_a_database_belongs_to_its_transaction(
        self, destination: str
    ) -> None:
        """A message that is sent inside a transaction of the broker's database must be
        stored if the transaction commits, and discarded if it rolls back. The HTTP
        outbox stores its control message in this way."""
        alias = self.broker().stored_in
        if alias is None:
            return
        from django.db import connections, transaction

        assert alias in connections
        with self.broker().open() as session:
            with transaction.atomic(using=alias):
                assert session.send(numbered(destination, 2)) == [None, None]
                transaction.set_rollback(True, using=alias)
            assert self.rest(destination) == []
            with transaction.atomic(using=alias):
                assert session.send(numbered(destination, 3)) == [None] * 3
        assert self.rest(destination) == numbers(3)
