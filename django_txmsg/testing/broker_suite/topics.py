"""What stages of a topic rely on, and messages that a broker delays."""

from __future__ import annotations

import time
import uuid

from ...brokers.base import Outgoing
from .talk import Talk, bodies, numbered, numbers, take


class Topics(Talk):
    """Tests that each subscriber gets a copy, and of delayed messages."""

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
                deliveries = take(session, 5)
                session.ack(deliveries)
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
            deliveries = take(session, 5)
            session.ack(deliveries)
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
        self.broker().unsubscribe(topic, names[0])  # as one that never was
        self.send(*numbered(topic, 2))
        for name, count in zip(names, (0, 5), strict=True):
            with self.consumer(topic, subscriber=name) as session:
                session.ack(take(session, count))
                assert session.receive(0.3) is None
            self.broker().unsubscribe(topic, name)

    def test_a_topic_keeps_nothing_for_unnamed_subscriptions(
        self, destination: str
    ) -> None:
        topic = f"topic:{destination}"
        with self.consumer(topic) as session:
            self.send(*numbered(topic, 2))
            deliveries = take(session, 2)
            session.ack(deliveries)
        self.send(*numbered(topic, 2))
        with self.consumer(topic) as session:
            assert session.receive(0.3) is None
            self.send(Outgoing(topic, {}, b"new"))
            assert bodies(take(session, 1)) == [b"new"]

    def test_a_delayed_message_comes_when_its_time_has_come(
        self, destination: str
    ) -> None:
        """A long delay before a short one blocks nothing; also in a transacted session,
        outside of its transaction."""
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
