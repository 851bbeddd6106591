"""If the broker gives up on a message, the package stores a dead letter with the
message and the reason."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import pytest

from django_txmsg import jms, wire
from django_txmsg.brokers import deaths, get_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.database import DatabaseBroker
from django_txmsg.brokers.stomp import StompBroker
from django_txmsg.consuming.intake import IntakeThread
from django_txmsg.dead_letters import bulk, burial
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage, QueueMessage
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from tests import factories
from tests.faults import wait_until
from tests.running import committing, put, ship, txmsg
from tests.services import ActiveMQ, ByAmqp, RabbitMQ
from tests.services.stomp_server import PASSWORD, USER, StompServer


class WithDeadLetters(DatabaseBroker):
    """The embedded broker, with a dead-letter queue like a server's."""

    dead_letter_cause = StompBroker.dead_letter_cause


def redelivered(*, force: bool) -> BulkOperation:
    return bulk.finish(bulk.start("redeliver", {}, force=force))


@contextmanager
def taking_in(
    url: str,
    destination: str,
    until: Callable[[], bool] = DeadLetter.objects.exists,
    **entry: str,
) -> Iterator[None]:
    """Run an intake thread for the dead-letter queue `destination` during the block. At
    the end of the block, wait `until` the thread has stored a `DeadLetter`."""
    stop = threading.Event()
    with txmsg(BROKERS={"default": {"URL": url, **entry}}):
        group = ThreadGroup(stop.set)
        group.add("intake", IntakeThread("default", destination, stop, Activity()).run)
        group.start()
        try:
            yield
            wait_until(until)
        finally:
            stop.set()
            group.join()


@pytest.fixture(params=["activemq", "rabbitmq"])
def server(request: pytest.FixtureRequest) -> StompServer:
    """Each broker in turn."""
    found: StompServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def session(server: StompServer) -> Iterator[jms.Session]:
    """A foreign client's session with the broker."""
    factory = jms.ConnectionFactory(server.url())
    with factory.create_connection() as connection:
        yield connection.create_session()


@committing
def test_a_message_in_the_broker_s_dead_letter_queue_is_taken_in(
    server: StompServer, session: jms.Session, destination: str
) -> None:
    message_id = str(uuid.uuid4())
    session.create_producer(f"DLQ.{destination}").send(
        jms.Message(b"given up\x00", {"txmsg-id": message_id, "colour": "red"})
    )
    with taking_in(server.url(), f"DLQ.{destination}"):
        pass

    letter = DeadLetter.objects.get()
    assert (str(letter.message_id), letter.reason) == (message_id, "broker")
    assert bytes(letter.body) == b"given up\x00"
    assert letter.headers["colour"] == "red"
    assert session.create_consumer(f"DLQ.{destination}").receive(0.5) is None


@committing
def test_letter_of_another_service_is_sent_again_by_this_service(
    server: StompServer, session: jms.Session, destination: str
) -> None:
    """The relay of the other service may not read this database."""
    dead = f"DLQ.{destination}"
    session.create_producer(dead).send(jms.Message("again", {wire.SERVICE: "shop"}))
    with taking_in(server.url(), dead):
        pass
    DeadLetter.objects.update(destination=destination)
    with txmsg(BROKERS={"default": {"URL": server.url()}}):
        assert redelivered(force=False).done == 1
        assert OutboxMessage.objects.get().service == "tests"
        assert ship() == 1
    again = session.create_consumer(destination).receive(10)
    assert again is not None
    assert again.body == "again"


def wait_for_a_millisecond() -> None:
    """Wait until a message that was just sent with a lifetime of 1 ms has expired. The
    broker counts whole milliseconds."""
    sent = time.time()
    wait_until(lambda: time.time() > sent + 0.002)


@committing
def test_a_message_that_expired_is_taken_in_with_the_broker_s_reason(
    server: StompServer, session: jms.Session, destination: str
) -> None:
    dead = f"DLQ.{destination}"
    session.create_consumer(dead).close()
    # Arguments of the queue to RabbitMQ, nothing to ActiveMQ.
    way = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    session.create_producer(destination).send(
        jms.Message("too late", way),
        delivery=jms.Delivery(time_to_live=dt.timedelta(milliseconds=1)),
    )
    if isinstance(server, ActiveMQ):
        # ActiveMQ notices that a message has expired when a consumer asks for it.
        wait_for_a_millisecond()
        assert session.create_consumer(destination).receive(0.5) is None
    with taking_in(server.url(), dead):
        pass

    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.destination) == ("broker", destination)
    assert "expired" in letter.exception.lower()
    assert bytes(letter.body) == b"too late"


@committing
def test_letter_of_a_topic_is_redelivered_to_the_topic_and_only_by_force(
    activemq: ActiveMQ, destination: str
) -> None:
    """A message expires in a durable subscription. ActiveMQ names the topic, and not
    the subscription."""
    topic = f"topic:{destination}"
    factory = jms.ConnectionFactory(activemq.url(), client_id=destination)
    with factory.create_connection() as connection:
        session = connection.create_session()
        session.create_consumer(topic, subscription="late").close()
        session.create_producer(topic).send(
            jms.Message("too late"),
            delivery=jms.Delivery(time_to_live=dt.timedelta(milliseconds=1)),
        )
        # ActiveMQ notices that a message has expired when a consumer asks for it.
        wait_for_a_millisecond()
        late = session.create_consumer(topic, subscription="late")
        assert late.receive(0.5) is None
        with taking_in(activemq.url(), "ActiveMQ.DLQ"):
            pass
        letter = DeadLetter.objects.get()
        assert letter.destination == topic
        with txmsg(BROKERS={"default": {"URL": activemq.url()}}):
            (why,) = redelivered(force=False).skipped_why.values()
            assert "would reach every subscriber" in why
            assert redelivered(force=True).done == 1
            assert ship() == 1
        again = late.receive(10)
        assert again is not None
        assert again.body == "too late"


