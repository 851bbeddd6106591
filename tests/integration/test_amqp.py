"""RabbitMQ over AMQP: queues, topics, returned messages, and messages that cross
between AMQP and STOMP."""

from __future__ import annotations

import json
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import amqp
import pytest

from django_txmsg import wire
from django_txmsg.brokers import make_broker
from django_txmsg.brokers.amqp import frames, link
from django_txmsg.brokers.amqp.link import CONSUMING
from django_txmsg.brokers.amqp.session import AmqpSession, _heart
from django_txmsg.brokers.base import Delivery, Outgoing, Session
from django_txmsg.consuming.decoding import MAX_HEADER_BLOCK
from django_txmsg.envelope.message import Message
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)
from django_txmsg.models import DeadLetter
from django_txmsg.testing.broker_suite import bodies, take
from tests.faults import ANSWERS, REQUESTS, Proxy, wait_until
from tests.running import committing, declared, put, running, txmsg
from tests.services import ByAmqp, RabbitMQ
from tests.services.stomp_server import ALLOWED, LIMITED_USER, PASSWORD, USER

Open = Callable[..., Session]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return a function that opens a session by URL. The sessions are closed at the end
    of the test."""
    with ExitStack() as stack:

        def open_(url: str, **options: Any) -> Session:
            broker = make_broker("tested", url)
            return stack.enter_context(broker.open(**options))

        yield open_


@pytest.fixture
def bare(rabbitmq: RabbitMQ) -> Iterator[amqp.Channel]:
    """An AMQP channel of a client other than ours."""
    link = amqp.Connection(f"127.0.0.1:{rabbitmq.amqp_port}", USER, PASSWORD)
    with link:
        yield link.channel()


def queue_type(server: RabbitMQ, name: str) -> str:
    told = server.control("list_queues", "--quiet", "name", "type")
    return dict(line.split("\t") for line in told.splitlines())[name].rpartition("_")[2]


def received(session: Session, destination: str, count: int) -> list[Delivery]:
    session.subscribe(destination, prefetch=count or 1)
    found = take(session, count)
    session.ack(found)
    return found


# -- the wrong port ----------------------------------------------------------------


def test_stomp_at_the_amqp_port_names_the_right_url(
    rabbitmq: RabbitMQ, opened: Open
) -> None:
    with pytest.raises(BrokerUnavailable, match=r"AMQP port; use amqp://"):
        opened(rabbitmq.url(port=rabbitmq.amqp_port)).ping()


@pytest.mark.parametrize("server", ["rabbitmq", "activemq"])
def test_amqp_at_a_stomp_port_names_the_amqp_port(
    server: str, request: pytest.FixtureRequest, opened: Open
) -> None:
    port = request.getfixturevalue(server).port
    url = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{port}?connect_timeout=5"
    with pytest.raises(BrokerUnavailable, match=r"its AMQP port \(5672, .*\)\.$"):
        opened(url).ping()


# -- large headers -----------------------------------------------------------------


@committing
def test_headers_longer_than_an_agreed_frame_hold_up_no_other_message(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, destination: str
) -> None:
    """RabbitMQ sends headers in one frame, however long they are."""
    big = {f"h{n}": str(n % 10) * 8000 for n in range(MAX_HEADER_BLOCK // 8000 + 1)}
    got: list[Message] = []
    with txmsg(BROKERS={"default": {"URL": rabbitmq.url()}}):
        put(destination, b"its body", {"content-type": "text/plain", **big})
        good = put(destination)
    with (
        txmsg(BROKERS={"default": {"URL": rabbitmq_amqp.url()}}),
        declared(got.append, destination) as stage,
        running(stage),
    ):
        wait_until(lambda: bool(got) and DeadLetter.objects.exists(), deadline=60)
    assert [one.id for one in got] == [good]
    assert DeadLetter.objects.get().reason == "headers_too_large"


# -- queues ------------------------------------------------------------------------


def test_a_time_out_of_the_caller_limits_the_whole_batch(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """RabbitMQ confirms one message after the other. Their confirms together take
    longer than the time-out, but each of them is in time."""
    session = opened(rabbitmq_amqp.url())
    assert session.send([Outgoing(destination, {}, b"first")]) == [None]
    batch = [Outgoing(destination, {}, b"x")] * 5000
    outcomes = session.send(batch, isolate=True, timeout=0.05)

    stored = outcomes.index(next(filter(None, outcomes)))
    assert all(isinstance(one, DispatchUnknown) for one in outcomes[stored:])
    assert not any(one.written for one in outcomes[stored + 1 :])  # type: ignore[union-attr]
    assert len(received(session, destination, stored + 1)) == stored + 1


def test_a_missing_queue_is_made_as_quorum_or_as_the_url_says(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    for kind, options in (
        ("quorum", {}),
        ("classic", {"queue_type": "classic"}),
    ):
        name = f"{destination}.{kind}"
        session = opened(rabbitmq_amqp.url(**options))
        assert session.send([Outgoing(name, {}, b"x")]) == [None]
        assert queue_type(rabbitmq, name) == kind


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"x-queue-type": "quorum", "x-delivery-limit": 3},
        {"x-max-priority": 5, "x-message-ttl": 60_000},
    ],
)
def test_a_queue_that_is_there_is_taken_as_it_is(
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    bare: amqp.Channel,
    destination: str,
    arguments: dict[str, Any],
) -> None:
    bare.queue_declare(
        destination, durable=True, auto_delete=False, arguments=arguments
    )
    session = opened(rabbitmq_amqp.url())
    assert session.send([Outgoing(destination, {}, b"x")]) == [None]
    assert bodies(received(session, destination, 1)) == [b"x"]


def test_stage_cannot_subscribe_to_a_stream(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    """A stage refuses to subscribe to a stream, because the stage would get none of the
    earlier messages, and RabbitMQ would report no error."""
    bare.queue_declare(
        destination,
        durable=True,
        auto_delete=False,
        arguments={"x-queue-type": "stream"},
    )
    # Others read it, as streams are read: sending is no mistake.
    session = opened(rabbitmq_amqp.url())
    assert session.send([Outgoing(destination, {}, b"x")]) == [None]
    for name, subscriber in ((destination, None), ("topic:any", destination)):
        session = opened(rabbitmq_amqp.url(), subscriber=subscriber)
        with pytest.raises(BrokerUnavailable, match="is a stream"):
            session.subscribe(name, prefetch=5, subscriber=subscriber)


@committing
@pytest.mark.postgresql
def test_a_stage_on_a_stream_reports_it_and_waits(
    rabbitmq_amqp: ByAmqp, bare: amqp.Channel, destination: str
) -> None:
    bare.queue_declare(
        destination,
        durable=True,
        auto_delete=False,
        arguments={"x-queue-type": "stream"},
    )
    with (
        txmsg(BROKERS={"default": {"URL": rabbitmq_amqp.url()}}),
        declared(lambda message: None, destination) as stage,
        running(stage) as [thread],
    ):
        wait_until(lambda: thread.refusal is not None)
        assert "is a stream" in str(thread.refusal)


def test_a_queue_that_is_exclusive_to_another_connection_takes_nothing(
    rabbitmq_amqp: ByAmqp, rabbitmq: RabbitMQ, opened: Open, destination: str
) -> None:
    """RabbitMQ would confirm messages to a queue that is exclusive to another
    connection, and delete them when that connection ends. So the session refuses to use
    such a queue."""
    session = opened(rabbitmq_amqp.url())
    with amqp.Connection(f"127.0.0.1:{rabbitmq.amqp_port}", USER, PASSWORD) as other:
        other.channel().queue_declare(destination, exclusive=True)
        (error,) = session.send([Outgoing(destination, {}, b"lost")])
        assert isinstance(error, DestinationUnavailable)
        assert "exclusive to another connection" in str(error)
        with pytest.raises(BrokerUnavailable, match="exclusive"):
            opened(rabbitmq_amqp.url()).subscribe(destination, prefetch=1)
    # The connection is over, and so is its queue: one of ours takes its place.
    assert session.send([Outgoing(destination, {}, b"kept")]) == [None]
    assert bodies(received(session, destination, 1)) == [b"kept"]


def test_a_connection_that_was_ended_between_two_batches_is_an_outcome(
    rabbitmq_amqp: ByAmqp, rabbitmq: RabbitMQ, opened: Open, destination: str
) -> None:
    """RabbitMQ closes the connection between two sends. The second send returns the
    error as the message's outcome, and raises nothing."""
    session = opened(rabbitmq_amqp.url())
    assert session.send([Outgoing(destination, {}, b"1")]) == [None]
    rabbitmq.close_all_connections()
    (error,) = session.send([Outgoing(destination, {}, b"2")])
    assert isinstance(error, DispatchUnknown)
    assert error.hung_up


