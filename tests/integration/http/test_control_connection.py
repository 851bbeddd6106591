"""Many requests use one session with the broker at the same time, and each gets its own
outcome."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.test import override_settings

from django_txmsg import wire
from django_txmsg.brokers.base import Outgoing
from django_txmsg.errors import BrokerError, BrokerUnavailable, DestinationUnavailable
from django_txmsg.http_outbox import control_connection
from django_txmsg.http_outbox.control_connection import Channel, control_channel
from tests.faults import ANSWERS, Proxy, wait_until
from tests.running import drained
from tests.services import ActiveMQ, ByAmqp
from tests.services.stomp_server import LIMITED_USER

THREADS = 6


@pytest.fixture
def proxy(activemq: ActiveMQ) -> Iterator[Proxy]:
    with Proxy(activemq.port) as between:
        yield between


@pytest.fixture
def together(activemq: ActiveMQ, proxy: Proxy) -> Iterator[Channel]:
    brokers = {"default": {"URL": activemq.url(port=proxy.port)}}
    with override_settings(TXMSG={"SERVICE": "a", "BROKERS": brokers}):
        yield control_channel()
        control_connection.close_channels()


def send_all(
    together: Channel, messages: list[Outgoing], meanwhile: Callable[[], None]
) -> list[BrokerError | None]:
    """Send each message from its own thread, call `meanwhile`, and return the
    exceptions."""
    ready = threading.Barrier(len(messages) + 1)

    def send(one: Outgoing) -> BrokerError | None:
        ready.wait(30)
        try:
            together.send(one)
        except BrokerError as error:
            return error
        return None

    with ThreadPoolExecutor(len(messages)) as pool:
        outcomes = [pool.submit(send, one) for one in messages]
        ready.wait(30)
        meanwhile()
        return [one.result(60) for one in outcomes]


def outgoing(destination: str, number: int, size: int = 10) -> Outgoing:
    headers = {wire.MESSAGE_ID: f"m-{number}", wire.CONTENT_TYPE: wire.BYTES}
    return Outgoing(destination, headers, b"x" * size)


def arrived(destination: str) -> list[str]:
    return [one.headers[wire.MESSAGE_ID] for one in drained(destination)]


def test_all_threads_share_one_connection(together, proxy, destination) -> None:
    messages = [outgoing(destination, number) for number in range(THREADS)]
    together.send(outgoing(destination, 99))
    proxy.hang(ANSWERS)
    outcomes = send_all(together, messages, proxy.resume)
    assert outcomes == [None] * THREADS
    assert proxy.accepted == 1
    expected = [one.headers[wire.MESSAGE_ID] for one in messages]
    assert sorted(arrived(destination)) == sorted([*expected, "m-99"])


def test_after_a_cut_all_threads_change_to_one_new_connection(
    together, proxy, destination
) -> None:
    messages = [outgoing(destination, number) for number in range(THREADS)]
    together.send(outgoing(destination, 99))
    proxy.hang(ANSWERS)

    def cut() -> None:
        proxy.cut()
        proxy.resume()

    outcomes = send_all(together, messages, cut)
    assert outcomes == [None] * THREADS
    expected = {one.headers[wire.MESSAGE_ID] for one in messages}
    # One that was on its way at the cut has arrived, and was sent again.
    assert set(arrived(destination)) == expected | {"m-99"}
    assert proxy.accepted == 3  # the first, the next, and arrived()'s own


def test_refused_control_message_fails_only_its_own_request(
    activemq, destination
) -> None:
    allowed = f"allowed.{destination}"
    brokers = {"default": {"URL": activemq.url(user=LIMITED_USER)}}
    with override_settings(TXMSG={"SERVICE": "a", "BROKERS": brokers}):
        limited = control_channel()
        for _ in range(3):
            good = [outgoing(allowed, number) for number in range(THREADS)]
            # ActiveMQ answers this with an ERROR, and hangs up.
            messages = [*good, outgoing("forbidden", 99)]
            *outcomes, refused = send_all(limited, messages, lambda: None)
            assert outcomes == [None] * THREADS
            assert isinstance(refused, DestinationUnavailable)
        control_connection.close_channels()


def test_refused_control_message_keeps_the_connection(rabbitmq, destination) -> None:
    with Proxy(rabbitmq.amqp_port) as proxy:
        url = ByAmqp(rabbitmq).url(port=proxy.port, user=LIMITED_USER)
        brokers = {"default": {"URL": url}}
        with override_settings(TXMSG={"SERVICE": "a", "BROKERS": brokers}):
            for number in range(3):
                with pytest.raises(DestinationUnavailable):
                    control_channel().send(outgoing(f"forbidden.{destination}", number))
            control_connection.close_channels()
        assert proxy.accepted == 1


def test_interrupted_send_does_not_block_the_others(
    together, proxy, destination
) -> None:
    together.send(outgoing(destination, 99))
    proxy.hang(ANSWERS)

    def interrupt(*_: object) -> None:
        raise TimeoutError

    with ThreadPoolExecutor() as pool:
        leader = pool.submit(together.send, outgoing(destination, 1))
        wait_until(lambda: together.leader is not None)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError):
            together.send(outgoing(destination, 2))
        signal.signal(signal.SIGALRM, before)
        follower = pool.submit(together.send, outgoing(destination, 3))
        proxy.resume()
        assert (leader.result(60), follower.result(60)) == (None, None)
    together.send(outgoing(destination, 4))
    assert sorted(arrived(destination)) == ["m-1", "m-3", "m-4", "m-99"]


def test_outage_is_reported_to_each_sender(together, proxy, destination) -> None:
    messages = [outgoing(destination, number) for number in range(THREADS)]
    proxy.refuse()
    outcomes = send_all(together, messages, lambda: None)
    assert all(isinstance(one, BrokerUnavailable) for one in outcomes)
    proxy.accept()

    def works() -> bool:
        try:
            together.send(messages[0])
        except BrokerUnavailable:
            return False
        return True

    wait_until(works)


def test_two_silent_hosts_cost_a_request_its_timeout_and_no_more(destination) -> None:
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        hosts = ",".join(f"localhost:{each.getsockname()[1]}" for each in (one, other))
        url = f"stomp://{hosts}?connect_timeout=60&dialect=activemq"
        settings = {
            "SERVICE": "a",
            "BROKERS": {"default": {"URL": url}},
            "HTTP": {"CONTROL_TIMEOUT": 0.5},
        }
        with override_settings(TXMSG=settings):
            silent = control_channel()
            messages = [outgoing(destination, number) for number in range(THREADS)]
            began = time.monotonic()
            outcomes = send_all(silent, messages, lambda: None)
            took = time.monotonic() - began
            assert all(isinstance(error, BrokerError) for error in outcomes)
            assert 0.5 <= took < 30
            control_connection.close_channels()
    # With the hosts gone, so is who was still connecting to them.
    wait_until(lambda: silent.leader is None)


def test_a_silent_host_does_not_hide_the_next(activemq, destination) -> None:
    with socket.create_server(("localhost", 0)) as silent:
        first = f"localhost:{silent.getsockname()[1]},"
        url = activemq.url().replace("@", f"@{first}")
        settings = {"SERVICE": "a", "BROKERS": {"default": {"URL": url}}}
        with override_settings(TXMSG=settings):
            control_channel().send(outgoing(destination, 1))
            control_connection.close_channels()
