"""The context combines a connection and one session in one object."""

from __future__ import annotations

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import ADDRESS, DESTINATION


def test_a_context_sends_receives_acknowledges_and_recovers(
    broker: ScriptedBroker,
) -> None:
    with jms.ConnectionFactory(broker.url).create_context() as context:
        context.create_producer().send(DESTINATION, jms.Message("x", {"a": "b"}))
        consumer = context.create_consumer(DESTINATION, prefetch=1)
        context.stop()
        assert consumer.receive(0.05) is None
        context.start()
        first = consumer.receive(10)
        context.recover()
        again = consumer.receive(10)
        assert again is not None
        context.acknowledge(again)

    assert first is again
    assert again.headers["a"] == "b"
    assert broker.stored(ADDRESS) == []
    assert context.connection.closed


def test_a_transacted_context_commits_and_rolls_back(broker: ScriptedBroker) -> None:
    factory = jms.ConnectionFactory(broker.url)

    with factory.create_context(transacted=True) as context:
        producer = context.create_producer()
        producer.send(DESTINATION, "rolled back")
        context.rollback()
        producer.send(DESTINATION, "committed")
        context.commit()
        producer.send(DESTINATION, "left open")

    assert [m.body for m in broker.stored(ADDRESS)] == [b"committed"]


def test_producers_sessions_and_consumers_are_context_managers(
    broker: ScriptedBroker,
) -> None:
    with (
        jms.ConnectionFactory(broker.url).create_connection() as connection,
        connection.create_session() as session,
        session.create_producer(DESTINATION) as producer,
        session.create_consumer(DESTINATION) as consumer,
    ):
        producer.send(jms.Message("x"))
        assert consumer.receive(10) is not None

    with pytest.raises(jms.IllegalStateError):
        producer.send(jms.Message("y"))
