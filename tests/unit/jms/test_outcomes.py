"""No sent message completes before its receipt arrives. Each error is reported once, in
one place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.jms.frames import Receipt
from django_txmsg.jms.ledger import Pending
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import DESTINATION, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


def test_a_synchronous_send_returns_after_the_receipt_and_not_before(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").hold_receipt()
    sender = threading.Thread(target=producer.send, args=(jms.Message("x"),))

    sender.start()
    broker.wait_for_held(1)
    sender.join(0.2)
    assert sender.is_alive()
    broker.release()
    sender.join(30)

    assert not sender.is_alive()


def test_on_completion_comes_after_the_receipt_and_not_before(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=1).hold_receipt()
    listener = Listener()

    producer.send_async(jms.Message("x"), listener)
    broker.wait_for_held(1)
    producer.session.connection.ping()
    assert listener.told == []
    broker.release()

    assert listener.wait_for(1) == ["x"]


def test_a_synchronous_error_never_reaches_the_listener_too(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    producer, listener = session.create_producer(DESTINATION), Listener()
    session.close()
    message = jms.Message("x", {"h": "v"})

    with pytest.raises(jms.IllegalStateError):
        producer.send_async(message, listener)

    session.connection.close()
    assert listener.told == []
    assert (message.body, message.headers) == ("x", {"h": "v"})
    assert (message.message_id, message.destination, message.timestamp) == (None,) * 3


def test_an_error_with_our_receipt_id_reaches_on_exception_once(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=2).reject("not authorised", "user anon")
    listener = Listener()

    for body in "123":
        producer.send_async(jms.Message(body), listener)
    producer.close()

    assert listener.bodies == ["1", "2", "3"]
    first, second, third = listener.errors
    assert (first, third) == (None, None)
    assert isinstance(second, jms.SendRejectedError)
    assert second.broker_message == "not authorised: user anon"
    assert not producer.session.connection.failed


def test_unmatched_receipts_are_ignored_and_counted(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    connection, listener = session.connection, Listener()
    producer = session.create_producer(DESTINATION)
    broker.on("SEND", nth=1).duplicate_receipt(3)
    broker.on("SEND", nth=2).hold_receipt()

    producer.send_async(jms.Message("repeated"), listener)
    producer.send_async(jms.Message("late"), listener, timeout=0.2)
    broker.wait_for_held(1)
    listener.wait_for(2)
    broker.release()
    broker.write(b"RECEIPT\nreceipt-id:nobody\n\n\x00")
    broker.write(b"RECEIPT\nreceipt-id:0-1\n\n\x00")  # of another connection's epoch

    wait_until(lambda: connection.ignored_receipts == 5)
    producer.close()
    assert listener.bodies == ["repeated", "late"]
    assert listener.errors[0] is None
    assert isinstance(listener.errors[1], jms.SendTimeoutError)


def test_an_error_without_id_and_several_sends_in_flight_makes_all_unknown(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    connection, listener = connect(broker), Listener()
    producer = connection.create_session().create_producer(DESTINATION)
    broker.on("SEND", nth=3).reject("PRECONDITION_FAILED", closes=False)
    broker.on("SEND").hold_receipt()

    for body in "123":
        producer.send_async(jms.Message(body), listener)
    listener.wait_for(3)

    assert listener.bodies == ["1", "2", "3"]
    for error in listener.errors:
        assert isinstance(error, jms.ConnectionLostError)
        assert error.broker_message == "PRECONDITION_FAILED"
    assert connection.failed


def test_an_error_without_id_and_one_frame_outstanding_is_that_frames(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    connection = connect(broker)
    producer = connection.create_session().create_producer(DESTINATION)
    broker.on("SEND", nth=1).reject("Invalid destination", closes=False)

    with pytest.raises(jms.SendRejectedError, match="Invalid destination"):
        producer.send(jms.Message("x"))
    producer.send(jms.Message("y"))

    assert not connection.failed


@pytest.mark.parametrize(
    "said",
    [
        "Reason: {shutdown, {connection_closing, {server_initiated_close,320,<<>>}}}",
        "CONNECTION_FORCED - broker forced connection closure",
        "Reason: {server_initiated_close,541,<<>>}",
    ],
)
def test_an_operator_who_closes_the_connection_refuses_no_message(
    scripted: Scripted, connect: Connect, said: str
) -> None:
    broker = scripted("rabbitmq")
    producer = connect(broker).create_session().create_producer(DESTINATION)
    broker.on("SEND", nth=1).reject("AMQP channel died", said)

    with pytest.raises(jms.SendOutcomeUnknownError) as caught:
        producer.send(jms.Message("x"))

    assert said in caught.value.broker_message


def test_on_rabbitmq_a_cancelled_subscription_refuses_no_message(
    scripted: Scripted, connect: Connect
) -> None:
    """The subscription's queue was deleted. The connection ends, so that the session is
    opened again and subscribes again."""
    broker = scripted("rabbitmq")
    connection = connect(broker)
    session = connection.create_session()
    session.create_consumer("in")
    broker.on("SEND").drop_receipt()

    sent = session.create_producer(DESTINATION).submit(jms.Message("x"))
    broker.wait_for("SEND")
    text = b"message:Server cancelled subscription\nsubscription:sub-1"
    broker.write(b"ERROR\n" + text + b"\n\n\x00")

    assert isinstance(sent.exception(10), jms.SendOutcomeUnknownError)
    assert connection.failed


def test_an_acknowledgement_counts_among_the_outstanding_frames(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    broker.put("/queue/in", "delivery")
    session = connect(broker).create_session()
    message = session.create_consumer("in").receive(10)
    assert message is not None
    broker.on("SEND").reject("whose is it", closes=False)

    session.acknowledge(message)
    with pytest.raises(jms.SendOutcomeUnknownError) as caught:
        session.create_producer(DESTINATION).send(jms.Message("x"))

    assert caught.value.broker_message == "whose is it"


def test_an_error_without_id_harms_no_receipted_send_where_errors_name_receipts(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", "delivery")
    message = session.create_consumer("in").receive(10)
    assert message is not None
    broker.on("ACK").reject("no such delivery")
    broker.on("SEND").hold_receipt()

    future = session.create_producer(DESTINATION).submit(jms.Message("x"))
    session.acknowledge(message)
    broker.wait_for("ACK")
    broker.wait_for_held(1)
    session.connection.ping()
    broker.release()

    assert future.result(10).body == "x"


def test_a_write_that_fails_makes_its_send_unknown_and_returns_its_slot(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    connection = connect(broker, max_in_flight=2)
    session, listener = connection.create_session(), Listener()
    producer = session.create_producer(DESTINATION)
    broker.stall()

    producer.send_async(jms.Message(b"x" * 10_000_000), listener)
    wait_until(lambda: connection.link.writer.queued_bytes == 0)
    producer.send_async(jms.Message("never written"), listener)
    broker.cut(reset=True)
    listener.wait_for(2)

    assert all(isinstance(e, jms.ConnectionLostError) for e in listener.errors)
    assert [e.written for e in listener.errors] == [True, False]  # type: ignore[union-attr]
    session.close()
    assert session.sends.in_flight == 0


def test_connection_loss_fails_the_sends_on_the_wire_in_order_and_a_new_one_goes_on(
    broker: ScriptedBroker, connect: Connect
) -> None:
    listener = Listener()
    old = connect(broker).create_session().create_producer(DESTINATION)
    broker.on("SEND").hold_receipt()

    for body in "12345":
        old.send_async(jms.Message(body), listener)
    broker.wait_for_held(5)
    broker.cut()
    listener.wait_for(5)
    broker.forget_rules()
    new = connect(broker).create_session().create_producer(DESTINATION)
    new.send_async(jms.Message("6"), listener)
    listener.wait_for(6)

    assert listener.bodies == list("123456")
    assert all(isinstance(e, jms.ConnectionLostError) for e in listener.errors[:5])
    assert listener.errors[5] is None
    with pytest.raises(jms.ConnectionLostError):
        old.send(jms.Message("7"))


def test_a_send_that_was_never_written_is_never_sent_after_its_deadline(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    connection, listener = connect(broker), Listener()
    producer = connection.create_session().create_producer(DESTINATION)
    broker.stall()

    big = producer.submit(jms.Message(b"x" * 10_000_000))
    wait_until(lambda: connection.link.writer.queued_bytes == 0)
    producer.send_async(jms.Message("late"), listener, timeout=0.3)
    wait_until(lambda: producer.session.sends.in_flight == 1)
    broker.resume()
    big.result(30)
    producer.send(jms.Message("after"))

    (error,) = (listener.wait_for(1), listener.errors)[1]
    assert isinstance(error, jms.SendTimeoutError)
    assert error.written is False
    assert [f.text[:5] for f in broker.received("SEND")] == ["xxxxx", "after"]


def test_a_message_can_be_sent_again_from_its_on_exception(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=1).reject("not now")
    listener = Listener()

    producer.send_async(
        jms.Message("x"),
        (print, lambda message, error: producer.send_async(message, listener)),
    )

    assert listener.wait_for(1) == ["x"]
    assert listener.errors == [None]
    first, second = broker.received("SEND")
    assert first["txmsg-id"] == second["txmsg-id"]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_callback_that_raises_is_logged_and_is_no_failure_of_the_message(
    broker: ScriptedBroker,
    producer: jms.MessageProducer,
    caplog: pytest.LogCaptureFixture,
    exception: type[BaseException],
) -> None:
    told: list[str] = []

    def broken(message: jms.Message) -> None:
        told.append("completion")
        raise exception("a bug of the application")

    message = jms.Message("x")
    producer.send_async(message, (broken, lambda m, e: told.append("exception")))
    producer.close()

    assert told == ["completion"]
    assert str(message.message_id) in caplog.text
    assert "a bug of the application" in caplog.text


def test_a_late_send_is_unknown_at_its_deadline_and_the_connection_lives(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", nth=1).drop_receipt()

    with pytest.raises(jms.SendTimeoutError, match="same message id") as caught:
        producer.send(jms.Message("x"), timeout=0.2)
    producer.send(jms.Message("y"))

    assert isinstance(caught.value, TimeoutError)
    assert caught.value.written is True


def test_a_broker_that_never_answers_is_given_up_after_some_timeouts(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, give_up_after_timeouts=2, send_timeout=0.1)
    producer = connection.create_session().create_producer(DESTINATION)
    broker.on("SEND").drop_receipt()

    for _ in range(2):
        with pytest.raises(jms.SendTimeoutError):
            producer.send(jms.Message("x"), timeout=0.1)

    wait_until(lambda: connection.failed)
    assert "2 frames in a row" in str(connection.error)


def test_a_receipt_between_timeouts_keeps_the_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, give_up_after_timeouts=2)
    producer = connection.create_session().create_producer(DESTINATION)
    broker.on("SEND", where=lambda frame: frame.text == "lost").drop_receipt()

    for body in ("lost", "kept", "lost", "kept"):
        if body == "kept":
            producer.send(jms.Message(body))
        else:
            with pytest.raises(jms.SendTimeoutError):
                producer.send(jms.Message(body), timeout=0.1)

    assert not connection.failed


def test_a_receipt_that_beats_the_return_of_the_send_gives_one_callback_elsewhere(
    broker: ScriptedBroker,
    producer: jms.MessageProducer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test injects a receipt before the send returns. The callback runs once, in
    another thread. The broker's receipt arrives later, and is ignored."""
    link, listener = producer.session.link, Listener()
    put = link.writer.put

    def put_and_answer(data: bytes, entry: Pending | None = None) -> None:
        put(data)
        if entry is not None:
            link.on_frames([Receipt(entry.receipt)])

    monkeypatch.setattr(link.writer, "put", put_and_answer)
    producer.send_async(jms.Message("x"), listener)
    listener.wait_for(1)
    wait_until(lambda: link.ledger.ignored == 1)

    assert listener.told == [("x", None)]
    assert threading.current_thread() not in listener.threads
