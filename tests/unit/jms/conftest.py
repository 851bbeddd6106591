"""Scripted brokers, connections to them, and a listener that records its calls."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import Profile, ScriptedBroker

DESTINATION = "orders.place"
ADDRESS = "/queue/orders.place"


class Listener:
    """A completion listener that records its calls, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: The body of each message told about, and the error or ``None``.
        self.told: list[tuple[Any, jms.MessagingError | None]] = []
        self.threads: list[threading.Thread] = []

    def on_completion(self, message: jms.Message) -> None:
        self._tell(message, None)

    def on_exception(self, message: jms.Message, error: jms.MessagingError) -> None:
        self._tell(message, error)

    def _tell(self, message: jms.Message, error: jms.MessagingError | None) -> None:
        with self._changed:
            self.told.append((message.body, error))
            self.threads.append(threading.current_thread())
            self._changed.notify_all()

    @property
    def bodies(self) -> list[Any]:
        with self._changed:
            return [body for body, _ in self.told]

    @property
    def errors(self) -> list[jms.MessagingError | None]:
        with self._changed:
            return [error for _, error in self.told]

    def wait_for(self, count: int, timeout: float = 30.0) -> list[Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.told) >= count, timeout):
                raise AssertionError(f"told only {self.told} of {count}")
        return self.bodies


class Gate(Listener):
    """A listener whose callbacks wait until the test opens this gate."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.open = threading.Event()

    def _tell(self, message: jms.Message, error: jms.MessagingError | None) -> None:
        self.entered.set()
        assert self.open.wait(30)
        super()._tell(message, error)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    """Return a function that creates scripted brokers. At the end, the test fails if a
    client has violated STOMP."""
    with contextlib.ExitStack() as stack:
        made: list[ScriptedBroker] = []

        def make(profile: Profile | str = "classic", **options: Any) -> ScriptedBroker:
            broker = stack.enter_context(ScriptedBroker(profile, **options))
            made.append(broker)
            return broker

        yield make
        for broker in made:
            assert broker.violations == []


@pytest.fixture
def broker(scripted: Callable[..., ScriptedBroker]) -> ScriptedBroker:
    """A scripted broker that behaves like ActiveMQ Classic."""
    return scripted()


@pytest.fixture
def connect() -> Iterator[Callable[..., jms.Connection]]:
    """Return a function that creates connections. At the end, waiting threads are
    released, and the connections are closed."""
    made: list[jms.Connection] = []

    def make(to: ScriptedBroker, **options: Any) -> jms.Connection:
        factory = jms.ConnectionFactory(to.url, **{"send_timeout": 30, **options})
        made.append(factory.create_connection())
        return made[-1]

    yield make
    for connection in made:
        connection.link.lose("the test is over")
        connection.close()


@pytest.fixture
def session(
    broker: ScriptedBroker, connect: Callable[..., jms.Connection]
) -> jms.Session:
    """A session on the fixture `broker`."""
    return connect(broker).create_session()


@pytest.fixture
def producer(session: jms.Session) -> jms.MessageProducer:
    """A producer of the fixture `session`, bound to a queue."""
    return session.create_producer(DESTINATION)


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Dump the stacks of all threads if a test seems to hang."""
    faulthandler.dump_traceback_later(60, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def ours() -> set[threading.Thread]:
    """Return the threads of `django_txmsg.jms`, without the threads of other tests."""
    return {one for one in threading.enumerate() if one.name.startswith("jms-")}
