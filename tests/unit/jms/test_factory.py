"""A connection URL gives addresses and options, or an error that helps."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from django_txmsg import jms


def test_a_url_gives_host_port_credentials_and_options() -> None:
    factory = jms.ConnectionFactory(
        "stomp://us%40er:p%2Fw%3A@mq.example:61000?vhost=/&dialect=rabbitmq&heartbeat=5"
    )

    assert factory.addresses == [("mq.example", 61000)]
    assert factory.options.user == "us@er"
    assert factory.options.password == "p/w:"
    assert factory.options.vhost == "/"
    assert factory.options.dialect == "rabbitmq"
    assert factory.options.heartbeat == 5.0


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("h1:1,h2:2", [("h1", 1), ("h2", 2)]),
        ("h1,h2", [("h1", 61613), ("h2", 61613)]),
        ("[::1]:5", [("::1", 5)]),
        ("[::1],[fe80::2%25eth0]:7", [("::1", 61613), ("fe80::2%eth0", 7)]),
    ],
)
def test_hosts_are_tried_in_their_order(
    hosts: str, addresses: list[tuple[str, int]]
) -> None:
    assert jms.ConnectionFactory(f"stomp://{hosts}").addresses == addresses


def test_tls_verifies_unless_a_context_of_the_users_own_says_otherwise() -> None:
    import ssl

    factory = jms.ConnectionFactory("stomp+ssl://h")

    assert factory.addresses == [("h", 61614)]
    assert factory.options.tls is not None
    assert factory.options.tls.verify_mode is ssl.CERT_REQUIRED
    assert factory.options.tls.check_hostname is True


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("amqp://h", "starts with"),
        ("stomp://:61613", "not a host and port"),
        ("stomp://h:port", "not a host and port"),
        ("stomp://h:70000", "not a host and port"),
        ("stomp://::1", "brackets"),
        ("stomp://[::1", "not a broker URL"),
        ("stomp://h/vhost", "vhost=NAME"),
        ("stomp://h?heartbeet=1", "Did you mean 'heartbeat'"),
        ("stomp://h?heartbeat=often", "heartbeat"),
        ("stomp://h?heartbeat=-1", "heartbeat"),
        ("stomp://h?send_timeout=0", "send_timeout"),
        ("stomp://h?dialect=kafka", "known are activemq"),
        ("stomp://h?in_atomic=maybe", "in_atomic"),
        ("stomp://h?ca=/x", "stomp+ssl"),
    ],
)
def test_a_wrong_url_is_a_value_error_that_says_why(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        jms.ConnectionFactory(url)


@pytest.mark.parametrize("url", ["amqp://u:secret@h", "stomp://u:secret@[::1"])
def test_no_error_and_no_repr_shows_the_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"h|::1") as caught:
        jms.ConnectionFactory(url)
    factory = jms.ConnectionFactory("stomp://u:secret@h")

    assert "secret" not in str(caught.value)
    assert "secret" not in repr(factory) + repr(factory.options)


def test_a_missing_certificate_file_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        jms.ConnectionFactory("stomp+ssl://h?ca=/nowhere/ca.pem")


def test_the_client_is_usable_without_django() -> None:
    program = (
        "import sys, django_txmsg.jms as jms; "
        "jms.ConnectionFactory('stomp://h'); "
        "assert not any(name.split('.')[0] == 'django' for name in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_importing_it_asks_no_name_server() -> None:
    program = (
        "import os, socket; "
        "socket.gethostbyname = socket.getfqdn = lambda *a: 1 / 0; "
        "import django_txmsg.jms, stomp.utils; "
        "assert stomp.utils.LOCALHOST_NAMES == ['localhost', '127.0.0.1']; "
        "assert 'STOMP_SKIP_HOSTNAME_SCAN' not in os.environ"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_password_with_a_line_break_is_an_error_of_the_url_that_hides_it() -> None:
    with pytest.raises(ValueError, match="line break") as caught:
        jms.ConnectionFactory("stomp://me:se%0Acret@h")

    assert "cret" not in str(caught.value)


def test_encrypted_key_prompts_for_no_password(tmp_path: Path) -> None:
    make = "req -x509 -newkey rsa:2048 -subj /CN=me -days 1 -passout pass:secret"
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", *make.split(), "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    url = f"stomp+ssl://h?cert={cert}&key={key}"

    with pytest.raises(OSError, match=r"(?i)decrypt|password|PEM"):
        jms.ConnectionFactory(url)

    factory = jms.ConnectionFactory(f"{url}&key_password=secret")
    assert "secret" not in repr(factory.options)


def test_a_host_with_several_addresses_has_one_timeout_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No address of the host accepts a connection, because each backlog is full. One
    timeout covers the tries at all addresses."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(4):  # in the queue of connections, which then is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        found = [address] * 100
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        factory = jms.ConnectionFactory("stomp://many", connect_timeout=0.2)
        began = time.monotonic()

        with pytest.raises(jms.ConnectionFailedError, match="timed out"):
            factory.create_connection()

    assert time.monotonic() - began < 15  # and not a hundred times 0.2
