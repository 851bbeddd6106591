"""Stages that are declared and run inside the test's own process.

`step()` processes one delivery with the same code as a consumer's thread. `running()`
starts such threads. For whole processes use `faults.ManageProcess`.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

# Checks import it, and `committing` hides its app.
import django.contrib.auth.middleware  # noqa: F401
import pytest
from django.db import connection, transaction
from django.test import override_settings

from django_txmsg import conf, signals, stages, wire
from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Delivery, Outgoing
from django_txmsg.consuming.consumer import wake_for_parked
from django_txmsg.consuming.limits import Allowance, Throttle
from django_txmsg.consuming.stage_thread import StageThread
from django_txmsg.envelope.message import Message
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime.breaker import Breaker
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.sending.outbox import send_message
from tests.faults import wait_until

#: Tests that commit. With the two applications alone, emptying the tables is quick.
committing = pytest.mark.django_db(
    transaction=True,
    databases=["default", "other"],
    available_apps=["django_txmsg", "tests.app"],
)

Handler = Callable[[Message], Any]
_numbers = itertools.count()

#: Short intervals, so that a test waits little. No message leaves without a relay.
IMPATIENT: dict[str, Any] = {
    "SERVICE": "tests",
    "BROKERS": {
        "default": {"URL": "database://?poll=0.01"},
        "apart": {"URL": "database://other?poll=0.01"},
    },
    "DISPATCH_ON_COMMIT": "off",
    "RELAY": {"POLL_INTERVAL": 0.05, "BREAKER_MAX_PAUSE": 1.0},
    "CONSUME": {"POLL_INTERVAL": 0.02},
    "REDELIVERY": {"INITIAL_DELAY": 0.0, "MAX_DELAY": 0.0, "MAX_REDELIVERIES": 2},
}


def txmsg(**more: Any) -> override_settings:
    """Return the settings IMPATIENT, overridden by the values in `more`."""
    return override_settings(TXMSG={**IMPATIENT, **more})


@contextmanager
def declared(
    handler: Any, destination: Any = "", **options: Any
) -> Iterator[stages.Stage]:
    """Declare a stage for the duration of the block."""
    destination = destination or f"tests.stage{next(_numbers)}"
    name = options.setdefault("name", destination)
    stages.stage(destination, **options)(handler)
    try:
        yield stages.find([name])[0]
    finally:
        stages.unregister(name)


class Script:
    """A handler that raises the next exception of its script at each attempt, and
    records the attempts."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)
        self.attempts: list[int] = []

    def __call__(self, message: Message) -> None:
        self.attempts.append(message.delivery_attempt)
        send_message("tests.next", {"attempt": len(self.attempts)})
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error


def thread_of(
    stage: stages.Stage, stop: threading.Event | None = None, **more: Any
) -> StageThread:
    """Return a new thread of the stage, without starting it."""
    consume = conf.get().CONSUME
    stop = stop or threading.Event()
    return StageThread(
        stage,
        worker="test:1:abc",
        stop=stop,
        allowance=Allowance(0, 0, stop.set),
        breaker=more.pop("breaker", None) or Breaker(stage.broker, 1.0),
        throttle=more.pop("throttle", None) or Throttle(consume.THROTTLE_AFTER),
        activity=Activity(),
        **more,
    )


def step(stage: stages.Stage, times: int = 1, *, parked: bool = True) -> None:
    """Let the stage process `times` deliveries, batches or parked messages."""
    thread = thread_of(stage)
    try:
        for _ in range(times):
            if parked:
                wake_for_parked([thread])
            thread._step()
    finally:
        thread._close()


@contextmanager
def running(
    stage: stages.Stage, concurrency: int = 1, **more: Any
) -> Iterator[list[StageThread]]:
    """Run threads of a stage for the duration of the block."""
    stop = threading.Event()
    breaker = Breaker(stage.broker, 1.0)
    consume = conf.get().CONSUME
    throttle = more.pop("throttle", None) or Throttle(consume.THROTTLE_AFTER)
    threads = [
        thread_of(
            stage, stop, breaker=breaker, throttle=throttle, number=number, **more
        )
        for number in range(concurrency)
    ]
    # What the consumer's own thread does for them.
    group = ThreadGroup(stop.set)
    for thread in threads:
        group.add(thread.name, thread.run)
    group.add("waker", lambda: _wake(threads, stop))
    group.start()
    try:
        yield threads
    finally:
        stop.set()
        group.join()


