"""A callback cannot wait for itself. Everything else is allowed in a callback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import DESTINATION, Gate, Listener

Connect = Callable[..., jms.Connection]


class Trier:
    """A listener whose callback calls a function, and keeps the exception that the
    function raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.raised: list[BaseException | None] = []
        self.done = threading.Event()

    def on_completion(self, message: jms.Message) -> None:
        try:
            self.call()
        except Exception as error:
            self.raised.append(error)
        else:
            self.raised.append(None)
        finally:
            self.done.set()

    def on_exception(self, message: jms.Message, error: jms.MessagingError) -> None:
        self.on_completion(message)


@pytest.mark.parametrize("outcome", ["completion", "exception"])
@pytest.mark.parametrize("transacted", [True, False])
@pytest.mark.parametrize(
    "verb",
    ["producer.close", "close", "commit", "rollback", "recover", "drain",
     "connection.close"],
)  # fmt: skip
def test_a_callback_cannot_wait_for_itself_and_the_refusal_changes_nothing(
    broker: ScriptedBroker,
    connect: Connect,
    outcome: str,
    transacted: bool,
    verb: str,
) -> None:
    session = connect(broker).create_session(transacted=transacted)
    producer = session.create_producer(DESTINATION)
    target: Any = producer if verb == "producer.close" else session
    if verb == "connection.close":
        target = session.connection
    trier = Trier(getattr(target, verb.rpartition(".")[2]))
    if outcome == "exception":
        broker.on("SEND", nth=1).reject("no")

    producer.send_async(jms.Message("x"), trier)
    assert trier.done.wait(30)

    assert [type(error) for error in trier.raised] == [jms.IllegalStateError]
    if transacted:
        session.rollback()
    producer.send(jms.Message("still open"))
    if transacted:
        session.commit()
    assert broker.received("SEND")[-1].text == "still open"


def test_a_context_refuses_its_own_callback_too(
    broker: ScriptedBroker, connect: Connect
) -> None:
    context = jms.Context(
        connect(broker), transacted=True, ack_mode=jms.AckMode.INDIVIDUAL
    )
    tried = []
    for call in (context.close, context.commit, context.rollback, context.recover):
        trier = Trier(call)
        context.create_producer().set_async(trier).send(DESTINATION, "x")
        assert trier.done.wait(30)
        tried += trier.raised

    assert [type(error) for error in tried] == [jms.IllegalStateError] * 4


def test_the_application_thread_may_close_while_a_callback_runs(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    gate = Gate()
    producer.send_async(jms.Message("x"), gate)
    gate.entered.wait(30)
    threading.Timer(0.1, gate.open.set).start()

    producer.session.close()

    assert gate.bodies == ["x"]


def test_a_callback_that_waits_for_the_thread_that_waits_for_it_is_reported(
    broker: ScriptedBroker, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback waits for a thread that closes the session, and closing waits for the
    callback. As in Jakarta Messaging, neither wait ends. A warning says so."""
    session = connect(broker, close_timeout="0.2").create_session()
    handed_on = threading.Thread(target=session.close, name="closer", daemon=True)
    over = threading.Event()

    def hand_on_and_wait(_: jms.Message) -> None:
        handed_on.start()
        assert over.wait(60)

    producer = session.create_producer(DESTINATION)
    producer.send_async(jms.Message("x"), (hand_on_and_wait, lambda *_: None))
    wait_until(lambda: "Still waiting" in caplog.text)
    over.set()
    handed_on.join(30)

    assert not handed_on.is_alive()
    assert "neither wait ends" in caplog.text


def test_a_callback_may_close_another_producer_session_and_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection, other = connect(broker), connect(broker)
    session, sibling = connection.create_session(), connection.create_session()
    producer, second = session.create_producer("a"), session.create_producer("b")

    for call in (second.close, sibling.close, other.close, connection.stop):
        trier = Trier(call)
        producer.send_async(jms.Message("x"), trier)
        assert trier.done.wait(30)
        assert trier.raised == [None]


def test_an_asynchronous_send_from_a_callback_never_blocks_on_the_window(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer, finished = session.create_producer(DESTINATION), threading.Event()
    count = 3_000  # more than Python takes of calls inside each other
    left = iter(range(count - 1))
    errors: list[jms.MessagingError] = []

    def send_next(message: jms.Message) -> None:
        if next(left, None) is None:
            finished.set()
        else:
            producer.send_async(jms.Message("x"), (send_next, fail))

    def fail(message: jms.Message, error: jms.MessagingError) -> None:
        errors.append(error)
        finished.set()

    producer.send_async(jms.Message("x"), (send_next, fail))

    assert finished.wait(60)
    assert errors == []
    assert len(broker.received("SEND")) == count


def test_a_synchronous_send_from_a_callback_does_not_deadlock(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer = session.create_producer(DESTINATION)
    trier = Trier(lambda: producer.send(jms.Message("inner")))

    producer.send_async(jms.Message("outer"), trier)

    assert trier.done.wait(30)
    assert trier.raised == [None]
    assert [f.text for f in broker.received("SEND")] == ["outer", "inner"]


def test_callbacks_that_send_without_end_meet_a_hard_cap(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_txmsg.jms.sends._HARD_CAP", 0)
    session = connect(broker, max_in_flight=1).create_session()
    producer = session.create_producer(DESTINATION)
    broker.on("SEND", where=lambda f: f.text == "inner").drop_receipt()

    def flood() -> None:
        for _ in range(17):
            producer.send_async(jms.Message("inner"), Listener())

    trier = Trier(flood)
    producer.send_async(jms.Message("outer"), trier)

    assert trier.done.wait(30)
    assert [type(error) for error in trier.raised] == [jms.WindowFullError]
