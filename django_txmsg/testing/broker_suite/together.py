"""What concurrent sessions rely on: four lanes of a relay, a stage's threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...brokers.base import Outgoing
from . import talk
from .talk import Talk, numbered, numbers, take

T = TypeVar("T")


class Together(Talk):
    """Sessions in threads of their own, and a slow one."""

    #: How many sessions send, or receive, at once.
    sessions = 4
    #: Seconds for which a session holds a delivery without any call, as while a handler
    #: runs. Make it longer than any lease of your broker.
    held_for = 40.0

    def at_once(self, work: Callable[[int, threading.Barrier], T]) -> list[T]:
        """Call `work(number, start)` in that many threads; each waits for `start`."""
        start = threading.Barrier(self.sessions)

        def run(number: int) -> T:
            try:
                return work(number, start)
            except BaseException:
                start.abort()
                raise
            finally:
                if self.broker().stored_in is not None:
                    from django.db import connections

                    connections.close_all()

        with ThreadPoolExecutor(self.sessions) as pool:
            return list(pool.map(run, range(self.sessions)))

    def test_what_sessions_send_at_once_is_all_there_once_and_in_order(
        self, destination: str
    ) -> None:
        batches, size = 15, 10
        # A server may refuse a sender while the queue is being created.
        self.send(Outgoing(destination, {}, b"first"))

        def send(number: int, start: threading.Barrier) -> None:
            with self.broker().open() as session:
                start.wait(30)
                for batch in range(batches):
                    bodies = [f"{number} {batch * size + n}" for n in range(size)]
                    outgoing = [Outgoing(destination, {}, b.encode()) for b in bodies]
                    assert session.send(outgoing) == [None] * size

        self.at_once(send)
        first, *rest = self.rest(destination)
        assert first == b"first"
        found = [body.split() for body in rest]
        for number in range(self.sessions):
            of_one = [int(n) for sender, n in found if int(sender) == number]
            assert of_one == list(range(batches * size))

    def test_what_sessions_receive_at_once_comes_to_one_of_them(
        self, destination: str
    ) -> None:
        count = 120
        self.send(*numbered(destination, count))
        taken: list[bytes] = []  # append() is atomic

        def receive(_: int, start: threading.Barrier) -> None:
            with self.broker().open() as session:
                session.subscribe(destination, prefetch=5)
                start.wait(30)
                until = time.monotonic() + talk.SOON
                while len(taken) < count and time.monotonic() < until:
                    delivery = session.receive(0.2)
                    if delivery is not None:
                        taken.append(delivery.body)
                        session.ack([delivery])

        self.at_once(receive)
        assert sorted(taken) == sorted(numbers(count))
        assert self.rest(destination) == []

    def test_what_a_slow_session_holds_comes_to_nobody_else(
        self, destination: str
    ) -> None:
        """The session is not called while its handler runs: a lease needs a thread."""
        self.send(*numbered(destination, 1))
        with self.consumer(destination, prefetch=1) as slow:
            [delivery] = take(slow, 1)
            with self.consumer(destination, prefetch=1) as other:
                assert other.receive(self.held_for) is None
                slow.ack([delivery])
                assert other.receive(0.5) is None
        assert self.rest(destination) == []

    def test_a_session_that_holds_its_prefetch_waits_for_an_acknowledgement(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 4))
        with self.consumer(destination, prefetch=2) as session:
            first, second = take(session, 2)
            assert session.receive(0.3) is None
            session.ack([first, second])
            session.ack(take(session, 2))
        assert self.rest(destination) == []
