"""`--http`: clients that send their requests slowly keep no threads."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from django_txmsg.management.commands import _workers
from django_txmsg.management.commands._workers import HttpServer
from tests.faults import wait_until


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """A server that answers."""
    found = HttpServer("127.0.0.1:0", lambda within: "")
    with found.answering(sys.stderr):
        yield found


def begin_request(server: HttpServer) -> socket.socket:
    """Return a connection over which a part of a request was sent. The connection times
    out before the server stops to wait for the next byte."""
    connected = socket.create_connection(("127.0.0.1", server.server_port), 5)
    connected.sendall(b"GET /alive HTTP/1.0\r\nslow: ")
    return connected


def test_slow_request_ends(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_workers, "TIMEOUT", 0.1)
    with begin_request(server) as slow:
        assert slow.recv(100).startswith(b"HTTP/1.0 200")
    assert not server.reading


def test_many_slow_requests_end_the_oldest(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workers, "MOST", 2)
    with ExitStack() as stack:
        first = stack.enter_context(begin_request(server))
        wait_until(lambda: len(server.reading) == 1)
        for _ in range(2):
            stack.enter_context(begin_request(server))
        assert first.recv(100).startswith(b"HTTP/1.0 200")
        assert len(server.reading) == 2
