"""Connections: how they are opened, kept alive, lost and closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import DESTINATION

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


def nobody_there() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("profile", ["classic", "artemis", "rabbitmq"])
def test_the_dialect_is_found_from_connected(
    scripted: Scripted, connect: Connect, profile: str
) -> None:
    connection = connect(scripted(profile))

    assert connection.dialect.name == profile.replace("classic", "activemq")


def test_the_dialect_given_wins(scripted: Scripted, connect: Connect) -> None:
    assert connect(scripted("classic"), dialect="rabbitmq").dialect.name == "rabbitmq"


def test_the_first_host_that_answers_is_taken(broker: ScriptedBroker) -> None:
    url = f"stomp://127.0.0.1:{nobody_there()},127.0.0.1:{broker.port}"

    with jms.ConnectionFactory(url).create_connection() as connection:
        assert connection.address == broker.address


def test_when_no_host_answers_the_error_has_every_hosts_reason() -> None:
    ports = nobody_there(), nobody_there()
    url = "stomp://me:secret@" + ",".join(f"127.0.0.1:{port}" for port in ports)

    with pytest.raises(jms.ConnectionFailedError) as caught:
        jms.ConnectionFactory(url).create_connection()

    text = str(caught.value)
    assert all(f"127.0.0.1:{port}" in text for port in ports)
    assert text.count("refused") == 2
    assert "secret" not in text
    assert isinstance(caught.value, ConnectionError)


def test_credentials_are_sent_and_a_refusal_says_why(scripted: Scripted) -> None:
    broker = scripted(users={"me": "pa:ss\\word"})

    right = jms.ConnectionFactory(broker.url, user="me", password="pa:ss\\word")
    right.create_connection().close()
    with pytest.raises(jms.ConnectionFailedError, match="password is invalid"):
        jms.ConnectionFactory(broker.url, user="me").create_connection()


def test_the_stack_trace_of_a_refusal_is_left_out(scripted: Scripted) -> None:
    broker = scripted()
    java = "javax.jms.InvalidClientIDException: shop.work is connected"
    trace = "\n\tat org.apache.activemq.broker.region.RegionBroker.addConnection"
    broker.on("CONNECT").reject("shop.work is connected", java + 9 * trace)

    with pytest.raises(jms.ConnectionFailedError) as refused:
        jms.ConnectionFactory(broker.url).create_connection()
    assert f"{java}. Check the URL's port" in str(refused.value)


def test_a_broker_without_stomp_1_2_is_refused(scripted: Scripted) -> None:
    broker = scripted()
    broker.on("CONNECT").reject("Supported protocol versions are 1.0,1.1")

    with pytest.raises(jms.ConnectionFailedError, match=r"versions"):
        jms.ConnectionFactory(broker.url).create_connection()


def test_the_virtual_host_is_slash_unless_given(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    connect(broker).close()

    assert broker.received("CONNECT")[0]["host"] == "/"
    with pytest.raises(jms.ConnectionFailedError, match="access denied"):
        jms.ConnectionFactory(broker.url, vhost="other").create_connection()


def test_a_silent_broker_is_given_up_after_two_missed_heartbeats(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, heartbeat=0.1)
    producer = connection.create_session().create_producer(DESTINATION)
    broker.on("SEND").drop_receipt()
    producer_waits = threading.Event()

    broker.silence_heartbeats()
    with pytest.raises(jms.ConnectionLostError, match="no heartbeat"):
        producer.send(jms.Message("x"))

    assert connection.failed
    assert not producer_waits.is_set()


def test_heartbeats_keep_an_idle_connection_alive_in_both_directions(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, heartbeat=0.5)

    wait_until(lambda: broker.peers[0].heartbeats >= 6)

    assert not connection.failed
    connection.ping()


def test_heartbeats_are_agreed_on_and_can_be_off(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(heart_beat=(0, 0))
    connection = connect(broker, heartbeat=0.05)

    assert broker.received("CONNECT")[0]["heart-beat"] == "50,50"
    assert connection.link.transport.silence_limit is None
    connect(broker, heartbeat=0)
    assert broker.received("CONNECT")[1]["heart-beat"] == "0,0"


def test_ping_proves_that_the_broker_handles_our_frames(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, give_up_after_timeouts=0)

    assert connection.ping() >= 0
    broker.stall()
    with pytest.raises(jms.RequestTimeoutError):
        connection.ping(timeout=0.2)
    broker.resume()
    assert connection.ping() >= 0


def test_an_orderly_close_is_no_failure(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)

    connection.close()
    connection.close()

    assert (connection.failed, connection.closed) == (False, True)
    with pytest.raises(jms.IllegalStateError, match="closed"):
        connection.create_session()
    with pytest.raises(jms.IllegalStateError, match="closed"):
        connection.ping()


def test_close_ends_both_threads_and_the_socket(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    port = str(broker.port)

    connection.close()

    assert not any(port in thread.name for thread in threading.enumerate())
    broker.wait_for_connections(0)


@pytest.mark.parametrize("every", [1, 3])
def test_answers_split_at_any_byte_are_understood(
    broker: ScriptedBroker, connect: Connect, every: int
) -> None:
    broker.split_writes(every=every, pause=0.0002)
    session = connect(broker).create_session()
    consumer = session.create_consumer(DESTINATION)

    session.create_producer(DESTINATION).send(jms.Message(b"\0\n\0", {"a:b": "c\nd"}))
    message = consumer.receive(30)

    assert message is not None
    assert (message.body, message.headers["a:b"]) == (b"\0\n\0", "c\nd")


def test_bytes_that_are_no_stomp_end_the_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)

    broker.write(b"MESSAGE\ncontent-length:3\n\nlonger\x00")

    wait_until(lambda: connection.failed)
    assert "not STOMP" in str(connection.error)


def test_an_unknown_frame_is_ignored(broker: ScriptedBroker, connect: Connect) -> None:
    connection = connect(broker)

    broker.write(b"GREETING\nx:y\n\n\x00")

    connection.ping()


def test_reconnecting_replays_nothing(broker: ScriptedBroker, connect: Connect) -> None:
    first = connect(broker)
    session = first.create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("x"))
    broker.wait_for("SEND")
    broker.cut()

    connect(broker).ping()

    assert len(broker.received("SEND")) == 1
    with pytest.raises(jms.ConnectionLostError):
        session.create_producer(DESTINATION)


def test_a_connection_whose_writer_cannot_start_is_closed(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("jms-writer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        jms.ConnectionFactory(broker.url).create_connection()

    broker.wait_for_connections(0)
