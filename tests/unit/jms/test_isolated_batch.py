"""A batch can be sent message by message. Then only the message that the broker refused
gets the error."""

from __future__ import annotations

from django_txmsg import jms
from django_txmsg.testing import RABBITMQ, ScriptedBroker


def test_the_message_after_a_refused_one_does_not_leave_when_the_broker_hangs_up() -> (
    None
):
    """The broker refuses a message with an ERROR, and closes the connection a moment
    later. The following messages are not sent."""
    with ScriptedBroker(RABBITMQ) as broker:
        broker.on("SEND", nth=2).reject(closes=False)
        broker.on("*", where=lambda _: len(broker.received("SEND")) == 2).cut()
        connection = jms.ConnectionFactory(broker.url).create_connection()
        with connection, connection.create_session() as session:
            batch = [("orders.place", jms.Message(body)) for body in "abcd"]
            outcomes = session.send_batch(batch, isolate=True)

        assert outcomes[0] is None
        assert isinstance(outcomes[1], jms.SendRejectedError)
        for outcome in outcomes[2:]:
            assert isinstance(outcome, jms.ConnectionLostError)
            assert not outcome.written
        assert len(broker.received("SEND")) == 2
