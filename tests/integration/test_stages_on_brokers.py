"""The guarantees of stages, on brokers that run as a server."""

from __future__ import annotations

import datetime as dt
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import Refuse, jms
from django_txmsg.brokers import get_broker
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.stage_options import TRANSACTION_MODES
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect, Order
from tests.faults import Proxy, wait_until
from tests.running import (
    committing,
    declared,
    drained,
    put,
    running,
    send,
    ship,
    txmsg,
)
from tests.services import ByAmqp
from tests.services.stomp_server import StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]


@pytest.fixture(params=["activemq", "rabbitmq", "rabbitmq_amqp"])
def server(request: pytest.FixtureRequest) -> StompServer:
    """Each broker in turn."""
    found: StompServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def proxy(server: StompServer) -> Iterator[Proxy]:
    """Make the server the default broker, behind a proxy."""
    with (
        Proxy(server.port) as between,
        txmsg(BROKERS={"default": {"URL": server.url(port=between.port)}}),
    ):
        yield between


def taken(destination: str) -> list[bytes]:
    """Receive and return the waiting messages."""
    return [one.body for one in drained(destination)]


def processed(stage: Any) -> int:
    return InboxMessage.objects.filter(
        stage=stage.name, processed_at__isnull=False
    ).count()


def test_of_copies_that_arrive_at_once_one_handler_runs(destination: str) -> None:
    inside, go_on = threading.Event(), threading.Event()
    runs: list[uuid.UUID] = []
    onward = f"{destination}.next"

    def slow(message: Message) -> None:
        runs.append(message.id)
        inside.set()
        assert go_on.wait(60)
        Effect.objects.create(name="done", message_id=str(message.id))
        for number in range(100):
            send_message(onward, number)

    consume = {"PREFETCH": 1, "POLL_INTERVAL": 0.02}
    brokers = {"default": {"URL": get_broker()._url}}
    with txmsg(BROKERS=brokers, CONSUME=consume), declared(slow, destination) as stage:
        message_id = put(destination)
        for _ in range(3):
            put(destination, message_id=message_id)
        with running(stage, concurrency=4):
            assert inside.wait(60)
            go_on.set()
            rows = InboxMessage.objects.filter(deliveries=4, processed_at__isnull=False)
            wait_until(rows.exists, deadline=60)
    assert runs == [message_id]
    assert Effect.objects.count() == 1
    assert taken(destination) == []
    assert OutboxMessage.objects.filter(destination=onward).count() == 100


def test_stage_runs_as_many_handlers_as_it_has_threads(destination: str) -> None:
    meeting, met = threading.Barrier(6, timeout=60), []

    def handler(message: Message) -> None:
        met.append(meeting.wait())

    consume = {"PREFETCH": 1, "POLL_INTERVAL": 0.02}
    brokers = {"default": {"URL": get_broker()._url}}
    with (
        txmsg(BROKERS=brokers, CONSUME=consume),
        # With SQLite's one writer, handlers in a transaction would never meet.
        declared(handler, destination, transaction="broker_only") as stage,
        running(stage, concurrency=6),
    ):
        for _ in range(12):
            put(destination)
        wait_until(lambda: len(met) == 12, deadline=90)
    assert sorted(met) == sorted([*range(6)] * 2)


def test_a_topic_reaches_every_stage_once(destination: str) -> None:
    topic = f"topic:{destination}"
    seen: list[str] = []
    with (
        declared(lambda m: seen.append("a"), topic, name=f"{destination}.a") as a,
        declared(lambda m: seen.append("b"), topic, name=f"{destination}.b") as b,
        running(a) as (one,),
        running(b) as (two,),
    ):
        wait_until(lambda: one.dry and two.dry, message="both are subscribed")
        for _ in range(10):
            send(topic)
        wait_until(lambda: processed(a) == processed(b) == 10)
    assert sorted(seen) == ["a"] * 10 + ["b"] * 10


def test_message_sent_outside_the_stages_transaction_leaves_despite_a_failure(
    destination: str, server: StompServer
) -> None:
    def handler(message: Message) -> None:
        send_message(f"{destination}.joined", "with the stage")
        by_stomp = server.node if isinstance(server, ByAmqp) else server
        with jms.ConnectionFactory(by_stomp.url()).create_connection() as connection:
            session = connection.create_session()
            session.create_producer(f"{destination}.apart").send(jms.Message("apart"))
        raise Refuse

    for mode in TRANSACTION_MODES:
        with declared(handler, f"{destination}.{mode}", transaction=mode) as stage:
            put(stage.destination)
            with running(stage):
                wait_until(DeadLetter.objects.filter(stage=stage.name).exists)
    ship()
    assert taken(f"{destination}.apart") == [b"apart"] * len(TRANSACTION_MODES)
    assert taken(f"{destination}.joined") == []


