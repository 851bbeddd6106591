"""Brokers that run as a server: connecting, outages, TLS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Outgoing, Session
from django_txmsg.errors import BrokerUnavailable, DispatchUnknown
from django_txmsg.testing.broker_suite import SOON, bodies, take
from tests.faults import wait_until
from tests.proxy import ANSWERS, REQUESTS, Proxy
from tests.services import ByAmqp, free_port
from tests.services.certificates import Certificates
from tests.services.stomp_server import PASSWORD, USER, StompServer

from .conftest import Party

Open = Callable[[str], Session]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return a function that opens a session by URL. The sessions are closed at the end
    of the test."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(make_broker("tested", url).open())


def bodies_of(batch: list[Outgoing]) -> list[bytes]:
    return [one.body for one in batch]


def server_of(party: Party) -> Any:
    return party.server


def url_of(hosts: str, party: Party) -> str:
    scheme = server_of(party).url().partition(":")[0]
    return f"{scheme}://{USER}:{PASSWORD}@{hosts}"


@pytest.fixture
def proxy(served: Party) -> Iterator[Proxy]:
    """A proxy in front of the broker's server."""
    with Proxy(server_of(served).port) as proxy:
        yield proxy


# -- reaching it -------------------------------------------------------------------


def test_a_server_that_is_down_is_unavailable(served: Party) -> None:
    broker = served.broker(port=free_port())
    with pytest.raises(BrokerUnavailable) as raised:
        broker.open()
    assert PASSWORD not in str(raised.value)


def test_a_server_that_accepts_and_never_answers_is_unavailable(
    served: Party, proxy: Proxy
) -> None:
    proxy.hang()
    broker = served.broker(port=proxy.port, connect_timeout=1)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        broker.open()
    assert time.monotonic() - began < 10


def test_a_refused_password_is_tried_once_and_kept_secret(
    served: Party, proxy: Proxy
) -> None:
    broker = served.broker(port=proxy.port, password="not-the-password")
    with pytest.raises(BrokerUnavailable) as raised:
        broker.open()
    assert proxy.accepted == 1
    assert "not-the-password" not in str(raised.value)
    wait_until(lambda: proxy.connections == 0, message="the connection stays open")


def test_the_next_host_is_taken_when_the_first_is_down(
    served: Party, opened: Open, destination: str
) -> None:
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{server_of(served).port}"
    session = opened(url_of(hosts, served))
    assert session.send([Outgoing(destination, {}, b"x")]) == [None]
    assert served.rest(destination) == [b"x"]


