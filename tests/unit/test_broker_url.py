"""The URL of a broker may list several hosts and IPv6 addresses, on every Python
version."""

from __future__ import annotations

import io
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pprint import pformat
from typing import Any

import pytest
from django.core.management import call_command
from django.test import RequestFactory
from django.views.debug import ExceptionReporter, get_default_exception_reporter_filter

from django_txmsg import conf
from django_txmsg.brokers import make_broker
from django_txmsg.envelope.broker_url import (
    BrokerUrl,
    ConnectionOptions,
    connect,
    split_url,
)
from django_txmsg.errors import BrokerUnavailable
from tests.faults import ManageProcess


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("database://", ("database", "", "", "")),
        ("database://other?lease=3", ("database", "other", "", "lease=3")),
        ("stomp://u:p@h1,h2:2/x", ("stomp", "u:p@h1,h2:2", "/x", "")),
        ("stomp+ssl://[::1]:5?vhost=/", ("stomp+ssl", "[::1]:5", "", "vhost=/")),
        # Newer releases of Python refuse this to urllib.parse.urlsplit.
        ("stomp://[::1],[fe80::2]:7?a=b", ("stomp", "[::1],[fe80::2]:7", "", "a=b")),
        ("stomp://h,[::1]#x", ("stomp", "h,[::1]", "", "")),
        ("nonsense", ("", "", "nonsense", "")),
    ],
)
def test_the_parts_of_a_url(url: str, parts: tuple[str, str, str, str]) -> None:
    split = split_url(url)

    assert (split.scheme, split.netloc, split.path, split.query) == parts
    assert split.geturl() == url or url == "database://"


@pytest.mark.parametrize("url", ["stomp://[::1", "stomp://u:p@h]:1?x=[", "stomp://]"])
def test_brackets_that_do_not_match_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        split_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("stomp://shop:TopSecret1@mq:61613", "stomp://shop:***@mq:61613"),
        ("stomp://shop:Top@Secret1@mq", "stomp://shop:***@mq"),
        ("stomp://shop:Top/Secret1@mq", "stomp://shop:***@mq"),
        ("stomp://shop:Top?Secret1@mq?vhost=/", "stomp://shop:***@mq?vhost=/"),
        (
            "stomp://mq?user=shop&password=TopSecret1",
            "stomp://mq?user=shop&password=***",
        ),
        ("stomp://shop@mq", "stomp://shop@mq"),
        ("shop:TopSecret1@mq:61613", "shop:***@mq:61613"),
        ("stomp:/shop:TopSecret1@mq", "stomp:***@mq"),
        ("nonsense", "nonsense"),
        ("sb://mq?SharedAccessKey=TopSecret1", "sb://mq?SharedAccessKey=***"),
        ("stomp+ssl://mq?key=mq.pem", "stomp+ssl://mq?key=mq.pem"),
        ("stomp://[::1]:61613,[::2]:61613", "stomp://[::1]:61613,[::2]:61613"),
        ("database://other?lease=30", "database://other?lease=30"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    secret = BrokerUrl(url)

    assert repr(secret) == repr(shown)
    assert secret == url
    assert f"{secret}" == str(secret) == url


@pytest.mark.parametrize("scheme", ["amqp", "stomp"])
@pytest.mark.parametrize(
    "url",
    [
        "shop:Top/Secret1@mq", "shop:Top?Secret1@mq", "shop:Top#Secret1@mq",
        "shop:123/Secret1@mq", "shop:Top@x/Secret1@mq",
    ],
)  # fmt: skip
def test_a_password_that_was_not_encoded_is_in_no_error(scheme: str, url: str) -> None:
    """A password contains a character that should have been encoded. No error shows a
    part of the password."""
    broker = make_broker("tested", f"{scheme}://{url}")
    (wrong,) = broker.check()
    assert not any(part in wrong for part in ("Top", "123", "Secret1"))
    with pytest.raises(BrokerUnavailable) as raised:
        broker.open()
    assert not any(part in str(raised.value) for part in ("Top", "123", "Secret1"))


@pytest.mark.parametrize(
    "option", ["connect_timeout=inf", "send_timeout=1e12", "heartbeat=65536"]
)
def test_too_large_an_option_is_refused(option: str) -> None:
    (wrong,) = make_broker("tested", f"amqp://mq?{option}").check()
    assert "too large" in wrong


def test_the_debug_page_and_its_likes_show_no_password(settings: Any) -> None:
    url = "stomp://shop:TopSecret1@mq:61613"
    settings.TXMSG = {"SERVICE": "shop", "BROKERS": {"default": {"URL": url}}}

    hidden = get_default_exception_reporter_filter()
    shown = hidden.get_safe_settings()["TXMSG"]
    out = io.StringIO()
    call_command("diffsettings", stdout=out)

    assert conf.get().BROKERS["default"]["URL"] == url
    for text in (pformat(shown), repr(conf.get()), str(shown), out.getvalue()):
        assert "TopSecret1" not in text
        assert "stomp://shop:***@mq:61613" in text


def failed() -> Any:
    """Return an error whose traceback has the brokers' settings among its local
    variables."""
    try:
        brokers = conf.get().BROKERS
        raise RuntimeError(len(brokers), [one["URL"] for one in brokers.values()])
    except RuntimeError:
        return sys.exc_info()


def test_an_error_page_shows_no_password(settings: Any, rf: RequestFactory) -> None:
    settings.DEBUG = True
    url = "stomp://shop:TopSecret1@mq:61613"
    settings.TXMSG = {"BROKERS": {"default": {"URL": url}}}

    reporter = ExceptionReporter(rf.get("/"), *failed())

    for text in (reporter.get_traceback_html(), reporter.get_traceback_text()):
        assert "TopSecret1" not in text
        assert "shop:***@mq" in text


def test_a_process_hides_them_from_its_start(
    manage: Callable[..., ManageProcess],
) -> None:
    text = manage(
        "diffsettings",
        txmsg={"BROKERS": {"default": {"URL": "stomp://shop:TopSecret1@mq:61613"}}},
    ).succeed()

    assert "shop:***@mq" in text
    assert "TopSecret1" not in text


def silent_address(stack: ExitStack) -> tuple[str, int]:
    """Return an address that accepts no connection, because its backlog is full."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):  # in the queue of connections, which then is full
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(silent.getsockname())
    address: tuple[str, int] = silent.getsockname()
    return address


def connected(
    addresses: list[tuple[str, int]], patch: pytest.MonkeyPatch, seconds: float
) -> socket.socket:
    """Connect to a host with these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", one) for one in addresses]
    patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    options = ConnectionOptions(connect_timeout=seconds)
    return connect(("many", 1), options, time.monotonic() + seconds)


def test_a_silent_address_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        silent = silent_address(stack)
        second = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        made = connected([silent, second.getsockname()], monkeypatch, 2.0)
        stack.enter_context(made)

        assert made.getpeername() == second.getsockname()


def test_time_that_refusing_addresses_leave_is_left_to_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        refusing = stack.enter_context(socket.socket())
        refusing.bind(("127.0.0.1", 0))  # it does not listen
        addresses = [*7 * [refusing.getsockname()], silent_address(stack)]
        began = time.monotonic()

        with pytest.raises(TimeoutError):
            connected(addresses, monkeypatch, 1.0)

        assert time.monotonic() - began > 0.9


def test_a_host_without_an_address_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OSError, match="no address"):
        connected([], monkeypatch, 1.0)
