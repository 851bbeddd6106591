"""Callbacks come in the order of the sends. The window limits the messages in
flight."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import DESTINATION, Gate, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


def test_synchronous_and_asynchronous_sends_keep_the_order_on_the_wire(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    listener = Listener()

    for n in range(40):
        if n % 2:
            producer.send(jms.Message(n))
        else:
            producer.send_async(jms.Message(n), listener)
    producer.close()

    assert [int(frame.text) for frame in broker.received("SEND")] == list(range(40))
    assert listener.bodies == list(range(0, 40, 2))


def test_a_synchronous_send_does_not_wait_for_earlier_callbacks(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=1).hold_receipt()
    listener = Listener()
    producer.send_async(jms.Message("async"), listener)

    producer.send(jms.Message("sync"))

    assert listener.told == []
    broker.release()
    assert listener.wait_for(1) == ["async"]


@pytest.mark.parametrize("seed", range(5))
def test_callbacks_come_in_call_order_when_receipts_come_back_permuted(
    broker: ScriptedBroker, session: jms.Session, seed: int
) -> None:
    broker.on("SEND").permute_receipts(20, seed=seed)
    producer, listener = session.create_producer(), Listener()

    for n in range(100):
        producer.send_async(jms.Message(n), listener, destination=f"d{n % 2}")
    producer.close()

    assert listener.bodies == list(range(100))
    assert listener.errors == [None] * 100


@pytest.mark.parametrize("failing", [{0}, {9}, {0, 2, 4, 6, 8}, set(range(10))])
def test_failures_keep_their_place_between_successes(
    broker: ScriptedBroker, producer: jms.MessageProducer, failing: set[int]
) -> None:
    broker.on("SEND", where=lambda f: int(f.text) in failing).reject("no")
    broker.on("SEND").hold_receipt()
    listener = Listener()

    for n in range(10):
        producer.send_async(jms.Message(n), listener)
    broker.wait_for("SEND", 10)
    held = 10 - len(failing)
    broker.release(order=random.Random(7).sample(range(held), held))
    producer.close()

    assert listener.bodies == list(range(10))
    assert {n for n, error in listener.told if error} == failing


def test_a_hundred_sends_are_on_the_wire_before_the_first_receipt(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").hold_receipt()
    listener = Listener()

    for n in range(100):
        producer.send_async(jms.Message(n), listener)

    broker.wait_for_held(100)
    assert listener.told == []
    broker.release()
    assert len(listener.wait_for(100)) == 100


def test_a_full_window_blocks_and_then_raises_with_nothing_written(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=2).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("SEND", times=2).hold_receipt()
    producer.send_async(jms.Message("1"), listener)
    producer.send_async(jms.Message("2"), listener)
    refused = jms.Message("refused")

    began = time.monotonic()
    with pytest.raises(jms.WindowFullError, match="not written"):
        producer.send_async(refused, listener, timeout=0.3)
    assert time.monotonic() - began >= 0.3

    assert refused.body == "refused"
    assert refused.message_id is None
    broker.release()
    producer.send_async(jms.Message("3"), listener)
    producer.close()
    assert [frame.text for frame in broker.received("SEND")] == ["1", "2", "3"]
    assert listener.bodies == ["1", "2", "3"]


def test_a_receipt_lets_a_blocked_sender_go_on(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("SEND", nth=1).hold_receipt()
    producer.send_async(jms.Message("1"), listener)
    sender = threading.Thread(
        target=producer.send_async, args=(jms.Message("2"), listener)
    )
    sender.start()
    wait_until(lambda: session.sends.waiters)
    broker.wait_for_held(1)

    broker.release()
    sender.join(30)

    assert listener.wait_for(2) == ["1", "2"]
    assert listener.errors == [None, None]


def test_the_window_counts_bytes_and_lets_one_larger_message_go_alone(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight_bytes=10_000).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("SEND").hold_receipt()

    producer.send_async(jms.Message(b"x" * 50_000), listener)
    with pytest.raises(jms.WindowFullError):
        producer.send_async(jms.Message("small"), listener, timeout=0.1)
    broker.wait_for_held(1)
    broker.release()
    producer.send_async(jms.Message("small"), listener)
    broker.wait_for_held(1)
    broker.release()

    assert len(listener.wait_for(2)) == 2


def test_a_listener_that_never_returns_holds_its_senders_up(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=2).create_session()
    producer, gate = session.create_producer(DESTINATION), Gate()

    def send_until_held_up() -> int:
        for n in range(50):
            try:
                producer.send_async(jms.Message(n), gate, timeout=0.5)
            except jms.WindowFullError:
                return n
        return 50

    accepted = send_until_held_up()
    gate.open.set()
    producer.close()

    assert accepted in range(8, 11)  # four windows wait, one is in flight
    assert gate.bodies == list(range(accepted))


def test_the_order_holds_over_the_producers_of_a_session(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND").permute_receipts(10, seed=3)
    producers = [session.create_producer(f"d{n}") for n in range(3)]
    listener = Listener()

    for n in range(60):
        producers[n % 3].send_async(jms.Message(n), listener)
    session.drain(30)

    assert listener.bodies == list(range(60))


def test_a_stuck_listener_does_not_delay_another_session(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    stuck, free = connection.create_session(), connection.create_session()
    gate, listener = Gate(), Listener()
    stuck.create_producer(DESTINATION).send_async(jms.Message("stuck"), gate)
    gate.entered.wait(30)

    free.create_producer(DESTINATION).send_async(jms.Message("free"), listener)

    assert listener.wait_for(1) == ["free"]
    assert gate.told == []
    gate.open.set()


def test_coalesced_writes_keep_each_sessions_frames_whole_and_in_order(
    scripted: Scripted, connect: Connect
) -> None:
    # Ours go between the frames. The broker promises none, so none can be late.
    broker = scripted(heart_beat=(0, 50))
    connection = connect(broker, coalesce_bytes=1000, heartbeat=0.05)
    listener = Listener()

    def send_many(name: int) -> None:
        session = connection.create_session()
        producer = session.create_producer(f"d{name}")
        for n in range(200):
            producer.send_async(jms.Message(str(n) * (n % 50 + 1)), listener)
        session.close()

    threads = [threading.Thread(target=send_many, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    for name in range(4):
        frames = broker.received("SEND", destination=f"/queue/d{name}")
        assert [f.text for f in frames] == [str(n) * (n % 50 + 1) for n in range(200)]
    assert len(listener.told) == 800
    assert broker.violations == []