def test_message_relayed_later_is_unchanged(destination: str) -> None:
    """The broker is unreachable when a stage's messages are first relayed. They are
    sent later, unchanged."""
    topic, queue = f"topic:{destination}.news", f"{destination}.next"
    name = f"{destination}.reader"

    def handler(message: Message) -> None:
        send_message(topic, "told", headers={"colour": "a:b\nü"})
        send_message(queue, "keyed", key="k", expires=dt.timedelta(hours=1))
        send_message(queue, "later", delay=dt.timedelta(seconds=1))

    with get_broker().open(subscriber=name) as session:
        session.subscribe(topic, prefetch=1, subscriber=name)
    with declared(handler, destination) as stage:
        put(destination)
        with running(stage):
            wait_until(lambda: processed(stage) == 1)
    dead = {"default": {"URL": "stomp://127.0.0.1:1"}}
    with txmsg(BROKERS=dead), pytest.raises(BrokerUnavailable):
        ship()
    ship()
    with get_broker().open(subscriber=name) as session:
        session.subscribe(topic, prefetch=1, subscriber=name)
        told = session.receive(30)
        assert told is not None
        assert (told.body, told.headers["colour"]) == (b'"told"', "a:b\nü")
        session.ack([told])
    with get_broker().open() as session:
        session.subscribe(queue, prefetch=10)
        keyed = session.receive(30)
        assert keyed is not None
        assert (keyed.body, keyed.headers["txmsg-key"]) == (b'"keyed"', "k")
        assert "txmsg-expires" in keyed.headers
        session.ack([keyed])
    row = OutboxMessage.objects.get(destination=queue, dispatched_at=None)
    assert row.due_at - row.created_at >= dt.timedelta(seconds=1)
    wait_until(ship)
    assert taken(queue) == [b'"later"']


class ClientDecidesIds:
    """A handler that inserts a row under a key that the client chose. If the row exists
    already, the handler fails. When the handler's first run commits, the connection to
    the broker is cut."""

    def __init__(self, proxy: Proxy, target: str) -> None:
        self.runs = 0
        self._proxy, self._target = proxy, target

    def __call__(self, message: Message) -> None:
        self.runs += 1
        if self.runs == 1:
            transaction.on_commit(lambda: self._proxy.cut(reset=True))
        Order.objects.create(number="from the client")
        send_message(self._target, "ordered")


def test_1pc_with_ids_from_the_client_ends_as_a_dead_letter(
    destination: str, proxy: Proxy
) -> None:
    """The second attempt collides with the row of the first, so the stage's message is
    never sent. The docs warn of this."""
    handler = ClientDecidesIds(proxy, f"{destination}.next")
    with declared(handler, destination, transaction="best_effort_1pc") as stage:
        put(destination)
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
    assert handler.runs == 4
    letter = DeadLetter.objects.get()
    assert "IntegrityError" in letter.exception
    assert letter.attempts == 3
    assert Order.objects.count() == 1
    assert taken(f"{destination}.next") == taken(destination) == []


def test_client_ids_in_mode_outbox_have_one_effect(
    destination: str, proxy: Proxy
) -> None:
    """The connection is cut at the first commit, and the message is delivered twice.
    There is one row, the stage's message is sent once, and there is no dead letter."""
    handler = ClientDecidesIds(proxy, f"{destination}.next")
    with declared(handler, destination) as stage:
        put(destination)
        with running(stage):
            again = InboxMessage.objects.filter(deliveries=2)
            wait_until(again.exists, deadline=60)
        ship()
    assert handler.runs == Order.objects.count() == 1
    assert taken(f"{destination}.next") == [b'"ordered"']
    assert taken(destination) == []
    assert not DeadLetter.objects.exists()


def test_refused_password_is_retried_with_pauses(
    destination: str, proxy: Proxy, server: StompServer
) -> None:
    """Many threads log in with a wrong password. Only one thread tries at a time, and
    the pauses between tries grow."""
    url = server.url(port=proxy.port, password="wrong")
    with (
        txmsg(BROKERS={"default": {"URL": url}}),
        declared(lambda message: None, destination) as stage,
    ):
        began = time.monotonic()
        with running(stage, concurrency=8):
            wait_until(lambda: proxy.accepted >= 4, deadline=60)
            # Pauses of 0.2, 0.4 and 0.8 seconds, give or take a quarter.
            assert time.monotonic() - began > 0.75 * 1.4