def _wake(threads: list[StageThread], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        wake_for_parked(threads)


def send(destination: str, body: object = None, **arguments: Any) -> Message:
    """Store a message, and dispatch it to the broker."""
    with transaction.atomic(using=arguments.get("using")):
        message = send_message(destination, body, **arguments)
    ship(arguments.get("using") or "default", arguments.get("broker", "default"))
    return message


def ship(using: str = "default", broker: str = "default") -> int:
    """Dispatch all due messages, like a relay, and return their number."""
    lane = Lane(using, broker)
    try:
        return sum(iter(lane.dispatch, 0))
    finally:
        lane.close()


@contextmanager
def at_work(*relays: Relay) -> Iterator[None]:
    """Run relays until the end of the block. They end even if the test fails, so that
    they do not claim rows of the next test."""
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for relay, thread in zip(relays, threads, strict=True):
            relay.stop()
            thread.join(30)


def drained(destination: str, broker: str = "default") -> list[Delivery]:
    """Receive all messages of a queue.

    A broker may take any time to deliver a message. So this function sends one more
    message to mark the end.
    """
    end = uuid.uuid4().bytes
    found: list[Delivery] = []
    with get_broker(broker).open() as session:
        headers = {wire.CONTENT_TYPE: wire.BYTES}
        assert session.send([Outgoing(destination, headers, end)]) == [None]
        session.subscribe(destination, prefetch=100)
        while True:
            delivery = session.receive(60)
            assert delivery is not None, f"{len(found)} came, and not the last one"
            session.ack([delivery])
            if delivery.body == end:
                session.ping()
                return found
            found.append(delivery)


def set_sequence(model: Any, following: int) -> None:
    """Set the primary key that PostgreSQL gives the next row of a model."""
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT setval(pg_get_serial_sequence(%s, 'id'), %s, false)",
            [table, following],
        )


def put(
    destination: str,
    body: bytes = b"null",
    headers: dict[str, str] | None = None,
    *,
    message_id: uuid.UUID | None = None,
    broker: str = "default",
) -> uuid.UUID:
    """Send a message directly to the broker, without the outbox, and return its id."""
    message_id = message_id or uuid.uuid4()
    if headers is None:
        headers = {"txmsg-id": str(message_id), "content-type": "application/json"}
    with get_broker(broker).open() as session:
        (outcome,) = session.send([Outgoing(destination, headers, body)])
        assert outcome is None
    return message_id


@contextmanager
def copies_dropped() -> Iterator[list[uuid.UUID]]:
    """Collect the ids of messages of which a copy is reported as dropped."""
    ids: list[uuid.UUID] = []

    def note(id: uuid.UUID, **_: Any) -> None:
        ids.append(id)

    signals.message_duplicate.connect(note)
    try:
        yield ids
    finally:
        signals.message_duplicate.disconnect(note)


@contextmanager
def record_lost_at(
    statement: str, change: str = "DELETE FROM django_txmsg_inboxmessage"
) -> Iterator[None]:
    """Simulate that the database server crashes and loses the only inbox row, and that
    a pooler hides the crash from the client. For this, the block deletes the row right
    before the first statement that begins with `statement`. `change` is another
    statement to execute then, as another worker does."""
    lost: list[str] = []

    def execute(run: Any, sql: str, *rest: Any) -> Any:
        if not lost and sql.replace('"', "").lstrip().startswith(statement):
            lost.append(sql)
            with connection.cursor() as cursor:
                cursor.execute(change)
                assert cursor.rowcount == 1
        return run(sql, *rest)

    with connection.execute_wrapper(execute):
        yield
    assert lost


def lose_connection(how: str) -> None:
    """Make PostgreSQL end this thread's connection. The thread notices it at its next
    statement. `how` is "killed" or "idle in transaction"."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
        if how == "idle in transaction":
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
    other: Any = connection.copy()
    with closing(other), other.cursor() as cursor:

        def is_gone() -> bool:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid])
            return cursor.fetchone() is None

        if how == "killed":
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        wait_until(is_gone)
