"""The states in which the tests stop a `relay`, `consume` or `run` process.

Each state is a context manager. It starts the process, and waits until the process is
certainly in the state. On exit, the context manager repairs the system.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from django.db import connection, transaction

from django_txmsg import stages, wire
from django_txmsg.brokers import get_broker
from django_txmsg.dead_letters import bulk, burial
from django_txmsg.envelope.failure import Failure
from django_txmsg.envelope.message import Message, new_id
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.http_outbox.control_message import ControlMessage
from django_txmsg.management.commands import _workers
from django_txmsg.models import BulkOperation, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_messages
from tests.app.models import Effect
from tests.faults import ANSWERS, REQUESTS, ManageProcess, Proxy, wait_until
from tests.running import IMPATIENT, ship, txmsg
from tests.services import ActiveMQ, PostgreSQL, free_port

Manage = Callable[..., ManageProcess]
#: Messages on their way in each state.
COUNT = 6


def declare() -> None:
    """Declare a stage that behaves as the test has set in STOP_SCRIPT."""
    _workers.PATIENCE = 4.0
    script = json.loads(os.environ["STOP_SCRIPT"])
    go = Path(script["go"])
    pause = threading.Event()

    def handler(message: Message) -> None:
        Effect.objects.create(name=script["name"], message_id=str(message.id))
        if message.body == script.get("fork_at"):
            child = multiprocessing.get_context("fork").Process(target=signal.pause)
            child.start()
            child.terminate()
            child.join()
            print(f"the child ended: {child.exitcode}", flush=True)  # noqa: T201
        if message.body == script.get("hold_at"):
            print("in the handler", flush=True)  # noqa: T201 - the test waits for it
            while not go.exists():
                pause.wait(0.05)
        if script.get("fail") and not go.exists():
            print("the handler fails", flush=True)  # noqa: T201
            raise RuntimeError("as the test says")

    policy = RedeliveryPolicy(**script.get("redelivery", {}))
    stages.stage(script["destination"], redelivery=policy, **script.get("options", {}))(
        handler
    )
    signal.signal(signal.SIGUSR1, hang)


def hang(number: int, frame: object) -> None:
    """Let the main thread wait in C for ever, as for a name server that is silent: it
    runs no signal handler any more."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    print("the main thread hangs", flush=True)  # noqa: T201 - the test waits for it
    library.pthread_mutex_lock(mutex)


class World:
    """The process under test, with its messages, its broker and its database."""

    def __init__(
        self, manage: Manage, directory: Path, destination: str, stack: ExitStack
    ) -> None:
        self._manage, self.stack = manage, stack
        self.destination, self.go = destination, directory / "go"
        self.url = "database://?poll=0.05&lease=3"
        self.postgres: PostgreSQL | None = None
        self.activemq: ActiveMQ | None = None
        self.stored = 0
        self.script: dict[str, Any] = {
            "destination": destination,
            "name": destination,
            "go": str(self.go),
        }
        self.process: ManageProcess

    def settings(self, url: str = "") -> dict[str, Any]:
        """Return the settings of the process under test. Its broker is at `url`.
        Without `url`, return the settings of the test's own process."""
        return {
            **IMPATIENT,
            "SERVICE": self.destination,
            "BROKERS": {"default": {"URL": url or self.url}},
            "RELAY": {"POLL_INTERVAL": 0.05, "LEASE": 5, "BREAKER_MAX_PAUSE": 60.0},
        }

    def start(
        self, command: str, *, url: str = "", database: str = "", **txmsg: Any
    ) -> ManageProcess:
        """Start the process under test."""
        arguments = {
            "relay": ["relay"],
            "consume": ["consume", self.destination],
            "run": ["txmsg", "run"],
        }[command]
        self.process = self._manage(
            *arguments,
            hook="tests.acceptance.stop_states.declare",
            txmsg={**self.settings(url), **txmsg},
            env={
                "STOP_SCRIPT": json.dumps(self.script),
                **({"TXMSG_TEST_DATABASE_URL": database} if database else {}),
            },
        )
        return self.process

    def store(self, count: int = COUNT) -> None:
        """Store messages without dispatching them."""
        with txmsg(**self.settings()), transaction.atomic():
            send_messages(
                {"destination": self.destination, "body": n} for n in range(count)
            )
        self.stored += count

    def dispatch(self, count: int = COUNT) -> None:
        """Store messages, and dispatch them to the broker."""
        self.store(count)
        with txmsg(**self.settings()):
            ship()

    def database(self, proxy: Proxy) -> str:
        """Return the URL of the database through a proxy."""
        assert self.postgres is not None
        url = os.environ["TXMSG_TEST_DATABASE_URL"]
        return url.replace(f":{self.postgres.port}/", f":{proxy.port}/")

    def proxy(self, port: int) -> Proxy:
        """Start a proxy in front of a port. The proxy stops at the end of the test."""
        return self.stack.enter_context(Proxy(port))

    def waiting(self, text: str) -> str:
        """Wait until the process has printed `text`."""
        return self.process.wait_for_line(text)


