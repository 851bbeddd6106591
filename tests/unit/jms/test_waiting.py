"""close, commit and rollback wait until pending sends have ended normally."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import DESTINATION, Gate, Listener

Connect = Callable[..., jms.Connection]


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def closers(session: jms.Session, producer: jms.MessageProducer) -> dict[str, Any]:
    return {
        "producer": producer.close,
        "session": session.close,
        "connection": session.connection.close,
    }


@pytest.mark.parametrize("what", ["producer", "session", "connection"])
def test_close_waits_for_receipts_and_lets_sends_complete_normally(
    broker: ScriptedBroker,
    session: jms.Session,
    producer: jms.MessageProducer,
    what: str,
) -> None:
    broker.on("SEND").hold_receipt()
    listener = Listener()
    for n in range(3):
        producer.send_async(jms.Message(n), listener)
    broker.wait_for_held(3)

    closing = in_thread(closers(session, producer)[what])
    closing.join(0.3)
    assert closing.is_alive()
    broker.release()
    closing.join(30)

    assert not closing.is_alive()
    assert listener.told == [(0, None), (1, None), (2, None)]


@pytest.mark.parametrize("what", ["producer", "session", "connection"])
def test_close_waits_until_the_callback_has_returned(
    broker: ScriptedBroker,
    session: jms.Session,
    producer: jms.MessageProducer,
    what: str,
) -> None:
    gate = Gate()
    producer.send_async(jms.Message("x"), gate)
    gate.entered.wait(30)

    closing = in_thread(closers(session, producer)[what])
    closing.join(0.3)
    assert closing.is_alive()
    gate.open.set()
    closing.join(30)

    assert gate.bodies == ["x"]
    assert not closing.is_alive()


def test_a_context_closes_in_the_same_way(
    broker: ScriptedBroker, connect: Connect
) -> None:
    broker.on("SEND").hold_receipt()
    listener = Listener()
    context = jms.Context(
        connect(broker), transacted=False, ack_mode=jms.AckMode.INDIVIDUAL
    )
    context.create_producer().set_async(listener).send(DESTINATION, "x")
    broker.wait_for_held(1)

    closing = in_thread(context.close)
    closing.join(0.3)
    assert closing.is_alive()
    broker.release()
    closing.join(30)

    assert listener.told == [("x", None)]
    assert broker.received("*")[-1].command == "DISCONNECT"


def test_a_producers_close_waits_only_for_its_own_sends(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND", destination="/queue/slow").hold_receipt()
    quick, slow = session.create_producer("quick"), session.create_producer("slow")
    listener = Listener()
    quick.send_async(jms.Message("quick"), listener)
    slow.send_async(jms.Message("slow"), listener)
    broker.wait_for_held(1)

    quick.close()

    assert listener.bodies == ["quick"]
    broker.release()
    assert listener.wait_for(2) == ["quick", "slow"]


@pytest.mark.parametrize("what", ["producer", "session", "connection"])
def test_new_sends_are_refused_while_and_after_closing(
    broker: ScriptedBroker,
    session: jms.Session,
    producer: jms.MessageProducer,
    what: str,
) -> None:
    closers(session, producer)[what]()

    with pytest.raises(jms.IllegalStateError, match="closed"):
        producer.send(jms.Message("x"))
    assert broker.received("SEND") == []


def test_close_ends_by_the_sends_deadline_when_no_receipt_ever_comes(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND").drop_receipt()
    producer, listener = session.create_producer(DESTINATION), Listener()
    producer.send_async(jms.Message("x"), listener, timeout=0.3)

    session.close()

    assert isinstance(listener.errors[0], jms.SendTimeoutError)


def test_close_says_so_when_a_callback_keeps_it_waiting(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    session = connect(broker, close_timeout=0.1).create_session()
    gate = Gate()
    session.create_producer(DESTINATION).send_async(jms.Message("x"), gate)
    gate.entered.wait(30)

    closing = in_thread(session.close)
    closing.join(1.5)
    gate.open.set()
    closing.join(30)

    assert "Still waiting for 1" in caplog.text


def test_a_remote_close_ends_all_sends_and_a_later_close_returns_at_once(
    broker: ScriptedBroker, session: jms.Session, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").hold_receipt()
    listener = Listener()
    for n in range(5):
        producer.send_async(jms.Message(n), listener)
    broker.wait_for_held(5)

    broker.cut()
    listener.wait_for(5)
    session.connection.close()

    assert listener.bodies == list(range(5))
    assert all(isinstance(e, jms.ConnectionLostError) for e in listener.errors)


def test_several_threads_may_wait_in_close_and_commit_at_once(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    session = connection.create_session(transacted=True)
    producer, gate = session.create_producer(DESTINATION), Gate()
    producer.send_async(jms.Message("x"), gate)
    gate.entered.wait(30)

    waiting = [
        in_thread(session.commit),
        in_thread(producer.close),
        in_thread(producer.close),
    ]
    for _ in range(50):  # wake-ups for nothing
        with connection.link.lock:
            connection.link.changed.notify_all()
    assert all(thread.is_alive() for thread in waiting)
    gate.open.set()
    for thread in waiting:
        thread.join(30)
    connection.close()

    assert not any(thread.is_alive() for thread in waiting)
    assert gate.bodies == ["x"]


def test_two_threads_may_close_a_connection_at_once(
    broker: ScriptedBroker, session: jms.Session, producer: jms.MessageProducer
) -> None:
    gate = Gate()
    producer.send_async(jms.Message("x"), gate)
    gate.entered.wait(30)

    closing = [in_thread(session.connection.close) for _ in range(3)]
    gate.open.set()
    for thread in closing:
        thread.join(30)

    assert not any(thread.is_alive() for thread in closing)
    assert len(broker.received("DISCONNECT")) == 1


def test_the_count_goes_down_after_the_callback_returned_even_if_it_raised(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    seen: list[int] = []

    def look_and_raise(message: jms.Message) -> None:
        seen.append(producer.session.sends.uncompleted)
        raise SystemExit

    producer.send_async(jms.Message("x"), (look_and_raise, print))
    producer.close()

    assert seen == [1]
    assert producer.session.sends.uncompleted == 0


def test_drain_waits_without_closing_and_says_what_is_left(
    broker: ScriptedBroker, session: jms.Session, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=1).hold_receipt()
    listener = Listener()
    producer.send_async(jms.Message("1"), listener)

    with pytest.raises(TimeoutError, match="1 sends"):
        session.drain(0.1)
    broker.wait_for_held(1)
    broker.release()
    session.drain(30)
    producer.send(jms.Message("2"))

    assert listener.bodies == ["1"]


def test_disconnect_waits_for_its_receipt_and_a_second_one_is_harmless(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)

    connection.close()

    assert broker.received("DISCONNECT")[0].receipt is not None
    assert not connection.failed
    assert connection.closed


def test_close_returns_when_the_goodbye_is_never_answered(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, close_timeout=0.2)
    broker.on("DISCONNECT").drop_receipt()

    connection.close()

    assert connection.closed
