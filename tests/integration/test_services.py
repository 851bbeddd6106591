"""The servers that the tests start keep their data and their port after a kill and a
restart."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from django_txmsg import jms
from tests import conftest, services
from tests.faults import wait_until
from tests.services import free_port
from tests.services.stomp_server import ALLOWED, LIMITED_USER, StompServer


@pytest.fixture(params=["activemq", "rabbitmq"])
def stomp_server(request: pytest.FixtureRequest) -> StompServer:
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def session(url: str) -> Iterator[jms.Session]:
    with (
        jms.ConnectionFactory(url).create_connection() as connection,
        connection.create_session(transacted=False) as opened,
    ):
        yield opened


def test_killed_postgresql_keeps_committed_data(
    postgres: services.PostgreSQL,
) -> None:
    url = postgres.create_database("killed")
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS number")

    postgres.kill()
    assert not postgres.running
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url, connect_timeout=5)
    postgres.start()

    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(42,)]


def test_killed_broker_keeps_confirmed_messages(
    stomp_server: StompServer, destination: str
) -> None:
    def send(body: str) -> None:
        with session(stomp_server.url()) as opened:
            opened.create_producer(destination).send(jms.Message(body=body))

    send("early")
    if isinstance(stomp_server, services.RabbitMQ):
        # It writes a new queue's own entry to disk a moment after its messages.
        stomp_server.restart()
    send("kept")

    stomp_server.kill()
    assert not stomp_server.running
    with pytest.raises(jms.ConnectionFailedError):
        jms.ConnectionFactory(stomp_server.url()).create_connection()
    stomp_server.start()

    with session(stomp_server.url()) as opened:
        consumer = opened.create_consumer(destination)
        for body in ("early", "kept"):
            received = consumer.receive(timeout=30)
            assert received is not None
            assert received.body == body
            opened.acknowledge(received, wait=True)


def test_a_broker_speaks_tls_under_the_authority_of_the_run(
    stomp_server: StompServer, destination: str
) -> None:
    with session(stomp_server.url(tls=True)) as opened:
        opened.create_producer(destination).send(jms.Message(body="secret"))
        received = opened.create_consumer(destination).receive(timeout=30)
        assert received is not None
        opened.acknowledge(received, wait=True)


def test_a_broker_wants_the_password(
    stomp_server: StompServer, caplog: pytest.LogCaptureFixture
) -> None:
    factory = jms.ConnectionFactory(stomp_server.url(password="wrong"))

    with pytest.raises(
        jms.ConnectionFailedError,
        match="Check the URL's port, user, password",
    ):
        factory.create_connection()
    # The exception is enough: no log line repeats it, and none warns about the kind of
    # broker, which is still unknown.
    assert caplog.messages == []


def test_the_limited_user_may_send_to_allowed_names_alone(
    stomp_server: StompServer, destination: str
) -> None:
    with session(stomp_server.url(user=LIMITED_USER)) as opened:
        opened.create_producer(ALLOWED + destination).send(jms.Message(body="fine"))
        with pytest.raises(jms.MessagingError):
            opened.create_producer(destination).send(jms.Message(body="refused"))


ORPHAN = """
import threading
from tests.services import PostgreSQL
server = PostgreSQL()
server.start()
print(server.process.pid, server.directory, flush=True)
threading.Event().wait()
"""


@pytest.mark.usefixtures("postgres")  # skips, or fails, where it is not installed
def test_a_server_ends_when_the_process_that_started_it_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid, directory = parent.stdout.readline().split()
    assert psutil.pid_exists(int(pid))

    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait(30)

    wait_until(lambda: not psutil.pid_exists(int(pid)), message="PostgreSQL's end")
    wait_until(lambda: not Path(directory).exists(), message="its directory's end")


PORTS = """
import random
from tests.services import free_port
random.seed(1)
print(*(free_port() for _ in range(120)))
"""


def test_a_process_is_never_given_the_ports_of_another() -> None:
    random.seed(1)  # like the other: runs with one seed draw the same numbers
    ours = {free_port() for _ in range(120)}

    said = subprocess.check_output(
        [sys.executable, "-c", PORTS], cwd=Path(__file__).parents[2], text=True
    )
    theirs = {int(port) for port in said.split()}

    assert len(ours) == len(theirs) == 120
    assert not ours & theirs


class Leader(services.Server):
    """A server whose process starts another process, like a wrapper script."""

    name = "leader"

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        return {}

    def prepare(self) -> None:
        """Do nothing."""

    def launch(self) -> subprocess.Popen[bytes]:
        (self.directory / "other").unlink(missing_ok=True)
        return self.spawn(["sh", "-c", "sleep 600 & echo $! > other; wait"])

    def ready(self) -> bool:
        return self.other() != ""

    def other(self) -> str:
        said = self.directory / "other"
        return said.read_text() if said.exists() else ""


def test_a_server_that_ended_by_itself_says_so_and_leaves_nothing_to_the_next(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = Leader()
    server.start()
    assert server.process is not None
    server.process.kill()
    server.process.wait(30)
    other = int(server.other())
    assert psutil.pid_exists(other)

    server.start()

    assert "leader ended by itself, -9" in capfd.readouterr().err
    wait_until(lambda: not psutil.pid_exists(other), message="the other's end")
    assert psutil.pid_exists(int(server.other()))
    server.remove()


class NotInstalled(services.Server):
    """A server whose program is not installed on any machine."""

    name = "nosuchserver"
    debian_packages = "nosuchserver-common"

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        return {"nosuchserver": None}


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_a_missing_server_skips_at_home_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="apt-get install nosuchserver-common"):
        conftest.ask_for(NotInstalled)
