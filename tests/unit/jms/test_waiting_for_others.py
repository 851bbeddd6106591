"""No two threads wait for each other, so each wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import ADDRESS, DESTINATION, Gate, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]
PROFILES = ["classic", "rabbitmq"]


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def fill(producer: jms.MessageProducer, gate: Gate, body: bytes) -> None:
    """Send messages until the window of messages in flight is full."""
    for _ in range(50):
        try:
            producer.send_async(jms.Message(body), gate, timeout=0.2)
        except jms.WindowFullError:
            return
    raise AssertionError("there is always room")


def ended(thread: threading.Thread) -> bool:
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_producer_of_a_transaction_may_be_closed_before_the_commit(
    scripted: Scripted, connect: Connect, profile: str
) -> None:
    broker = scripted(profile)
    session, listener = connect(broker).create_session(transacted=True), Listener()

    def use() -> None:
        with session.create_producer(DESTINATION) as producer:
            producer.send_async(jms.Message("1"), listener)
        session.commit()

    assert ended(in_thread(use))
    assert listener.told == [("1", None)]
    assert [m.body for m in broker.stored(ADDRESS)] == [b"1"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_commit_waits_for_no_send_that_came_after_it(
    scripted: Scripted, connect: Connect, profile: str
) -> None:
    broker = scripted(profile)
    session = connect(broker).create_session(transacted=True)
    producer, told = session.create_producer(DESTINATION), Listener()
    stop = threading.Event()

    class Chain(Listener):
        """A listener whose callback always sends the next message."""

        def on_completion(self, message: jms.Message) -> None:
            super().on_completion(message)
            if not stop.is_set():
                producer.send_async(jms.Message("next"), self)

    chain = Chain()
    producer.send_async(jms.Message("first"), chain)
    producer.send_async(jms.Message("second"), told)

    assert ended(in_thread(session.commit))
    assert told.told == [("second", None)]
    stop.set()
    session.drain()
    session.rollback()
    bodies = [m.body for m in broker.stored(ADDRESS)]
    assert {b"first", b"second"} <= set(bodies)


def test_on_rabbitmq_what_is_on_the_broker_cannot_be_cancelled(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    future = session.create_producer(DESTINATION).submit(jms.Message("x"))
    broker.wait_for("SEND")

    assert not future.cancel()
    session.commit()

    assert future.result(10).body == "x"
    assert [m.body for m in broker.stored(ADDRESS)] == [b"x"]


def test_on_rabbitmq_a_transaction_may_be_larger_than_the_window(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker, max_in_flight=2).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()

    for n in range(20):
        producer.send_async(jms.Message(n), listener)
    session.commit()

    assert listener.bodies == list(range(20))
    assert len(broker.stored(ADDRESS)) == 20


def test_a_callback_cannot_close_a_producer_whose_callbacks_come_after_it(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    producer, sibling = session.create_producer("a"), session.create_producer("b")
    go, raised = threading.Event(), []

    def close_sibling(message: jms.Message) -> None:
        go.wait(30)
        try:
            sibling.close()
        except jms.IllegalStateError as error:
            raised.append(error)

    listener = Listener()
    producer.send_async(jms.Message("1"), (close_sibling, print))
    sibling.send_async(jms.Message("2"), listener)
    go.set()

    assert listener.wait_for(1) == ["2"]
    assert len(raised) == 1
    sibling.send(jms.Message("still open"))


def test_callbacks_that_wait_for_callbacks_of_other_sessions_all_end(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, callback_threads=4)
    sessions = [connection.create_session() for _ in range(8)]
    listener, started = Listener(), threading.Barrier(4)

    def wait_for_another(number: int) -> Callable[[jms.Message], None]:
        def callback(message: jms.Message) -> None:
            started.wait(30)  # each thread of the pool is in such a callback
            producer = sessions[number + 4].create_producer(DESTINATION)
            listener.on_completion(producer.submit(jms.Message(number)).result(30))
            producer.close()

        return callback

    for number in range(4):
        producer = sessions[number].create_producer(DESTINATION)
        producer.send_async(jms.Message("x"), (wait_for_another(number), print))

    assert sorted(listener.wait_for(4)) == [0, 1, 2, 3]
    connection.close()


def test_listeners_stuck_on_one_connection_delay_no_other_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    stuck, free = connect(broker, callback_threads=2), connect(broker)
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        producer = stuck.create_session().create_producer(DESTINATION)
        producer.send_async(jms.Message("stuck"), gate)
    wait_until(lambda: sum(gate.entered.is_set() for gate in gates) == 2)

    listener = Listener()
    free.create_session().create_producer("x").send_async(jms.Message("1"), listener)
    free.close()

    assert listener.told == [("1", None)]
    for gate in gates:
        gate.open.set()


def test_a_stuck_listener_holds_up_no_synchronous_send(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=2).create_session()
    producer, gate = session.create_producer(DESTINATION), Gate()
    fill(producer, gate, b"")

    producer.send(jms.Message("sync"))

    assert broker.received("SEND")[-1].text == "sync"
    gate.open.set()


def test_waiting_for_room_leaves_the_receipt_its_time(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("SEND").hold_receipt()
    producer.send_async(jms.Message("1"), listener)
    second = in_thread(
        lambda: producer.send_async(jms.Message("2"), listener, timeout=3)
    )
    broker.wait_for_held(1)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1)
    broker.release()
    second.join(30)
    began = time.monotonic()
    broker.wait_for_held(1)
    (pending,) = session.link.ledger.open.values()

    assert pending.deadline - began > 2.5
    broker.release()
    assert listener.wait_for(2) == ["1", "2"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_more_than_nothing(session: jms.Session, timeout: float) -> None:
    producer = session.create_producer(DESTINATION)

    with pytest.raises(ValueError, match="timeout"):
        producer.send(jms.Message("x"), timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        producer.send_async(jms.Message("x"), Listener(), timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        session.send_batch([], timeout=timeout)


def test_uncompleted_messages_take_room_by_their_bytes(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, max_in_flight=4, max_in_flight_bytes=100_000)
    session, gate = connection.create_session(), Gate()
    producer = session.create_producer(DESTINATION)

    fill(producer, gate, b"x" * 40_000)

    assert len(broker.received("SEND")) == 2
    gate.open.set()


def test_a_sender_that_waits_for_room_does_not_send_over_a_closed_producer(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    other = session.create_producer("other")
    broker.on("SEND", nth=1).hold_receipt()
    other.send_async(jms.Message("1"), listener)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            producer.send_async(jms.Message("2"), listener)
        except jms.IllegalStateError as error:
            raised.append(error)

    sender = in_thread(send)
    wait_until(lambda: session.sends.waiters)
    producer.close()
    broker.wait_for_held(1)
    broker.release()
    sender.join(30)

    assert len(raised) == 1
    assert len(broker.received("SEND")) == 1


@pytest.mark.parametrize("closer", ["session", "connection"])
def test_close_lets_synchronous_sends_and_batches_of_other_threads_end(
    scripted: Scripted, connect: Connect, closer: str
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session()
    producer = session.create_producer(DESTINATION)
    broker.on("SEND").hold_receipt()
    outcomes: list[Any] = []
    batch = [(DESTINATION, jms.Message(n)) for n in range(5)]
    threads = [
        in_thread(lambda: outcomes.append(producer.send(jms.Message("sync")))),  # type: ignore[func-returns-value]
        in_thread(lambda: outcomes.extend(session.send_batch(batch))),
    ]
    broker.wait_for_held(6)

    closing = in_thread(
        session.close if closer == "session" else session.connection.close
    )
    wait_until(lambda: session.sends.waiters)
    assert closing.is_alive()
    broker.release()

    assert all(map(ended, [*threads, closing]))
    assert outcomes == [None] * 6


def test_a_message_is_free_as_soon_as_its_send_is_cancelled(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    producer = connect(broker).create_session().create_producer(DESTINATION)
    broker.stall()
    producer.submit(jms.Message(b"x" * 10_000_000))
    wait_until(lambda: producer.session.link.writer.queued_bytes == 0)
    message = jms.Message("x")

    assert producer.submit(message).cancel()
    assert message.body == "x"
    again = producer.submit(message)
    broker.resume()

    assert again.result(30) is message
    assert [f.text[:2] for f in broker.received("SEND")] == ["xx", "x"]


def test_what_is_scheduled_by_a_callback_does_not_run_in_it(
    broker: ScriptedBroker, connect: Connect
) -> None:
    import asyncio

    connection = connect(broker, max_in_flight=1)
    session = connection.create_session()
    producer, loop, done = session.create_producer("a"), asyncio.new_event_loop(), []
    running = in_thread(loop.run_forever)

    def close_later(message: jms.Message) -> None:
        loop.call_soon_threadsafe(lambda: (session.close(), done.append(True)))

    producer.send_async(jms.Message("x"), (close_later, print))

    wait_until(lambda: done)
    loop.call_soon_threadsafe(loop.stop)
    running.join(30)
    loop.close()