@contextmanager
def _locked(table: str) -> Iterator[None]:
    """Lock a table in another session, so that every statement on the table waits."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with closing(connection), transaction.atomic():
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            held.set()
            let_go.wait(120)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(30)
    try:
        yield
    finally:
        let_go.set()
        thread.join(30)


def _waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[0])


@contextmanager
def _silent_host() -> Iterator[tuple[int, threading.Event]]:
    """Open a port that accepts connections and never sends a byte."""
    taken, end = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", free_port())) as server:
        kept = []

        def serve() -> None:
            while not end.is_set():
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return
                taken.set()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], taken
        end.set()
        for one in kept:
            one.close()


# The states. ------------------------------------------------------------------------


@contextmanager
def broker_refuses(world: World, command: str) -> Iterator[None]:
    """The process waits for the end of the circuit breaker's pause, because no broker
    listens on the port."""
    world.store()
    world.start(command, url=f"stomp://u:p@127.0.0.1:{free_port()}")
    world.waiting("cannot be used")
    yield


@contextmanager
def broker_is_silent(world: World, command: str) -> Iterator[None]:
    """The process logs in at a host that accepts connections and sends nothing."""
    world.store()
    with _silent_host() as (port, taken):
        world.start(command, url=f"stomp://u:p@127.0.0.1:{port}")
        assert taken.wait(60), world.process.output
        yield


@contextmanager
def host_drops_packets(world: World, command: str) -> Iterator[None]:
    """The process connects to a host whose queue of connections is full, so that the
    host drops SYN packets."""
    world.store()
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", free_port()))
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        world.start(command, url=f"stomp://u:p@127.0.0.1:{server.getsockname()[1]}")
        pid, port = world.process.pid, server.getsockname()[1]
        wait_until(lambda: _connects(pid, port), deadline=60)
        yield


def _connects(pid: int, port: int) -> bool:
    return any(
        one.raddr and one.raddr.port == port and one.status == psutil.CONN_SYN_SENT
        for one in psutil.Process(pid).net_connections("tcp")
    )


@contextmanager
def broker_keeps_its_answers(world: World, command: str) -> Iterator[None]:
    """The broker's answers do not arrive. A relay waits for the receipts of a batch,
    and a consumer waits for a message."""
    assert world.activemq is not None
    world.url = world.activemq.url()
    proxy = world.proxy(world.activemq.port)
    world.dispatch(1)
    world.start(command, url=world.activemq.url(port=proxy.port))
    _is_at_work(world, command)
    proxy.hang(ANSWERS)
    before = proxy.forwarded[REQUESTS]
    if command == "relay":
        world.store()
        wait_until(lambda: proxy.forwarded[REQUESTS] > before)
    else:
        world.dispatch()
    yield


@contextmanager
def database_refuses(world: World, command: str) -> Iterator[None]:
    """The process waits until it can reach the database again."""
    assert world.postgres is not None
    proxy = world.proxy(world.postgres.port)
    world.dispatch(1)
    world.start(command, database=world.database(proxy))
    _is_at_work(world, command)
    proxy.refuse()
    proxy.cut()
    world.waiting("cannot|the database|refused")
    yield


@contextmanager
def database_is_silent(world: World, command: str) -> Iterator[None]:
    """The process waits for the answer to a statement. The answer never comes."""
    assert world.postgres is not None
    proxy = world.proxy(world.postgres.port)
    world.dispatch(1)
    world.start(command, database=world.database(proxy))
    _is_at_work(world, command)
    proxy.hang()
    # Every thread asks several times a second.
    threading.Event().wait(2.0)
    yield


@contextmanager
def waits_for_a_lock(world: World, command: str) -> Iterator[None]:
    """A statement of the process waits for a lock: the relay's claim, or the consumer's
    insert into the inbox."""
    world.dispatch(1)
    world.start(command)
    _is_at_work(world, command)
    model = OutboxMessage if command == "relay" else InboxMessage
    world.dispatch()
    with _locked(model._meta.db_table):
        wait_until(_waits_for_a_lock)
        yield


@contextmanager
def idle(world: World, command: str) -> Iterator[None]:
    """The process has nothing to do."""
    world.dispatch(1)
    world.start(command)
    _is_at_work(world, command)
    yield


def _is_at_work(world: World, command: str) -> None:
    if command != "relay":
        wait_until(Effect.objects.exists, message=lambda: world.process.output)
    else:
        world.store(1)
        wait_until(
            lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists(),
            message=lambda: world.process.output,
        )


@contextmanager
def in_the_handler(world: World, command: str) -> Iterator[None]:
    """A handler runs. It returns a second after the signal."""
    world.script["hold_at"] = 2
    world.dispatch()
    world.start(command)
    world.waiting("in the handler")
    timer = threading.Timer(1.0, world.go.touch)
    timer.start()
    yield
    timer.join()


@contextmanager
def in_the_handler_of_a_batch(world: World, command: str) -> Iterator[None]:
    """The handler runs for a message in the middle of a batch."""
    world.script["options"] = {"batch": 4}
    with in_the_handler(world, command):
        yield


@contextmanager
def in_the_handler_of_1pc(world: World, command: str) -> Iterator[None]:
    """A handler runs inside a transaction of the broker."""
    world.script["options"] = {"transaction": "best_effort_1pc"}
    with in_the_handler(world, command):
        yield


@contextmanager
def in_blocking_redelivery(world: World, command: str) -> Iterator[None]:
    """A thread waits between two attempts of a message, and keeps the message."""
    world.script["redelivery"] = {"mode": "blocking", "initial_delay": 300.0}
    world.script["fail"] = True
    world.dispatch()
    world.start(command)
    world.waiting("the handler fails")
    yield


@contextmanager
def with_parked_messages(world: World, command: str) -> Iterator[None]:
    """All messages are parked for some minutes."""
    world.script["redelivery"] = {"initial_delay": 300.0, "max_delay": 300.0}
    world.script["fail"] = True
    world.dispatch()
    world.start(command)
    parked = InboxMessage.objects.filter(due_at__isnull=False)
    wait_until(lambda: parked.count() == COUNT)
    yield
    parked.update(due_at="2020-01-01T00:00Z")


@contextmanager
def throttled(world: World, command: str) -> Iterator[None]:
    """A stage pauses, because its handler has failed each time."""
    world.script["redelivery"] = {"max_redeliveries": 99, "initial_delay": 0.1}
    world.script["fail"] = True
    world.dispatch()
    consume = {"POLL_INTERVAL": 0.02, "THROTTLE_AFTER": 1, "THROTTLE_PAUSE": 600.0}
    world.start(command, CONSUME=consume)
    world.waiting("the handler fails")
    yield


@contextmanager
def looks_again(world: World, command: str) -> Iterator[None]:
    """The process waits before it checks a control message again. The message's session
    does not commit."""
    world.dispatch(1)
    control = ControlMessage(
        id=str(new_id()), session_id=new_id(), using="default", oracle="delay"
    )
    queue = wire.control_destination(world.destination)
    http = {"MAX_COMMIT_DURATION": 600.0, "COMMIT_DELAY_INCREMENT": 300.0}
    with txmsg(**world.settings()), get_broker("default").open() as session:
        assert session.send([control.outgoing()]) == [None]
    world.start(command, HTTP=http)
    held = QueueMessage.objects.filter(queue=queue, lease_token__isnull=False)
    wait_until(held.exists, message=lambda: world.process.output)
    yield
    QueueMessage.objects.filter(queue=queue).delete()


@contextmanager
def in_bulk(world: World, command: str) -> Iterator[None]:
    """The process executes a bulk operation that takes minutes."""
    world.dispatch(1)
    with transaction.atomic():
        for number in range(300):
            burial.bury(
                using="default",
                message_id=new_id(),
                stage="",
                broker="default",
                destination="tests.nowhere",
                headers={},
                body=b"%d" % number,
                reason="broker",
                failure=Failure.because("broker", "as the test says"),
                attempts=0,
            )
    # Only the service that requests an operation executes it.
    with txmsg(**world.settings()):
        operation = bulk.start("discard", {}, rate=5.0)
    world.start(command)
    wait_until(
        lambda: BulkOperation.objects.filter(pk=operation.pk, done__gt=0).exists(),
        message=lambda: world.process.output,
    )
    yield
    operation.refresh_from_db()
    assert 0 < operation.done < 300
    DeadLetter.objects.all().delete()
