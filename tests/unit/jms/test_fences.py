"""Faults of stomp.py 9 that our transport does not have.

For each fault, a test `test_stomp_py_...` shows it in stomp.py itself. If such a test
fails, stomp.py was repaired, and our workaround can be removed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stomp
import stomp.exception
import stomp.utils

from django_txmsg import jms
from tests.faults import wait_until

from .plain_server import CONNECTED, TLS, Client, plain_server

CA = str(TLS / "ca.pem")
pytestmark = pytest.mark.filterwarnings(
    # stomp.py leaves threads and sockets behind; that is one of the faults.
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)


@contextlib.contextmanager
def plain_stomp(
    address: tuple[str, int], *, tls: bool = False, **options: Any
) -> Iterator[stomp.Connection12]:
    """A connection of stomp.py itself. Its socket is closed at the end."""
    link = stomp.Connection12([address], auto_decode=False, **options)
    if tls:
        link.set_ssl([address], ca_certs=CA)
    try:
        yield link
    finally:
        link.transport.running = False
        sock = link.transport.socket
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            sock.close()


def factory(address: tuple[str, int], *, tls: bool = False, **options: Any) -> Any:
    host, port = address
    url = f"stomp+ssl://{host}:{port}?ca={CA}" if tls else f"stomp://{host}:{port}"
    return jms.ConnectionFactory(url, **{"heartbeat": 0, **options})


def run_in_thread(function: Callable[[], object]) -> threading.Thread:
    def quietly() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


# -- a TLS peer that goes away -------------------------------------------------------


def hang_up_when_told(told: threading.Event) -> Callable[[Client], None]:
    def serve(client: Client) -> None:
        client.connected()
        told.wait(30)
        client.sock.close()

    return serve


def test_stomp_py_does_not_notice_that_a_tls_peer_is_gone() -> None:
    told = threading.Event()
    with (
        plain_server(hang_up_when_told(told), tls=True) as address,
        plain_stomp(address, tls=True) as link,
    ):
        link.connect(wait=True)
        told.set()

        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: not link.is_connected(), deadline=1.0)


def test_our_transport_notices_that_a_tls_peer_is_gone() -> None:
    told = threading.Event()
    with plain_server(hang_up_when_told(told), tls=True) as address:
        connection = factory(address, tls=True).create_connection()
        told.set()

        wait_until(lambda: connection.failed)
        connection.close()


# -- a broker that stops reading -----------------------------------------------------


def never_read_again(client: Client) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connected()
    client.over.wait(30)


def test_stomp_py_blocks_for_ever_when_the_broker_stops_reading() -> None:
    with (
        plain_server(never_read_again) as address,
        plain_stomp(address, timeout=0.2) as link,
    ):
        link.connect(wait=True)

        sender = run_in_thread(lambda: link.send("/queue/x", b"x" * 50_000_000))
        sender.join(1.5)

        assert sender.is_alive()


def test_our_send_ends_by_its_deadline_when_the_broker_stops_reading() -> None:
    with plain_server(never_read_again) as address:
        connection = factory(address).create_connection()
        producer = connection.create_session().create_producer("x")

        with pytest.raises(jms.SendOutcomeUnknownError):
            producer.send(jms.Message(b"x" * 50_000_000), timeout=0.3)
        connection.link.lose("the test is over")
        connection.close()


# -- a server that accepts and says nothing ------------------------------------------


def say_nothing(client: Client) -> None:
    client.read_frame()
    client.over.wait(30)


def test_stomp_py_ignores_the_timeout_while_it_waits_for_connected() -> None:
    with (
        plain_server(say_nothing) as address,
        plain_stomp(address, timeout=0.2) as link,
    ):
        connecting = run_in_thread(lambda: link.connect(wait=True))
        connecting.join(1.5)

        assert connecting.is_alive()


def test_our_connect_ends_by_its_deadline() -> None:
    with (
        plain_server(say_nothing) as address,
        pytest.raises(jms.ConnectionFailedError, match=r"no CONNECTED within 0\.3 s"),
    ):
        factory(address, connect_timeout=0.3).create_connection()


def receipt_everything(client: Client) -> None:
    client.connected()
    client.receipt_everything()


# -- a receipt without an id ---------------------------------------------------------


def receipt_without_id(client: Client) -> None:
    client.connected()
    client.sock.sendall(b"RECEIPT\n\n\x00")
    client.receipt_everything()


def test_stomp_py_drops_the_connection_over_a_receipt_without_an_id() -> None:
    with plain_server(receipt_without_id) as address, plain_stomp(address) as link:
        with contextlib.suppress(stomp.exception.ConnectFailedException):
            link.connect(wait=True)

        wait_until(lambda: not link.is_connected())


def test_our_connection_ignores_a_receipt_without_an_id() -> None:
    with (
        plain_server(receipt_without_id) as address,
        factory(address).create_connection() as connection,
    ):
        connection.create_session().create_producer("x").send(jms.Message("x"))

        assert connection.ignored_receipts == 1


# -- the middle of a frame -----------------------------------------------------------


def half_a_frame_and_then_a_whole_one(client: Client) -> None:
    client.read_frame()
    client.sock.sendall(
        CONNECTED + b"MESSAGE\nsubscription:1\ncontent-length:9000\n\nhalf\x00"
    )
    client.read_frame()


def test_stomp_py_cannot_connect_again_after_it_left_in_the_middle_of_a_frame() -> None:
    with (
        plain_server(half_a_frame_and_then_a_whole_one) as address,
        plain_stomp(address) as link,
    ):
        link.connect(wait=True)
        wait_until(lambda: link.transport._BaseTransport__recvbuf)
        link.transport.disconnect_socket()
        link.transport.io_thread.join(10)

        again = run_in_thread(lambda: link.connect(wait=True))
        again.join(1.5)

        assert again.is_alive()


def test_our_factory_connects_again_after_a_connection_ended_in_a_frame() -> None:
    with plain_server(half_a_frame_and_then_a_whole_one) as address:
        maker = factory(address)
        maker.create_connection().link.lose("in the middle of a frame")

        again = maker.create_connection()

        assert not again.closed
        again.link.lose("the test is over")


# -- what is sent is what was said ---------------------------------------------------


def test_stomp_py_alters_text_that_it_cannot_encode() -> None:
    assert stomp.utils.encode("a\ud800b") == b"a?b"


def test_stomp_py_lets_a_header_name_inject_a_header() -> None:
    frame = stomp.utils.Frame("SEND", {"a:b\npersistent": "true"}, b"")

    assert b"persistent:true\n" in b"".join(stomp.utils.convert_frame(frame))


def test_our_producer_refuses_or_escapes_both() -> None:
    received: list[bytes] = []

    def serve(client: Client) -> None:
        client.connected()
        received.append(client.read_frame())

    with plain_server(serve) as address:
        connection = factory(address).create_connection()
        producer = connection.create_session().create_producer("x")
        with pytest.raises(jms.MessageFormatError):
            producer.send(jms.Message("a\ud800b"))

        producer.send_async(
            jms.Message("x", {"a:b\npersistent": "y"}), (lambda m: 0, lambda m, e: 0)
        )

        wait_until(lambda: received)
        assert b"\na\\cb\\npersistent:y\n" in received[0]
        connection.link.lose("the test is over")
        connection.close()


# -- an error in somebody's listener -------------------------------------------------


def test_stomp_py_drops_the_connection_over_an_error_in_a_listener() -> None:
    class Faulty(stomp.ConnectionListener):
        def on_receipt(self, frame: object) -> None:
            raise ValueError("a bug of the application")

    with plain_server(receipt_everything) as address, plain_stomp(address) as link:
        link.set_listener("faulty", Faulty())
        link.connect(wait=True)
        link.send("/queue/x", b"x", receipt="1")

        wait_until(lambda: not link.is_connected())


def test_our_connection_survives_an_error_in_a_listener(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def faulty(*_: object) -> None:
        raise ValueError("a bug of the application")

    with (
        plain_server(receipt_everything) as address,
        factory(address).create_connection() as connection,
    ):
        producer = connection.create_session().create_producer("x")
        producer.send_async(jms.Message("x"), (faulty, faulty))
        producer.send(jms.Message("y"))
        producer.close()

        assert not connection.failed

    assert "a bug of the application" in caplog.text


# -- TLS and a missing file ----------------------------------------------------------


def test_stomp_py_tries_for_ever_to_read_a_missing_ca_file() -> None:
    with plain_server(say_nothing) as address:
        link = stomp.Connection12(
            [address], reconnect_attempts_max=1, reconnect_sleep_max=0.1
        )
        link.set_ssl([address], ca_certs="/nowhere/ca.pem")

        connecting = run_in_thread(lambda: link.connect(wait=True))
        connecting.join(1.5)
        stuck = connecting.is_alive()
        link.transport.running = False
        connecting.join(10)

    assert stuck


def test_an_untrusted_certificate_is_refused_with_the_reason() -> None:
    with (
        plain_server(say_nothing, tls=True) as (host, port),
        pytest.raises(jms.ConnectionFailedError, match="certificate verify failed"),
    ):
        jms.ConnectionFactory(f"stomp+ssl://{host}:{port}").create_connection()


def test_a_certificate_for_another_name_is_refused_with_the_reason() -> None:
    with plain_server(say_nothing, tls=True) as (_, port):
        other = f"stomp+ssl://127.0.0.2:{port}?ca={CA}"
        with pytest.raises(jms.ConnectionFailedError, match=r"127\.0\.0\.2"):
            jms.ConnectionFactory(other).create_connection()


def test_a_users_own_tls_context_is_used() -> None:
    def serve(client: Client) -> None:
        client.connected()
        client.read_frame()

    context = ssl.create_default_context(cafile=CA)
    with plain_server(serve, tls=True) as (host, port):
        made = jms.ConnectionFactory(f"stomp+ssl://{host}:{port}", tls=context)
        connection = made.create_connection()
        assert not connection.closed
        connection.link.lose("the test is over")


# -- delay ---------------------------------------------------------------------------


def test_stomp_py_leaves_small_frames_to_nagle() -> None:
    def option(sock: socket.socket) -> int:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    with plain_server(lambda c: (c.connected(), c.read_frame())) as address:
        with plain_stomp(address) as link:
            link.connect(wait=True)
            assert option(link.transport.socket) == 0
        connection = factory(address).create_connection()
        assert option(connection.link.transport._socket) != 0
        connection.link.lose("the test is over")


# -- many sends from a callback over TLS ---------------------------------------------


def test_stomp_py_deadlocks_on_many_sends_from_a_listener_over_tls() -> None:
    finished = threading.Event()

    class Sender(stomp.ConnectionListener):
        def on_receipt(self, frame: object) -> None:
            for _ in range(5_000):
                link.send("/queue/x", b"x")
            finished.set()

    with (
        plain_server(receipt_everything, tls=True) as address,
        plain_stomp(address, tls=True) as link,
    ):
        link.set_listener("sender", Sender())
        link.connect(wait=True)
        link.send("/queue/x", b"x", receipt="1")

        assert not finished.wait(2.0)
        queue = link.transport.send_queue
        if queue is not None:  # free its thread
            queue._getsocket.close()


def test_our_callbacks_may_send_as_many_as_they_like_over_tls() -> None:
    done: list[str] = []

    def send_many(message: jms.Message) -> None:
        for _ in range(5_000):
            producer.send_async(jms.Message("x"), (lambda m: done.append("ok"), fail))

    def fail(message: jms.Message, error: jms.MessagingError) -> None:
        done.append(repr(error))

    with plain_server(receipt_everything, tls=True) as address:
        connection = factory(address, tls=True).create_connection()
        session = connection.create_session()
        producer = session.create_producer("x")
        producer.send_async(jms.Message("first"), (send_many, fail))
        session.drain(60)
        connection.close()

    assert done == ["ok"] * 5_000