@committing
def test_amqp_tells_the_broker_s_reason_as_well(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, destination: str
) -> None:
    dead = f"DLQ.{destination}"
    arguments = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
        "x-message-ttl": 1,
    }
    address = f"127.0.0.1:{rabbitmq.amqp_port}"
    with amqp.Connection(address, USER, PASSWORD) as connection:
        channel = connection.channel()
        channel.queue_declare(dead, durable=True, auto_delete=False)
        channel.queue_declare(
            destination, durable=True, auto_delete=False, arguments=arguments
        )
        channel.basic_publish(amqp.Message(b"too late"), routing_key=destination)
    with taking_in(rabbitmq_amqp.url(), dead):
        pass
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.destination) == ("broker", destination)
    assert "expired" in letter.exception.lower()


@committing
@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq_amqp"])
def test_a_delayed_message_comes_from_the_queue_that_dead_lettered_it(
    kind: str, rabbitmq: RabbitMQ, destination: str, request: pytest.FixtureRequest
) -> None:
    """RabbitMQ records the end of the delay as the first death."""
    url = request.getfixturevalue(kind).url()
    dead = f"DLQ.{destination}"
    arguments = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
        "x-max-length": 0,
    }
    address = f"127.0.0.1:{rabbitmq.amqp_port}"
    with amqp.Connection(address, USER, PASSWORD) as connection:
        channel = connection.channel()
        channel.queue_declare(dead, durable=True, auto_delete=False)
        channel.queue_declare(
            destination, durable=True, auto_delete=False, arguments=arguments
        )
    message = Outgoing(destination, {"txmsg-id": str(uuid.uuid4())}, b"x", 0.01)
    with (
        txmsg(BROKERS={"default": {"URL": url}}),
        get_broker("default").open() as session,
    ):
        assert session.send_delayed([message]) == [None]
    with taking_in(url, dead):
        pass
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.destination) == ("broker", destination)
    assert "expired" not in letter.exception


def test_death_in_a_delay_queue_that_is_the_users_own() -> None:
    """Its name looks like the name of a delay queue of this package."""
    first = {"x-first-death-queue": "jobs.wait-30s", "x-first-death-reason": "maxlen"}
    assert deaths.cause(first) == ("maxlen", "jobs.wait-30s")
    first["x-first-death-reason"] = "expired"
    last = {"x-last-death-queue": "jobs.wait-30s", "x-last-death-reason": "expired"}
    assert deaths.cause(first | last) == ("expired", "jobs.wait-30s")


def test_a_delayed_message_in_a_chain_of_dead_letter_queues() -> None:
    """The message has expired in the first dead-letter queue, too."""
    headers = {
        "x-first-death-queue": "jobs.wait-30s",
        "x-first-death-reason": "expired",
        "x-last-death-queue": "DLQ.1",
        "x-last-death-reason": "expired",
    }
    died = [("DLQ.1", "expired"), ("jobs", "rejected"), ("jobs.wait-30s", "expired")]
    listed = json.dumps([{"queue": one, "reason": why} for one, why in died])
    assert deaths.cause(headers | {"x-death": listed}) == ("rejected", "jobs")
    assert deaths.cause(headers) == ("expired", "DLQ.1")


@committing
@pytest.mark.parametrize(
    ("header", "destination"),
    [
        ("orders.place", "orders.place"),
        ("queue://orders.place", "orders.place"),
        ("/queue/orders.place", "orders.place"),
        ("topic://orders.placed", "topic:orders.placed"),
        ("/topic/orders.placed", "topic:orders.placed"),
        ("shop.txmsg.control", "DLQ"),
        ("queue://shop.txmsg.control", "DLQ"),
        ("/topic/shop.txmsg.control", "DLQ"),
        ("orders place\n", "DLQ"),
        ("", "DLQ"),
        ("x" * 300, "DLQ"),
    ],
)
def test_foreign_header_cannot_choose_a_forbidden_destination(
    header: str, destination: str
) -> None:
    """A foreign header may name the destination to which the dead letter is
    redelivered. If the name is forbidden or invalid, the destination is the dead-letter
    queue."""
    factories.QueueMessageFactory(queue="DLQ", headers={"original-destination": header})

    with taking_in("database://", "DLQ", BACKEND=f"{__name__}.WithDeadLetters"):
        pass

    assert DeadLetter.objects.get().destination == destination


@committing
def test_offset_that_postgresql_refuses_does_not_block_the_intake() -> None:
    headers = {wire.CREATED: "2024-03-01T00:00:00+23:59"}
    factories.QueueMessageFactory(queue="DLQ", headers=headers)
    with taking_in("database://?poll=0.01", "DLQ"):
        pass
    assert DeadLetter.objects.get().headers[wire.CREATED] == headers[wire.CREATED]


@committing
def test_an_unexpected_error_loses_no_message_and_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Burying a message fails twice with an unexpected error. The thread continues,
    keeps the message, and finally buries it."""
    bury, tries = burial.bury, iter([RuntimeError, KeyError])

    def fail_twice(**letter: Any) -> Any:
        for error in tries:
            raise error
        return bury(**letter)

    monkeypatch.setattr(burial, "bury", fail_twice)
    with txmsg():
        message_id = put("DLQ.tests")
        with taking_in("database://?poll=0.01", "DLQ.tests"):
            pass
    assert DeadLetter.objects.get().message_id == message_id
    assert not QueueMessage.objects.exists()
