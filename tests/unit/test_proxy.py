"""Each fault of the proxy works on a real connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.faults import ANSWERS, REQUESTS, Proxy, wait_until


@pytest.fixture
def echo_port() -> Iterator[int]:
    """The port of a server that sends back all bytes that it receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while piece := connection.recv(1024):
                    connection.sendall(piece)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(
                        target=answer, args=[connection], daemon=True
                    ).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[Proxy]:
    with Proxy(echo_port) as proxy:
        yield proxy


def connect(proxy: Proxy, *, timeout: float = 10.0) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout)


def echo(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return connection.recv(1024)


def test_it_forwards_both_ways(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echo(client, b"hello") == b"hello"
        assert proxy.connections == proxy.accepted == 1
        assert proxy.forwarded == {REQUESTS: 5, ANSWERS: 5}
    wait_until(lambda: proxy.connections == 0)


def test_cut_breaks_open_connections_and_welcomes_new_ones(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echo(client, b"a") == b"a"

        proxy.cut()

        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with connect(proxy) as client:
        assert echo(client, b"b") == b"b"


def test_cut_in_good_order_is_an_end_of_stream(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echo(client, b"a") == b"a"

        proxy.cut(reset=False)

        assert client.recv(1) == b""


def test_cut_after_lets_exactly_that_much_through(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.cut_after(3)
        client.sendall(b"abcdef")

        with contextlib.suppress(ConnectionResetError):
            while client.recv(1024):
                pass
    assert proxy.forwarded[REQUESTS] == 3


def test_hang_holds_bytes_until_resume(proxy: Proxy) -> None:
    with connect(proxy, timeout=0.3) as client:
        assert echo(client, b"a") == b"a"
        proxy.hang()
        client.sendall(b"late")
        with pytest.raises(TimeoutError):
            client.recv(1024)

        proxy.resume()

        client.settimeout(10)
        assert client.recv(1024) == b"late"


def test_lose_swallows_answers_to_requests_that_arrived(proxy: Proxy) -> None:
    with connect(proxy, timeout=0.3) as client:
        proxy.lose(ANSWERS)
        client.sendall(b"stored")
        wait_until(lambda: proxy.forwarded[REQUESTS] == 6)
        with pytest.raises(TimeoutError):
            client.recv(1024)

        proxy.resume()

        client.settimeout(10)
        assert echo(client, b"next") == b"next"


def test_delay_holds_every_piece_back(proxy: Proxy) -> None:
    with connect(proxy, timeout=0.2) as client:
        proxy.delay(0.5)
        client.sendall(b"slow")
        with pytest.raises(TimeoutError):
            client.recv(1024)

        client.settimeout(10)
        assert client.recv(1024) == b"slow"


def test_refuse_turns_new_connections_away_and_accept_takes_them(
    proxy: Proxy,
) -> None:
    with connect(proxy) as old:
        assert echo(old, b"a") == b"a"
        proxy.refuse()

        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert echo(old, b"b") == b"b"

    proxy.accept()
    with connect(proxy) as client:
        assert echo(client, b"c") == b"c"
