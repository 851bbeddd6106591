"""The threads that call callbacks are limited in number. They call one callback of a
session at a time, and hold no lock during the call."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.jms import completion
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import DESTINATION, Listener, ours

Connect = Callable[..., jms.Connection]


def test_a_callback_never_runs_on_the_senders_reader_or_writer_thread(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    listener = Listener()

    for n in range(50):
        producer.send_async(jms.Message(n), listener)
    producer.close()

    assert {thread.name for thread in listener.threads} == {"jms-completion"}
    assert threading.current_thread() not in listener.threads


def test_a_send_from_a_callback_completes_after_that_callback_returned(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    events: list[str] = []

    def outer(message: jms.Message) -> None:
        producer.send_async(
            jms.Message("inner"), (lambda m: events.append("inner"), print)
        )
        producer.send(jms.Message("by now the inner receipt is here"))
        events.append("outer returns")

    producer.send_async(jms.Message("outer"), (outer, print))
    producer.session.drain(30)

    assert events == ["outer returns", "inner"]


def test_one_callback_of_a_session_runs_at_a_time(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND").permute_receipts(5, seed=1)
    running, overlaps = [0], []

    def callback(message: jms.Message) -> None:
        running[0] += 1
        threading.Event().wait(random.random() / 500)
        overlaps.append(running[0])
        running[0] -= 1

    for n in range(100):
        session.create_producer(f"d{n % 3}").send_async(
            jms.Message(n), (callback, print)
        )
    session.drain(30)

    assert overlaps == [1] * 100


def test_a_callback_holds_no_lock_of_ours(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    lock, producer = threading.Lock(), session.create_producer(DESTINATION)
    entered = threading.Event()
    done: list[bool] = []

    def callback(message: jms.Message) -> None:
        entered.set()
        with lock:
            done.append(True)

    with lock:
        producer.send_async(jms.Message("1"), (callback, print))
        assert entered.wait(30)
        producer.send(jms.Message("2"))  # with the application's lock held
        producer.send_async(jms.Message("3"), (callback, print))
    session.drain(30)

    assert done == [True, True]


def test_the_number_of_threads_does_not_grow_with_sessions(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection, listener = connect(broker), Listener()
    before = ours()

    sessions = [connection.create_session() for _ in range(500)]
    more = ours() - before
    for session in sessions:
        session.create_producer(DESTINATION).send_async(jms.Message("x"), listener)
    listener.wait_for(500)

    assert more == set()
    assert len(set(listener.threads)) <= 32


def test_an_idle_session_owns_no_thread(
    broker: ScriptedBroker, connect: Connect
) -> None:
    before = ours()
    connection = connect(broker)

    connection.create_session().create_producer(DESTINATION).send(jms.Message("x"))

    new = {thread.name for thread in ours() - before}
    port = broker.port
    assert new == {f"jms-reader-127.0.0.1:{port}", f"jms-writer-127.0.0.1:{port}"}


PROGRAM = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from django_txmsg import jms
from django_txmsg.jms import connection as connections
connections.EXIT_BUDGET = 0.3
connection = jms.ConnectionFactory(sys.argv[1]).create_connection()
producer = connection.create_session().create_producer("orders.place")
producer.send_async(jms.Message("x"), (lambda m: print("told", flush=True), print))
"""


def end_a_process(broker: ScriptedBroker) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, broker.url],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    return ended.stdout


def test_a_process_that_ends_waits_shortly_for_its_sends(
    broker: ScriptedBroker,
) -> None:
    assert end_a_process(broker) == "told\n"


def test_a_process_that_ends_reports_what_stayed_unknown_and_never_hangs(
    broker: ScriptedBroker,
) -> None:
    broker.on("SEND").drop_receipt()

    assert "1 asynchronous sends had no outcome" in end_a_process(broker)


def test_close_tells_the_callbacks_itself_when_no_thread_can_be_started_any_more(
    broker: ScriptedBroker,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 and later start no new threads while the interpreter exits. Then
    close() calls the callbacks itself."""
    connection, listener = connect(broker), Listener()
    producer = connection.create_session().create_producer(DESTINATION)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "jms-completion":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    producer.send_async(jms.Message("x"), listener)
    connection.close()

    assert listener.told == [("x", None)]


def test_pool_threads_leave_when_they_are_idle() -> None:
    own = completion.CompletionPool(idle_seconds=0.05)
    ran: list[threading.Thread] = []

    own.submit(lambda: ran.append(threading.current_thread()))
    wait_until(lambda: ran and not ran[0].is_alive())
    own.submit(lambda: ran.append(threading.current_thread()))
    wait_until(lambda: len(ran) == 2)

    assert ran[0] is not ran[1]