def test_the_next_host_is_taken_when_the_first_goes_down(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    hosts = f"127.0.0.1:{proxy.port},127.0.0.1:{server_of(served).port}"
    url = url_of(hosts, served)
    first = opened(url)
    assert first.send([Outgoing(destination, {}, b"0")]) == [None]
    assert proxy.accepted == 1
    proxy.refuse()
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        first.ping()
    assert opened(url).send([Outgoing(destination, {}, b"1")]) == [None]
    assert served.rest(destination) == [b"0", b"1"]


def test_a_host_may_have_an_ipv6_address(
    served: Party, opened: Open, destination: str
) -> None:
    with Proxy(server_of(served).port, host="::1") as proxy:
        session = opened(url_of(f"[::1]:{proxy.port}", served))
        assert session.send([Outgoing(destination, {}, b"x")]) == [None]
        assert proxy.accepted == 1
    assert served.rest(destination) == [b"x"]


# -- TLS ---------------------------------------------------------------------------


def test_a_message_travels_over_tls(
    served: Party, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(tls=True))
    session.subscribe(destination, prefetch=100)
    batch = [Outgoing(destination, {"n": str(n)}, b"\0x" * 50_000) for n in range(40)]
    assert session.send(batch) == [None] * 40
    deliveries = take(session, 40)
    session.ack(deliveries)
    assert bodies(deliveries) == [one.body for one in batch]


def test_a_server_with_another_authority_is_not_trusted(
    served: Party, tmp_path: Path
) -> None:
    stranger = Certificates(tmp_path / "tls")
    broker = served.broker(tls=True, ca=str(stranger.authority))
    with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
        broker.open()


def test_a_server_of_another_name_is_not_trusted(served: Party) -> None:
    """The client trusts the authority, but the server's certificate is only for
    localhost and 127.0.0.1. A connection to another address is refused."""
    server = server_of(served)
    with Proxy(server.tls_port, host="127.0.0.2") as proxy:
        url = server.url(tls=True, port=proxy.port).replace("@127.0.0.1", "@127.0.0.2")
        with pytest.raises(BrokerUnavailable, match=r"(?i)certificate|mismatch"):
            make_broker("tested", url).open()


def test_a_server_that_ends_a_tls_connection_is_missed(
    served: Party, opened: Open
) -> None:
    with Proxy(server_of(served).tls_port) as proxy:
        session = opened(server_of(served).url(tls=True, port=proxy.port))
        session.ping()
        proxy.cut(reset=False)
        with pytest.raises(BrokerUnavailable):
            session.ping()


# -- losing it ---------------------------------------------------------------------


def test_messages_whose_receipts_are_lost_are_unknown_and_may_be_sent_again(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(port=proxy.port))
    batch = [Outgoing(destination, {}, str(n).encode()) for n in range(3)]
    # Some look for the queue first, once.
    assert session.send([Outgoing(destination, {}, b"first")]) == [None]
    proxy.lose(ANSWERS)
    with ThreadPoolExecutor(1) as pool, served.broker().open() as watcher:
        watcher.subscribe(destination, prefetch=4)
        sending = pool.submit(session.send, batch)
        take(watcher, 4)  # stored, their receipts swallowed: now the end
        proxy.cut()
        outcomes = sending.result(60)
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert isinstance(outcome, DispatchUnknown)
        assert outcome.written

    proxy.resume()
    again = opened(server_of(served).url(port=proxy.port))
    assert again.send(batch) == [None] * 3
    found = sorted(served.rest(destination))
    assert found == sorted([*bodies_of(batch) * 2, b"first"])


def test_a_batch_cut_in_the_middle_is_unknown_and_may_be_sent_again(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(port=proxy.port))
    batch = [Outgoing(destination, {}, b"%d " % n * 100) for n in range(300)]
    session.ping()
    proxy.cut_after(40_000, REQUESTS)
    outcomes = session.send(batch)
    assert any(isinstance(outcome, DispatchUnknown) for outcome in outcomes)
    proven = [m for m, o in zip(batch, outcomes, strict=True) if o is None]
    others = [m for m, o in zip(batch, outcomes, strict=True) if o is not None]
    again = opened(server_of(served).url(port=proxy.port))
    assert again.send(others) == [None] * len(others)

    found = served.rest(destination)
    assert set(found) == set(bodies_of(batch))
    assert len(found) >= len(batch)
    assert set(bodies_of(proven)) <= set(found)


def test_a_batch_after_the_connection_ended_was_not_written(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(port=proxy.port))
    proxy.refuse()
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        session.ping()
    try:
        outcomes = session.send([Outgoing(destination, {}, b"x")] * 5)
    except BrokerUnavailable:
        outcomes = []
    for outcome in outcomes:
        assert isinstance(outcome, DispatchUnknown)
        assert not outcome.written
    assert served.rest(destination) == []


def test_a_consumer_learns_that_its_connection_ended(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(port=proxy.port))
    session.subscribe(destination, prefetch=5)
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        session.receive(SOON)
    session.close()


def test_heartbeats_find_a_connection_that_hangs(
    served: Party, proxy: Proxy, opened: Open, destination: str
) -> None:
    session = opened(server_of(served).url(port=proxy.port, heartbeat="1"))
    session.subscribe(destination, prefetch=5)
    proxy.hang()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        session.receive(60)
    assert time.monotonic() - began < 30


def test_heartbeats_keep_idle_connections_alive(
    activemq: StompServer,
    rabbitmq: StompServer,
    rabbitmq_amqp: ByAmqp,
    opened: Open,
    destination: str,
) -> None:
    """A connection is idle for longer than the server would keep it without heartbeats.
    The connection still sends and receives afterwards."""
    servers = (activemq, rabbitmq, rabbitmq_amqp)
    sessions = [opened(server.url(heartbeat="3")) for server in servers]
    for session in sessions:
        session.subscribe(destination, prefetch=5)
    for session, patience in zip(sessions, (7.0, 0.1, 0.1), strict=True):
        assert session.receive(patience) is None
        assert session.send([Outgoing(destination, {}, b"x")]) == [None]
        deliveries = take(session, 1)
        session.ack(deliveries)
        assert bodies(deliveries) == [b"x"]


def test_a_ping_to_a_hanging_server_fails_in_time(
    served: Party, proxy: Proxy, opened: Open
) -> None:
    session = opened(server_of(served).url(port=proxy.port, close_timeout="1"))
    proxy.hang()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        session.ping()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "served",
    ["activemq", pytest.param("rabbitmq", marks=pytest.mark.matrix), "rabbitmq_amqp"],
    indirect=True,
)
def test_confirmed_messages_survive_a_killed_server(
    served: Party, destination: str
) -> None:
    server = server_of(served)
    served.send(Outgoing(destination, {}, b"first"))
    if served.name.startswith("rabbitmq"):
        # It writes a new queue's own entry to disk a moment after its messages.
        server.restart()
    batch = [Outgoing(destination, {}, str(n).encode()) for n in range(200)]
    session = served.open()
    assert session.send(batch) == [None] * 200
    server.kill()
    with pytest.raises(BrokerUnavailable):
        served.broker().open()
    with pytest.raises(BrokerUnavailable):
        session.ping()
    server.start()
    assert sorted(served.rest(destination)) == sorted([b"first", *bodies_of(batch)])
