"""Tests of the promises on which the consumer relies: no message is lost, and
acknowledged messages are not redelivered."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from ...brokers.base import Outgoing
from ...errors import BrokerError
from . import talk
from .talk import Talk, bodies, numbered, numbers, settle, take


class Receiving(Talk):
    """Tests of received messages and their contents."""

    def test_what_is_acknowledged_never_comes_again(self, destination: str) -> None:
        self.send(*numbered(destination, 10))
        with self.consumer(destination) as session:
            deliveries = take(session, 10)
            session.ack(deliveries[:4])
            session.ack(deliveries[4:])
            assert session.receive(0.2) is None

        assert bodies(deliveries) == numbers(10)
        assert [one.redelivered for one in deliveries] == [False] * 10
        assert {one.destination for one in deliveries} == {destination}
        assert len({one.broker_message_id for one in deliveries} - {""}) == 10
        assert self.rest(destination) == []

    def test_nothing_comes_from_an_empty_destination(self, destination: str) -> None:
        with self.consumer(destination) as session:
            began = time.monotonic()
            assert session.receive(0.2) is None
            assert time.monotonic() - began >= 0.19
            assert session.receive(0) is None

    def test_what_is_not_acknowledged_comes_again_when_its_session_ends(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 4))
        with self.consumer(destination) as session:
            deliveries = take(session, 4)
            session.ack([deliveries[1]])

        with self.consumer(destination) as session:
            again = settle(session, 3)
        assert sorted(bodies(again)) == [b"0", b"2", b"3"]
        assert [one.redelivered for one in again] == [True] * 3
        before = {one.body: one for one in deliveries}
        for one in again:
            first = before[one.body]
            assert one.id_stays == first.id_stays
            if one.id_stays:
                assert one.broker_message_id == first.broker_message_id
        assert self.rest(destination) == []

    def test_deliveries_of_a_killed_consumer_are_redelivered(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 3))
        with self.held_elsewhere(destination):
            pass  # and there it ends

        with self.consumer(destination) as session:
            again = settle(session, 3)
        assert sorted(bodies(again)) == numbers(3)
        redelivered = {one.body: one.redelivered for one in again}
        assert redelivered[b"0"]
        assert redelivered[b"1"]

    def test_prefetch_bounds_what_a_consumer_keeps_from_others(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 20))
        slow = self.consumer(destination, prefetch=3)
        [first] = take(slow, 1)
        with self.consumer(destination, prefetch=20) as quick:
            others = settle(quick, 17)
            slow.close()
            rest = settle(quick, 3)

        found = sorted(int(one.body) for one in [*others, *rest])
        assert found == list(range(20))
        assert first.body in bodies(rest)

    def test_a_message_sent_back_comes_again_as_it_was_changed(
        self, destination: str
    ) -> None:
        self.send(Outgoing(destination, {"colour": "red"}, b"x"))
        with self.consumer(destination) as session:
            [delivery] = take(session, 1)
            changed = {"colour": "blue", "txmsg-id": str(uuid.uuid4())}
            session.send_back(delivery, changed)
            [again] = take(session, 1)
            assert again.headers.items() >= changed.items()
            assert again.body == b"x"
            session.ack([again])
        assert self.rest(destination) == []

    def test_a_prefetch_of_one_goes_on_after_each_acknowledgement(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 5))
        with self.consumer(destination, prefetch=1) as session:
            for number in numbers(5):
                [delivery] = take(session, 1)
                assert delivery.body == number
                session.ack([delivery])

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b"\0", id="NUL"),
            pytest.param(bytes(range(256)) * 4, id="every-byte"),
            pytest.param(b"\n\nRECEIPT\nreceipt-id:1\n\n\0", id="looks-like-a-frame"),
            pytest.param(b"\xff\xfe\r\n" * 500_000, id="two-megabytes"),
        ],
    )
    def test_any_bytes_are_a_body(self, destination: str, body: bytes) -> None:
        self.send(Outgoing(destination, {"content-type": "application/x"}, body))
        with self.consumer(destination) as session:
            [delivery] = settle(session, 1)

        assert delivery.body == body
        assert delivery.problem == ""

    def test_any_text_is_a_header(self, destination: str) -> None:
        headers = {
            "colon": "a:b::c:",
            "lines": "one\ntwo\r\nthree\r",
            "backslash": "\\n \\\\ \\",
            "spaces": "  kept on both sides  ",
            "empty": "",
            "quotes": '"it\'s"',
            "not-ascii": "Grüße, 東京, 🚚",
            "näme: with\\every\nthing": "too",
            "long": "x" * 8000,
            "txmsg-id": str(uuid.uuid4()),
        }
        # In a batch and alone: some brokers handle the two differently.
        self.send(*(Outgoing(destination, headers, b"x") for _ in range(10)))
        self.send(Outgoing(destination, headers, b"x"))
        with self.consumer(destination, prefetch=20) as session:
            deliveries = settle(session, 11)

        for delivery in deliveries:
            received = {name: delivery.headers.get(name) for name in headers}
            assert received == headers
            assert delivery.problem == ""

    def test_a_living_broker_answers_a_ping(self) -> None:
        with self.open() as session:
            session.ping()

    def test_a_session_can_be_closed_twice(self, destination: str) -> None:
        session = self.consumer(destination)
        session.close()
        session.close()

    def test_a_sound_url_has_nothing_wrong(self) -> None:
        assert self.broker().check() == []
        assert "secret" not in repr(self.broker())


# What stages of a topic rely on, and messages that a broker delays.


class Topics(Talk):
    """Tests of delayed messages, and of topics, where each subscriber gets a copy of a
    message."""

    #: Whether the broker delays messages by their `delay`, which is optional.
    holds_back = True

    def test_every_subscriber_of_a_topic_gets_a_copy_also_while_it_is_away(
        self, destination: str
    ) -> None:
        topic = f"topic:{destination}"
        names = [f"{name}-{uuid.uuid4().hex}" for name in ("audit", "stock")]
        for name in names:
            self.consumer(topic, subscriber=name).close()
        self.send(*numbered(topic, 5))

        for name in names:
            with self.consumer(topic, subscriber=name) as session:
                deliveries = settle(session, 5)
                assert bodies(deliveries) == numbers(5)
                assert {one.destination for one in deliveries} == {topic}
            with self.consumer(topic, subscriber=name) as session:
                assert session.receive(0.3) is None

    def test_sessions_of_one_subscriber_share_its_messages(
        self, destination: str
    ) -> None:
        if self.broker().shares_topics() is not True:
            return
        topic, name = f"topic:{destination}", f"audit-{uuid.uuid4().hex}"
        sessions = [self.consumer(topic, prefetch=5, subscriber=name) for _ in range(2)]
        self.send(*numbered(topic, 10))
        found = []
        for session in sessions:
            deliveries = settle(session, 5)
            found += bodies(deliveries)
            session.close()
        assert sorted(found) == numbers(10)
        with self.consumer(topic, subscriber=name) as session:
            assert session.receive(0.3) is None

    def test_a_subscription_that_was_ended_gets_nothing_more(
        self, destination: str
    ) -> None:
        topic = f"topic:{destination}"
        names = [f"{name}-{uuid.uuid4().hex}" for name in ("gone", "stays")]
        for name in names:
            self.consumer(topic, subscriber=name).close()
        self.send(*numbered(topic, 3))
        self.broker().unsubscribe(topic, names[0])
        with contextlib.suppress(BrokerError):  # a broker may refuse an unknown name
            self.broker().unsubscribe(topic, names[0])
        self.send(*numbered(topic, 2))
        for name, count in zip(names, (0, 5), strict=True):
            with self.consumer(topic, subscriber=name) as session:
                settle(session, count)
                assert session.receive(0.3) is None
            self.broker().unsubscribe(topic, name)

    def test_a_topic_keeps_nothing_for_unnamed_subscriptions(
        self, destination: str
    ) -> None:
        topic = f"topic:{destination}"
        with self.consumer(topic) as session:
            self.send(*numbered(topic, 2))
            settle(session, 2)
        self.send(*numbered(topic, 2))
        with self.consumer(topic) as session:
            assert session.receive(0.3) is None
            self.send(Outgoing(topic, {}, b"new"))
            assert bodies(take(session, 1)) == [b"new"]

    def test_a_delayed_message_comes_when_its_time_has_come(
        self, destination: str
    ) -> None:
        """A transacted session sends three delayed messages, the longest delay first.
        Each must arrive after its own delay, so a message with a long delay must not
        hold up a message with a short delay. The messages are not part of the session's
        transaction."""
        with self.open(transacted=True) as session:
            sent = time.monotonic()
            delayed = [
                Outgoing(destination, {"a": "b:c"}, str(delay).encode(), delay=delay)
                for delay in (3.0, 0.5, 1.5)
            ]
            assert session.send_delayed(delayed) == [None] * 3
            if not self.holds_back:
                assert len(self.rest(destination)) == 3
                return
        with self.consumer(destination) as session:
            for delay in (0.5, 1.5, 3.0):
                [delivery] = take(session, 1)
                assert time.monotonic() - sent >= delay - 0.05
                assert float(delivery.body) == delay
                assert delivery.destination == destination
                assert delivery.headers["a"] == "b:c"
                session.ack([delivery])


# What concurrent sessions rely on: four lanes of a relay, a stage's threads.

T = TypeVar("T")


class Together(Talk):
    """Tests of several sessions in separate threads, and of a slow session."""

    #: How many sessions send, or receive, at once.
    sessions = 4
    #: Seconds for which a session holds a delivery without any call, as while a handler
    #: runs. Make it longer than any lease of your broker.
    held_for = 40.0

    def at_once(self, work: Callable[[int, threading.Barrier], T]) -> list[T]:
        """Call `work(number, start)` in `sessions` threads at the same time, and return
        the results. Each thread should wait for the barrier `start` before it works."""
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
        """While a handler runs, the consumer calls no method of its session. Even then,
        the broker must not give the session's deliveries to another session. So a
        broker with leases must renew them in a separate thread."""
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
            settle(session, 2)
        assert self.rest(destination) == []
