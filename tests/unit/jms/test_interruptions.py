"""A signal or a lack of memory can raise an exception at any line. No message is then
lost or doubled."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import ADDRESS, DESTINATION, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


class Interrupt(BaseException):
    """The exception that a signal handler raises."""


def interrupt_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool
) -> None:
    """Make the next call of a function raise Interrupt, before or after its work."""
    function = getattr(owner, name)
    armed = [True]

    def interrupted(*args: Any, **options: Any) -> Any:
        if not armed:
            return function(*args, **options)
        armed.clear()
        if after:
            function(*args, **options)
        raise Interrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["reserve", "put", "enqueue", "take", "notify"])
@pytest.mark.parametrize("how", ["send", "send_async"])
def test_a_send_that_is_interrupted_anywhere_leaves_nothing_behind(
    broker: ScriptedBroker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    after: bool,
    how: str,
) -> None:
    session = connect(broker).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    producer.send_async(jms.Message("before"), listener)
    session.drain()
    owner, name = {
        "reserve": (session.link.ledger, "reserve"),
        "put": (session.link.writer, "put" if how == "send_async" else "put_now"),
        "enqueue": (session.sends, "enqueue"),
        "take": (session.sends, "take"),
        "notify": (session.link, "put"),
    }[where]
    interrupt_in(monkeypatch, owner, name, after=after)
    arguments = (listener,) if how == "send_async" else ()

    if (where, how) == ("enqueue", "send"):
        producer.send(jms.Message("no callback"))
    else:
        with pytest.raises(Interrupt):
            getattr(producer, how)(jms.Message("interrupted"), *arguments)
        assert session.connection.failed
    closing = threading.Thread(target=session.connection.close, daemon=True)
    closing.start()
    closing.join(20)

    assert not closing.is_alive()
    assert session.link.ledger.open == {}
    assert listener.bodies in (["before"], ["before", "interrupted"])


def test_a_part_of_a_frame_is_followed_by_nothing(
    scripted: Scripted, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = scripted()
    session = connect(broker).create_session()
    producer = session.create_producer(DESTINATION)
    transport = session.link.transport
    write_some = transport.write_some

    def write_a_part(data: bytes) -> int:
        write_some(data[:-100])
        raise Interrupt

    monkeypatch.setattr(transport, "write_some", write_a_part)
    with pytest.raises(Interrupt):
        producer.send(jms.Message(b"x" * 1000))
    with pytest.raises(jms.ConnectionLostError):
        producer.send(jms.Message("after"))

    assert broker.received("SEND") == []


@pytest.mark.parametrize("profile", ["classic", "rabbitmq"])
@pytest.mark.parametrize("verb", ["commit", "rollback", "close"])
def test_a_commit_that_is_interrupted_before_commit_was_written_is_rolled_back(
    scripted: Scripted,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    verb: str,
) -> None:
    broker = scripted(profile)
    session = connect(broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    interrupt_in(monkeypatch, session.sends, "wait", after=False)

    with pytest.raises(Interrupt):
        session.commit()
    if verb == "commit":
        with pytest.raises(jms.TransactionRolledBackError, match="interrupted"):
            session.commit()
        session.create_producer(DESTINATION).send(jms.Message("2"))
        session.commit()
    else:
        getattr(session, verb)()

    stored = [m.body for m in broker.stored(ADDRESS)]
    assert stored == ([b"2"] if verb == "commit" else [])
    assert not session.connection.failed


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_commit_that_is_interrupted_after_commit_was_written_is_not_forgotten(
    broker: ScriptedBroker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    from django_txmsg.jms.link import Request

    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    producer.send(jms.Message("1"))
    broker.on("COMMIT", nth=1).hold_receipt()
    wait = Request.wait

    def interrupted(request: Request) -> None:
        if request.what.startswith("COMMIT"):
            monkeypatch.setattr(Request, "wait", wait)
            raise Interrupt
        wait(request)

    monkeypatch.setattr(Request, "wait", interrupted)
    with pytest.raises(Interrupt):
        session.commit()
    producer.send(jms.Message("2"))
    broker.wait_for_held(1)
    broker.release()

    if verb == "commit":
        session.commit()
    else:
        with pytest.raises(jms.IllegalStateError, match="has happened"):
            session.rollback()

    stored = [m.body for m in broker.stored(ADDRESS)]
    assert stored == ([b"1", b"2"] if verb == "commit" else [b"1"])


PROGRAM = """
import signal, sys
from django_txmsg import jms
connection = jms.ConnectionFactory(sys.argv[1]).create_connection()
producer = connection.create_session().create_producer("orders.place")
ended = []
def end(*_):
    try:
        connection.close()
    except jms.IllegalStateError as error:
        assert "signal handler" in str(error), error
    ended.append(True)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while not ended:
    try:
        producer.send_async(jms.Message(b"x" * 1000), (id, lambda m, e: None))
    except jms.MessagingError:
        break
connection.close()
print("closed", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="no such signal")
def test_a_signal_handler_that_closes_the_connection_never_hangs(
    broker: ScriptedBroker,
) -> None:
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, broker.url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            sent = len(broker.received("SEND"))
            wait_until(lambda sent=sent: len(broker.received("SEND")) > sent + 50)
            os.kill(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("closed\n", 0), err


@pytest.mark.parametrize("what", ["close", "send", "commit", "drain"])
def test_what_waits_is_refused_in_the_middle_of_a_send_of_the_same_thread(
    broker: ScriptedBroker, connect: Connect, what: str
) -> None:
    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    calls: dict[str, Callable[[], object]] = {
        "close": session.connection.close,
        "send": lambda: producer.send(jms.Message("x")),
        "commit": session.commit,
        "drain": session.drain,
    }

    with session.link.lock, pytest.raises(jms.IllegalStateError, match="signal"):
        calls[what]()

    assert not session.connection.closed
    producer.send(jms.Message("still open"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_takes_its_connection_along(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(broker, heartbeat=0)
    session, listener = connection.create_session(), Listener()

    def no_memory() -> bytes:
        raise MemoryError

    monkeypatch.setattr(connection.link.writer, "_take", no_memory)
    session.create_producer(DESTINATION).send_async(jms.Message("x"), listener)

    assert listener.wait_for(1) == ["x"]
    assert isinstance(listener.errors[0], jms.ConnectionLostError)
    assert "MemoryError" in str(connection.error)


def test_blocking_log_handler_blocks_no_sender(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    logger, gate = logging.getLogger("django_txmsg.jms.link"), threading.Event()
    entered = threading.Event()

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            entered.set()
            gate.wait(30)

    handler = Blocking()
    logger.addHandler(handler)
    try:
        broker.write(b"ERROR\nmessage:for nobody\n\n\x00")
        assert entered.wait(30)
        with connection.link.lock:  # as every sender needs it
            pass
        connection.create_session().create_producer("x").send_async(
            jms.Message("x"), Listener()
        )
    finally:
        gate.set()
        logger.removeHandler(handler)
