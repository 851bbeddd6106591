"""What the broker gave up on becomes a dead letter of ours, with its reason."""

from __future__ import annotations

import threading
import uuid

from django_txmsg import jms
from django_txmsg.activity import Activity
from django_txmsg.intake import IntakeThread
from django_txmsg.models import DeadLetter
from tests.faults import wait_until
from tests.running import committing, txmsg
from tests.services import ActiveMQ


@committing
def test_a_message_in_the_broker_s_dead_letter_queue_is_taken_in(
    activemq: ActiveMQ, destination: str
) -> None:
    message_id = str(uuid.uuid4())
    with (
        jms.ConnectionFactory(activemq.url()).create_connection() as connection,
        connection.create_session() as session,
    ):
        session.create_producer(f"DLQ.{destination}").send(
            jms.Message(b"given up\x00", {"txmsg-id": message_id, "colour": "red"})
        )
    stop = threading.Event()
    with txmsg(BROKERS={"default": {"URL": activemq.url()}}):
        thread = IntakeThread("default", f"DLQ.{destination}", stop, Activity())
        thread.start()
        try:
            wait_until(DeadLetter.objects.exists)
        finally:
            stop.set()
            thread.join(30)

    letter = DeadLetter.objects.get()
    assert (str(letter.message_id), letter.reason) == (message_id, "broker")
    assert bytes(letter.body) == b"given up\x00"
    assert letter.headers["colour"] == "red"
    with (
        jms.ConnectionFactory(activemq.url()).create_connection() as connection,
        connection.create_session() as session,
    ):
        assert session.create_consumer(f"DLQ.{destination}").receive(0.5) is None