def test_a_closing_text_that_is_not_utf8_is_an_outcome(
    rabbitmq_amqp: ByAmqp, rabbitmq: RabbitMQ, opened: Open, destination: str
) -> None:
    """RabbitMQ cuts the reason for which it closes a connection after 252 bytes, also
    in the middle of a character."""
    session = opened(rabbitmq_amqp.url())
    assert session.send([Outgoing(destination, {}, b"1")]) == [None]
    rabbitmq.control("close_all_connections", "so" + "\N{SNOWMAN}" * 100)
    (error,) = session.send([Outgoing(destination, {}, b"2")])
    assert isinstance(error, DispatchUnknown)
    assert error.hung_up


def test_queue_declared_concurrently_is_used_as_it_is(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """Another client declares the queue with another type, after our check and before
    our declaration. The session then uses that queue."""
    with Proxy(rabbitmq_amqp.port) as proxy, ThreadPoolExecutor(1) as pool:
        quick = opened(rabbitmq_amqp.url(queue_type="classic"))
        slow = opened(rabbitmq_amqp.url(port=proxy.port))
        slow.ping()
        asked = proxy.forwarded[REQUESTS]
        proxy.hang(ANSWERS)
        sending = pool.submit(slow.send, [Outgoing(destination, {}, b"x")])
        wait_until(lambda: proxy.forwarded[REQUESTS] > asked)
        quick.ping()  # RabbitMQ has said by now that there is none
        assert quick.send([Outgoing(destination, {}, b"y")]) == [None]
        proxy.resume()
        assert sending.result(60) == [None]


def test_unroutable_message_is_refused_except_to_a_topic(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    there, missing = f"{destination}.there", f"{destination}.missing"
    opened(rabbitmq_amqp.url()).subscribe(there, prefetch=1)
    session = opened(rabbitmq_amqp.url(declare="no"))
    outcomes = session.send(
        [
            Outgoing(there, {}, b"1"),
            Outgoing(missing, {}, b"2"),
            Outgoing(f"topic:{missing}", {}, b"3"),
            Outgoing(there, {}, b"4"),
        ]
    )
    refused = outcomes.pop(1)
    assert outcomes == [None] * 3
    assert isinstance(refused, DestinationUnavailable)
    assert "declare=no" in str(refused)


@pytest.mark.parametrize("isolate", [False, True])
def test_returned_message_is_refused_alone_and_its_queue_redeclared(
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    bare: amqp.Channel,
    destination: str,
    isolate: bool,
) -> None:
    """A batch sends messages to a deleted queue, and RabbitMQ returns them. Only these
    messages are refused, and the next send declares the queue again."""
    gone, stays = f"{destination}.gone", f"{destination}.stays"
    session = opened(rabbitmq_amqp.url())
    batch = [
        Outgoing(gone if n % 3 == 1 else stays, {"n": str(n)}, b"%d" % (n // 2))
        for n in range(30)
    ]
    assert session.send([Outgoing(gone, {}, b""), Outgoing(stays, {}, b"")]) == [
        None, None
    ]  # fmt: skip
    bare.queue_delete(gone)
    outcomes = session.send(batch, isolate=isolate)
    for number, outcome in enumerate(outcomes):
        if number % 3 == 1:
            assert isinstance(outcome, DestinationUnavailable)
            assert "NO_ROUTE" in str(outcome)
        else:
            assert outcome is None
    again = [one for one in batch if one.destination == gone]
    assert session.send(again) == [None] * 10
    assert len(received(opened(rabbitmq_amqp.url()), gone, 10)) == 10
    assert len(received(opened(rabbitmq_amqp.url()), stays, 21)) == 21


def test_message_too_large_for_amqp_is_refused_alone(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    many = {f"h{n}": "x" * 8000 for n in range(20)}
    *refused, first, last = (
        Outgoing(destination, many, b""),
        Outgoing(f"topic:{'é' * 200}", {}, b""),
        Outgoing("topic:half a \ud83d", {}, b""),
        Outgoing("half a \ud83d", {}, b""),
        Outgoing("x" * 256, {}, b""),
        Outgoing(destination, {}, b"1"),
        Outgoing(destination, {}, b"2"),
    )
    outcomes = opened(rabbitmq_amqp.url()).send([first, *refused, last])
    assert [type(one) for one in outcomes[1:-1]] == [DispatchRejected] * 5
    assert (outcomes[0], outcomes[-1]) == (None, None)


def test_message_with_a_header_that_is_not_text_is_refused_alone(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """Somebody has written the row of the outbox by hand."""
    number: Any = {"n": 1}
    bad, good = Outgoing(destination, number, b""), Outgoing(destination, {}, b"1")
    refused, taken = opened(rabbitmq_amqp.url()).send([bad, good])
    assert isinstance(refused, DispatchRejected)
    assert taken is None


def test_a_queue_that_cannot_be_declared_is_no_fault_of_its_messages(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    session = opened(rabbitmq_amqp.url())
    assert isinstance(session, AmqpSession)
    with pytest.raises(DestinationUnavailable, match="invalid arg"):
        session._queues.ensure(destination, {"x-max-length": -1})


def test_a_full_queue_that_refuses_is_a_refusal_and_holds_its_key_back(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    limits = {"x-max-length": 2, "x-overflow": "reject-publish"}
    bare.queue_declare(destination, durable=True, auto_delete=False, arguments=limits)
    session = opened(rabbitmq_amqp.url())
    batch = [Outgoing(destination, {wire.KEY: "k"}, b"%d" % n) for n in range(5)]
    stored, other, refused, *held = session.send(batch)
    assert stored is None
    assert other is None
    assert isinstance(refused, DestinationUnavailable)
    assert [type(one) for one in held] == [DispatchHeld] * 2
    assert bodies(received(session, destination, 2)) == [b"0", b"1"]


def test_a_key_s_messages_keep_their_order_among_many(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    session = opened(rabbitmq_amqp.url(max_in_flight="7"))
    batch = [
        Outgoing(destination, {wire.KEY: str(n % 5)}, b"%d" % n) for n in range(300)
    ]
    assert session.send(batch) == [None] * 300
    found = [int(one.body) for one in received(session, destination, 300)]
    for key in range(5):
        assert [n for n in found if n % 5 == key] == list(range(key, 300, 5))


def test_a_topic_that_must_not_be_written_is_refused_when_sent_alone(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    allowed, topic = f"allowed.{destination}", f"topic:{destination}"
    batch = [Outgoing(topic if n == 2 else allowed, {}, b"%d" % n) for n in range(5)]
    session = opened(rabbitmq_amqp.url(user=LIMITED_USER))
    assert any(isinstance(one, DispatchUnknown) for one in session.send(batch))
    session = opened(rabbitmq_amqp.url(user=LIMITED_USER))
    outcomes = session.send(batch, isolate=True)
    refused = outcomes.pop(2)
    assert outcomes == [None] * 4
    assert isinstance(refused, DestinationUnavailable)
    assert "refused" in str(refused)


# -- receiving ---------------------------------------------------------------------


def test_group_acknowledgement_skips_open_deliveries(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    session = opened(rabbitmq_amqp.url())
    session.send([Outgoing(destination, {}, b"%d" % n) for n in range(10)])
    session.subscribe(destination, prefetch=10)
    found = take(session, 10)
    for group in ((0, 1, 2), (4, 9), (3,), (7, 6)):
        session.ack([found[n] for n in group])
    session.close()
    other = opened(rabbitmq_amqp.url())
    again = received(other, destination, 2)
    assert sorted(bodies(again)) == [b"5", b"8"]
    assert other.receive(0.3) is None


def test_delivery_counted_or_dead_lettered_by_the_broker_is_a_redelivery(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    """A quorum queue's message is rejected, and the dead-letter queue returns it to the
    quorum queue. The next delivery is marked as a redelivery."""
    back = f"{destination}.back"
    bare.queue_declare(
        destination, durable=True, auto_delete=False,
        arguments={
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": back,
        },
    )  # fmt: skip
    bare.queue_declare(
        back, durable=True, auto_delete=False,
        arguments={
            "x-message-ttl": 1,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": destination,
        },
    )  # fmt: skip
    session = opened(rabbitmq_amqp.url())
    session.send([Outgoing(destination, {}, b"x")])
    session.subscribe(destination, prefetch=1)
    (first,) = take(session, 1)
    assert not first.redelivered
    session.close()
    message = bare.basic_get(destination)
    assert message is not None
    bare.basic_reject(message.delivery_tag, requeue=False)
    (again,) = received(opened(rabbitmq_amqp.url()), destination, 1)
    assert again.redelivered
    assert json.loads(again.headers["x-death"])[-1]["reason"] == "rejected"


def test_a_queue_that_is_deleted_ends_its_consumers_session(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    session = opened(rabbitmq_amqp.url())
    session.subscribe(destination, prefetch=1)
    bare.queue_delete(destination)
    with pytest.raises(BrokerUnavailable, match="deleted"):
        session.receive(30)


def test_subscription_ends_if_its_channel_ends_during_a_send(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """RabbitMQ closes the subscription's channel, for example after its
    consumer_timeout, and the session notices this during a send. Then receive() raises
    an error."""
    session = opened(rabbitmq_amqp.url())
    elsewhere = Outgoing(f"{destination}.other", {}, b"y")
    assert session.send([elsewhere]) == [None]
    session.subscribe(destination, prefetch=1)
    # Acknowledging a delivery that was never received: RabbitMQ closes the channel.
    assert isinstance(session, AmqpSession)
    session._link.transport.write(frames.acknowledged(999, CONSUMING))

    def over() -> bool:
        try:
            session.send([elsewhere])
        except BrokerUnavailable:
            return True
        return False

    wait_until(over)
    with pytest.raises(BrokerUnavailable):
        session.receive(0.1)


def test_a_subscription_in_use_is_not_deleted(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    broker = make_broker("tested", rabbitmq_amqp.url())
    session = opened(rabbitmq_amqp.url())
    session.subscribe(f"topic:{destination}", prefetch=1, subscriber=destination)
    with pytest.raises(BrokerError, match="in use"):
        broker.unsubscribe(f"topic:{destination}", destination)
    with pytest.raises(BrokerError, match="there is no subscription"):
        broker.unsubscribe(f"topic:{destination}", f"{destination}.mistyped")


def test_heart_beats_flow_while_the_session_s_thread_is_busy(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """The session's thread neither reads nor writes for longer than RabbitMQ waits for
    a heartbeat. The connection stays open."""
    session = opened(rabbitmq_amqp.url(heartbeat="1"))
    assert session.send([Outgoing(destination, {}, b"x")]) == [None]
    session.subscribe(destination, prefetch=1)
    (delivery,) = take(session, 1)
    threading.Event().wait(4.0)
    session.ack([delivery])
    session.ping()
    other = opened(rabbitmq_amqp.url())
    other.subscribe(destination, prefetch=1)
    assert other.receive(0.3) is None


def test_a_connection_without_a_thread_for_its_heartbeats_is_closed(
    rabbitmq_amqp: ByAmqp, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "txmsg-amqp-heart":
            raise RuntimeError("can't start new thread")
        start(thread)

    _heart.clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Proxy(rabbitmq_amqp.port) as proxy:
        broker = make_broker("default", rabbitmq_amqp.url(port=proxy.port))
        with pytest.raises(BrokerUnavailable, match="no heartbeats"):
            broker.open()
        assert proxy.accepted == 1
        wait_until(lambda: not proxy.connections)


def test_a_broker_that_stops_reading_is_not_waited_for_for_ever(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    with Proxy(rabbitmq_amqp.port) as proxy:
        url = rabbitmq_amqp.url(port=proxy.port, send_timeout="1", close_timeout="1")
        session = opened(url)
        assert session.send([Outgoing(destination, {}, b"x")]) == [None]
        proxy.hang()
        outcomes = session.send([Outgoing(destination, {}, b"x" * 200_000)] * 50)
    assert len(outcomes) == 50
    assert all(isinstance(one, DispatchUnknown) for one in outcomes)


# -- transactions ------------------------------------------------------------------


def test_rabbitmqs_own_transaction_acknowledges_although_a_queue_refuses(
    bare: amqp.Channel, destination: str
) -> None:
    """A fact about RabbitMQ, and the reason why a session uses no AMQP transaction: the
    delivery is gone, and the message to the full queue is not stored."""
    full, free = f"{destination}.full", f"{destination}.free"
    limit = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for name, arguments in ((destination, {}), (full, limit), (free, {})):
        bare.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
    for name in (destination, full):
        bare.basic_publish(amqp.Message("x"), routing_key=name)

    def left(name: str) -> int:
        return int(bare.queue_declare(name, passive=True).message_count)

    wait_until(lambda: left(full) == left(destination) == 1)

    other = bare.connection.channel()
    other.tx_select()
    given = other.basic_get(destination)
    assert given is not None
    for name in (full, free):
        other.basic_publish(amqp.Message("y"), routing_key=name)
    other.basic_ack(given.delivery_tag)
    with pytest.raises(amqp.PreconditionFailed, match="partial tx completion"):
        other.tx_commit()

    wait_until(lambda: left(free) == 1)
    assert (left(destination), left(full)) == (0, 1)


def test_queue_deleted_before_the_commit_is_redeclared_for_returned_messages(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    target = f"{destination}.next"
    session = opened(rabbitmq_amqp.url(), transacted=True)
    session.subscribe(destination, prefetch=1)
    session.enlist(Outgoing(target, {}, b"x"))
    bare.queue_delete(target)
    session.commit([])
    assert bodies(received(opened(rabbitmq_amqp.url()), target, 1)) == [b"x"]


def test_commit_finds_the_message_because_of_which_the_channel_was_closed(
    rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """The user has no write permission for topics. So the error is about a destination,
    and the caller counts no attempt."""
    own = f"{ALLOWED}{destination}"
    session = opened(rabbitmq_amqp.url(user=LIMITED_USER), transacted=True)
    session.subscribe(own, prefetch=1)
    for name in (own, f"topic:{own}", own):
        session.enlist(Outgoing(name, {}, b"x"))
    with pytest.raises(DestinationUnavailable, match=r"amq\.topic"):
        session.commit([])
    session.enlist(Outgoing(own, {}, b"y"))
    session.commit([])


@pytest.mark.parametrize("over", ["amqp", "stomp"])
@pytest.mark.parametrize("hung_up", [False, True])
def test_commit_without_an_answer_reports_whether_the_broker_hung_up(
    rabbitmq: RabbitMQ,
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    destination: str,
    over: str,
    hung_up: bool,
) -> None:
    server: Any = rabbitmq_amqp if over == "amqp" else rabbitmq
    with Proxy(server.port) as proxy:
        url = server.url(port=proxy.port, send_timeout="1", close_timeout="1")
        session = opened(url, transacted=True)
        session.subscribe(destination, prefetch=1)
        session.enlist(Outgoing(destination, {}, b"x"))
        if hung_up:
            proxy.cut_after(1)
        else:
            proxy.lose(ANSWERS)
        with pytest.raises(BrokerError) as unknown:
            session.commit([])
        if over == "stomp" and hung_up:
            # So RabbitMQ does if a queue is full.
            assert isinstance(unknown.value, DestinationUnavailable)
        else:
            assert isinstance(unknown.value, DispatchUnknown)
            assert unknown.value.hung_up == hung_up
        proxy.resume()


def test_only_returned_messages_are_resent_after_the_commit(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    """A session commits messages with the same body to two queues and a topic. One
    queue was deleted, so RabbitMQ returns one message. Only that message is sent
    again."""
    gone, stays = f"{destination}.gone", f"{destination}.stays"
    session = opened(rabbitmq_amqp.url(), transacted=True)
    session.subscribe(destination, prefetch=1)
    for name in (gone, stays, f"topic:{destination}"):
        session.enlist(Outgoing(name, {}, b"x"))
    bare.queue_delete(gone)
    session.commit([])
    for name in (gone, stays):
        reader = opened(rabbitmq_amqp.url())
        assert bodies(received(reader, name, 1)) == [b"x"]
        assert reader.receive(0.2) is None


# -- STOMP and AMQP on one RabbitMQ ------------------------------------------------

HEADERS = {
    "content-type": "application/json",
    "correlation-id": "c" * 255,
    "txmsg-id": str(uuid.uuid4()),
    "txmsg-key": "k: ü\n",
    "type": "a type",
    "colour": "red",
    "empty": "",
}


def of_sender(delivery: Delivery) -> dict[str, str]:
    return {n: v for n, v in delivery.headers.items() if wire.travels(n)}


def test_a_message_is_the_same_by_either_protocol(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """The queue was declared over STOMP. A message arrives unchanged, whichever
    protocol sends it and whichever receives it."""
    urls = (rabbitmq.url(), rabbitmq_amqp.url())
    for url in urls:
        assert opened(url).send([Outgoing(destination, HEADERS, b"{}")]) == [None]
    assert queue_type(rabbitmq, destination) == "classic"
    for url in urls:
        reader = opened(url)
        reader.subscribe(destination, prefetch=2)
        found = take(reader, 2)
        assert [of_sender(one) for one in found] == [HEADERS] * 2
        assert bodies(found) == [b"{}"] * 2
        reader.close()


def test_stomp_sends_nothing_that_amqp_has_no_place_for(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    """The STOMP client refuses headers that are too long for AMQP. Otherwise RabbitMQ
    would close the connection of every AMQP consumer that gets the message."""
    name, correlation_id = Outgoing(destination, {"n" * 256: "x"}, b""), "é" * 255
    media_type = Outgoing(destination, {"content-type": "a/" + "b" * 254}, b"")
    headers = {"correlation-id": correlation_id, "x": "y" * 999}
    long = Outgoing(destination, headers, b"")
    *refused, taken = opened(rabbitmq.url()).send([name, media_type, long])
    assert [type(one) for one in refused] == [DispatchRejected] * 2
    assert taken is None
    by_amqp = opened(rabbitmq_amqp.url())
    (found,) = received(by_amqp, destination, 1)
    by_amqp.close()
    assert found.headers["correlation-id"] == "é" * 127
    # By AMQP the whole of it has a place, to be read by either.
    assert opened(rabbitmq_amqp.url()).send([long]) == [None]
    (found,) = received(opened(rabbitmq.url()), destination, 1)
    assert found.headers["correlation-id"] == correlation_id


def test_a_foreign_message_has_one_identity_by_either_protocol(
    rabbitmq: RabbitMQ,
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    bare: amqp.Channel,
    destination: str,
) -> None:
    names = []
    for url in (rabbitmq.url(), rabbitmq_amqp.url()):
        session = opened(url)
        session.subscribe(destination, prefetch=1)
        if not names:
            given = {"application_headers": {"n": 7, "a": "b"}, "message_id": "7"}
            message = amqp.Message(b"1", content_type="text/plain", **given)
            bare.basic_publish(message, routing_key=destination)
        (delivery,) = take(session, 1)
        assert delivery.id_stays
        names.append((delivery.broker_message_id, of_sender(delivery)))
        session.close()
    assert names[0] == names[1]


def test_a_subscriber_of_a_topic_may_change_its_protocol(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    topic, name = f"topic:{destination}", f"{destination}.subscriber"
    opened(rabbitmq.url()).subscribe(topic, prefetch=1, subscriber=name)
    opened(rabbitmq.url()).send([Outgoing(topic, {}, b"by stomp")])
    opened(rabbitmq_amqp.url()).send([Outgoing(topic, {}, b"by amqp")])
    session = opened(rabbitmq_amqp.url())
    session.subscribe(topic, prefetch=5, subscriber=name)
    # One of the two consumers had the first already, and another may have that now.
    found = bodies(list(iter(lambda: session.receive(0.5), None)))
    assert found
    assert set(found) <= {b"by stomp", b"by amqp"}


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_stomp_uses_a_queue_that_amqp_made(
    rabbitmq: RabbitMQ,
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    destination: str,
    kind: str,
) -> None:
    """AMQP has declared the queue, and STOMP uses it. If it is a quorum queue, the
    URL's option `existing` must name it. Otherwise STOMP would declare a classic
    queue."""
    maker = opened(rabbitmq_amqp.url(queue_type=kind))
    assert maker.send([Outgoing(destination, {}, b"by amqp")]) == [None]
    options = {"existing": "other,tests.*"} if kind == "quorum" else {}
    by_stomp = opened(rabbitmq.url(**options))
    assert by_stomp.send([Outgoing(destination, {}, b"by stomp")]) == [None]
    by_stomp.subscribe(destination, prefetch=5)
    (first,) = take(by_stomp, 1)
    by_stomp.ack([first])
    by_stomp.close()
    found = received(maker, destination, 1)
    assert [first.body, found[0].body] == [b"by amqp", b"by stomp"]


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_topics_subscriber_goes_back_to_stomp_if_its_queue_is_classic(
    rabbitmq: RabbitMQ,
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    destination: str,
    kind: str,
) -> None:
    """A topic's subscriber changes from AMQP to STOMP. If the subscriber's queue is a
    classic queue, STOMP receives the waiting message. If it is a quorum queue, STOMP
    cannot subscribe, even with `existing`, because STOMP always declares a
    subscription's queue. The message then stays in the queue, and AMQP receives it."""
    topic, name = f"topic:{destination}", f"{destination}.subscriber"
    url = rabbitmq_amqp.url(queue_type=kind)
    before = opened(url)
    before.subscribe(topic, prefetch=5, subscriber=name)
    before.close()
    assert opened(url).send([Outgoing(topic, {}, b"between")]) == [None]
    after = opened(rabbitmq.url(existing="*"))
    if kind == "quorum":
        with pytest.raises(BrokerUnavailable, match="inequivalent arg 'x-queue-type'"):
            after.subscribe(topic, prefetch=5, subscriber=name)
        after = opened(url)
    after.subscribe(topic, prefetch=5, subscriber=name)
    (found,) = take(after, 1)
    assert found.body == b"between"


def test_delays_wait_in_the_same_queues(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, opened: Open, destination: str
) -> None:
    for url in (rabbitmq_amqp.url(queue_type="classic"), rabbitmq.url()):
        delayed = Outgoing(destination, {}, b"x", delay=0.2)
        assert opened(url).send_delayed([delayed]) == [None]
    assert len(received(opened(rabbitmq_amqp.url()), destination, 2)) == 2
    told = rabbitmq.control("list_queues", "--quiet", "name")
    assert [n for n in told.splitlines() if n.startswith(f"{destination}.delay")] == [
        f"{destination}.delay-1s"
    ]


# -- what no sender of ours writes -------------------------------------------------


def test_headers_become_text_or_a_problem(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    session = opened(rabbitmq_amqp.url())
    session.subscribe(destination, prefetch=10)
    table = {"n": -5, "yes": True, "none": None, "list": [1, {"a": "b"}], "big": 2**40}
    bare.basic_publish(
        amqp.Message(b"1", application_headers=table), routing_key=destination
    )
    bare.basic_publish(
        amqp.Message(b"2", application_headers={"bytes": b"\xff\xfe"}),
        routing_key=destination,
    )
    bare.basic_publish(
        amqp.Message(b"3", application_headers={"nul": "a\0b"}, priority=3),
        routing_key=destination,
    )
    whole, no_text, nul = take(session, 3)
    assert whole.problem == ""
    assert whole.headers == {
        "n": "-5", "yes": "true", "none": "", "list": '[1, {"a": "b"}]',
        "big": str(2**40),
    }  # fmt: skip
    assert "is not text" in no_text.problem
    assert "NUL" in nul.problem
    assert nul.headers["priority"] == "3"
    assert bodies([whole, no_text, nul]) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_body_that_is_too_long_is_cut_and_a_problem(
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    destination: str,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_BODY_BYTES", 200_000 if whole else 199_999)
    session = opened(rabbitmq_amqp.url())
    session.subscribe(destination, prefetch=2)
    session.send([Outgoing(destination, {}, b"b" * 200_000)])
    session.send([Outgoing(destination, {}, b"the next")])
    found, following = take(session, 2)
    assert (len(found.body), found.cut) == (200_000 if whole else 1 << 16, not whole)
    assert ("200000 bytes" in found.problem) is not whole
    assert (following.body, following.cut) == (b"the next", False)


def test_a_returned_message_whose_body_is_too_long_is_refused(
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    bare: amqp.Channel,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MAX_BODY_BYTES", 100_000)
    session = opened(rabbitmq_amqp.url())
    body = b"b" * 200_000
    assert session.send([Outgoing(destination, {}, body)]) == [None]
    bare.queue_delete(destination)
    others = [body[1:], body[:-1] + b"c"]
    outcomes = session.send([Outgoing(destination, {}, one) for one in [body, *others]])
    assert all(isinstance(one, DestinationUnavailable) for one in outcomes)


def test_a_message_to_several_queues_goes_back_to_the_one_it_came_from(
    rabbitmq_amqp: ByAmqp, opened: Open, bare: amqp.Channel, destination: str
) -> None:
    """A message's header CC names a second queue, so RabbitMQ puts a copy into each
    queue. Each copy is sent back without the header, so it reaches only its own
    queue."""
    copied = f"{destination}.copied"
    session, other = opened(rabbitmq_amqp.url()), opened(rabbitmq_amqp.url())
    session.subscribe(destination, prefetch=2)
    other.subscribe(copied, prefetch=2)
    table = {"CC": [copied], "colour": "red"}
    bare.basic_publish(
        amqp.Message(b"x", application_headers=table), routing_key=destination
    )
    for one in (session, other):
        (delivery,) = take(one, 1)
        one.send_back(delivery, delivery.headers)
        (again,) = take(one, 1)
        assert again.headers["colour"] == "red"
        one.ack([again])
        assert one.receive(0.2) is None


def test_properties_that_cannot_be_read_are_a_problem_and_no_error() -> None:
    from django_txmsg.brokers.amqp.frames import Reader, encode

    sound = encode({"content-type": "a/b", "x": "y", "type": "t"}, 5)
    assert Reader(sound).headers() == {
        "content-type": "a/b", "x": "y", "type": "t", "persistent": "true",
        "expiration": "5",
    }  # fmt: skip
    for end in range(len(sound)):
        reader = Reader(sound[:end])
        reader.headers()
        assert reader.problem
    for kind in range(256):
        table = b"\x01n" + bytes([kind]) + b"\xff" * 8
        reader = Reader(b"\x20\x00" + struct.pack(">I", len(table)) + table)
        assert all(isinstance(value, str) for value in reader.headers().values())
