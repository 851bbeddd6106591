"""Transacted sessions are committed, rolled back or in doubt, and the client knows
which."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import ADDRESS, DESTINATION, Gate, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]
PROFILES = ["classic", "artemis", "rabbitmq"]


def commands(broker: ScriptedBroker) -> list[str]:
    """Return the commands that the client has sent after CONNECT, except the commands
    for barriers."""
    return [
        frame.command
        for frame in broker.received("*")
        if frame.command != "CONNECT"
        and not (frame.transaction or "").startswith("barrier")
    ]


@pytest.fixture(params=PROFILES)
def any_broker(request: pytest.FixtureRequest, scripted: Scripted) -> ScriptedBroker:
    """A scripted broker, with each profile in turn."""
    return scripted(request.param)


def test_sends_are_stored_by_the_commit_and_not_before(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(any_broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)

    producer.send(jms.Message("1"))
    producer.send(jms.Message("2"))
    session.connection.ping()
    address = any_broker.received("SEND")[0].destination
    assert any_broker.stored(address) == []
    session.commit()

    assert [m.body for m in any_broker.stored(address)] == [b"1", b"2"]
    assert commands(any_broker) == ["BEGIN", "SEND", "SEND", "COMMIT"]
    assert any_broker.received("COMMIT")[0].receipt is not None


def test_a_rollback_stores_nothing_and_the_next_transaction_is_new(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(any_broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)

    producer.send(jms.Message("1"))
    session.rollback()
    producer.send(jms.Message("2"))
    session.commit()

    address = any_broker.received("SEND")[0].destination
    assert [m.body for m in any_broker.stored(address)] == [b"2"]
    names = {f.transaction for f in any_broker.received("SEND")}
    assert len(names) == 2


def test_an_empty_transaction_writes_nothing(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)

    session.commit()
    session.rollback()
    session.connection.ping()

    assert commands(broker) == []


def test_what_was_received_is_acknowledged_by_the_commit(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    queue = "in" if any_broker.profile.name == "artemis" else "/queue/in"
    any_broker.put(queue, "delivery", {"destination-type": "ANYCAST"})
    session = connect(any_broker).create_session(transacted=True)
    consumer = session.create_consumer("in")

    message = consumer.receive(10)
    assert message is not None
    session.create_producer(DESTINATION).send(jms.Message("reply"))
    session.commit()
    session.connection.close()

    assert len(any_broker.received("ACK")) == 1
    assert any_broker.stored(queue) == []


def test_a_rollback_lets_the_message_be_received_again(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    queue = "in" if any_broker.profile.name == "artemis" else "/queue/in"
    any_broker.put(queue, "delivery", {"destination-type": "ANYCAST"})
    session = connect(any_broker).create_session(transacted=True)
    consumer = session.create_consumer("in")

    first = consumer.receive(10)
    session.rollback()
    again = consumer.receive(10)
    session.commit()
    session.connection.close()

    assert first is again
    assert again is not None
    assert again.redelivered
    assert any_broker.stored(queue) == []


def test_a_rollback_may_keep_the_message_back_until_it_is_adopted(
    broker: ScriptedBroker, connect: Connect
) -> None:
    broker.put("/queue/in", "delivery")
    session = connect(broker).create_session(transacted=True)
    consumer = session.create_consumer("in")

    message = consumer.receive(10)
    assert message is not None
    session.rollback(redeliver=False)
    assert consumer.receive(0.1) is None
    session.adopt(message)
    session.commit()

    assert [frame["id"] for frame in broker.received("ACK")] == [message.ack_id]


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_commit_and_abort_wait_for_all_sends_and_callbacks(
    broker: ScriptedBroker, connect: Connect, verb: str
) -> None:
    session = connect(broker).create_session(transacted=True)
    producer, gate = session.create_producer(DESTINATION), Gate()
    broker.on("SEND", nth=2).hold_receipt()
    producer.send_async(jms.Message("1"), gate)
    producer.send_async(jms.Message("2"), gate)
    gate.entered.wait(30)

    ending = threading.Thread(target=getattr(session, verb))
    ending.start()
    gate.open.set()
    ending.join(0.3)
    assert ending.is_alive()
    assert broker.received("COMMIT") + broker.received("ABORT") == []
    broker.wait_for_held(1)
    broker.release()
    ending.join(30)

    assert gate.told == [("1", None), ("2", None)]
    assert commands(broker)[-1] == {"commit": "COMMIT", "rollback": "ABORT"}[verb]


def test_on_rabbitmq_a_barrier_settles_the_sends_that_commit_waits_for(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()
    producer.send_async(jms.Message("1"), listener)
    producer.send_async(jms.Message("2"), listener)
    told_at_commit: list[int] = []
    broker.on("COMMIT").call_with(
        lambda talk, frame: (told_at_commit.append(len(listener.told)),
                             talk.handle(frame))
    )  # fmt: skip

    session.commit()

    assert told_at_commit == [2]
    assert listener.told == [("1", None), ("2", None)]


def test_a_listeners_send_that_failed_makes_commit_abort_and_say_rolled_back(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("SEND", nth=2).reject("quota")

    for body in "123":
        producer.send_async(jms.Message(body), listener)
    with pytest.raises(jms.TransactionRolledBackError, match="quota"):
        session.commit()

    assert broker.received("COMMIT") == []
    assert len(broker.received("ABORT", where=lambda f: f.receipt is not None)) >= 1
    assert broker.stored(ADDRESS) == []
    assert [type(error) for error in listener.errors] == [
        type(None), jms.SendRejectedError, type(None),
    ]  # fmt: skip


def test_a_send_without_receipt_that_failed_rolls_the_transaction_back(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    broker.on("SEND", nth=2).reject("not authorised")

    for body in "123":
        producer.send(jms.Message(body))
    with pytest.raises(jms.TransactionRolledBackError, match="not authorised"):
        session.commit()
    producer.send(jms.Message("4"))
    session.commit()

    assert [m.body for m in broker.stored(ADDRESS)] == [b"4"]


def test_the_reason_of_a_refused_commit_may_come_after_the_refusal(
    broker: ScriptedBroker, connect: Connect
) -> None:
    """ActiveMQ refuses a COMMIT, and sends the reason later in an ERROR without a
    receipt id. The client's error contains the reason."""
    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    broker.on("COMMIT", nth=1).call_with(
        lambda talk, frame: (
            talk.refuse(frame, "marked rollback only"),
            broker.write(b"ERROR\nmessage:not authorised\n\n\x00"),
        )
    )

    producer.send(jms.Message("1"))
    with pytest.raises(jms.TransactionRolledBackError, match="not authorised"):
        session.commit()


def test_a_refused_commit_ends_the_connection_that_would_keep_its_transaction(
    broker: ScriptedBroker, connect: Connect
) -> None:
    """After a refused COMMIT, ActiveMQ keeps the transaction, and answers ABORT with
    "Invalid transaction id". So the client ends the connection."""
    session = connect(broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    broker.on("COMMIT", nth=1).reject("marked rollback only")

    with pytest.raises(jms.TransactionRolledBackError, match="marked rollback only"):
        session.commit()

    assert session.connection.failed
    session.rollback()


def test_the_reason_of_a_refused_commit_may_come_between_barrier_and_commit(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    broker.on("COMMIT").reject("marked rollback only")
    transaction, ledger = session.transaction(), session.link.ledger
    session.link.barrier(owner=transaction).wait()
    transaction._has_loose_frames = False  # so says the barrier
    broker.write(b"ERROR\nmessage:not authorised\n\n\x00")
    wait_until(lambda: ledger.ignored)

    with pytest.raises(jms.TransactionRolledBackError, match="not authorised"):
        session.commit()


def test_a_connection_lost_before_commit_was_written_means_rolled_back(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(any_broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    any_broker.wait_for("SEND")
    any_broker.cut()
    wait_until(lambda: session.connection.failed)

    with pytest.raises(jms.TransactionRolledBackError, match="lost"):
        session.commit()

    assert any_broker.received("COMMIT") == []


@pytest.mark.parametrize("after", [True, False])
def test_a_connection_lost_after_commit_was_written_means_in_doubt(
    any_broker: ScriptedBroker, connect: Connect, after: bool
) -> None:
    session = connect(any_broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    rule = any_broker.on("COMMIT")
    if after:
        rule.cut_after()
    else:
        rule.cut()

    with pytest.raises(jms.TransactionInDoubtError, match="in doubt"):
        session.commit()

    assert session.connection.failed
    assert len(any_broker.received("COMMIT")) == 1  # and never a second time


def test_a_commit_without_an_answer_is_in_doubt_and_ends_the_connection(
    any_broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(any_broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    any_broker.on("COMMIT").drop_receipt()

    with pytest.raises(jms.TransactionInDoubtError):
        session.commit(timeout=0.3)

    assert session.connection.failed


def test_on_rabbitmq_a_commit_is_proven_by_the_confirms_and_not_by_its_receipt(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    broker.on("SEND", nth=2).drop_receipt()

    for body in "123":
        producer.send(jms.Message(body))
    with pytest.raises(jms.TransactionInDoubtError):
        session.commit(timeout=0.3)


def test_on_rabbitmq_an_error_in_the_replay_is_in_doubt_at_once(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    producer = session.create_producer(DESTINATION)
    broker.on("SEND", nth=2).drop_receipt()
    broker.on("COMMIT").call_with(
        lambda talk, frame: (
            broker.write(b"ERROR\nmessage:PRECONDITION_FAILED\n\n\x00"),
            talk.handle(frame),
        )
    )

    for body in "123":
        producer.send(jms.Message(body))
    with pytest.raises(jms.TransactionInDoubtError, match="PRECONDITION_FAILED"):
        session.commit()


def test_on_rabbitmq_a_commit_without_its_acknowledgements_is_in_doubt(
    scripted: Scripted, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost after the broker has committed. The error must not say
    that nothing was written: the caller would send the messages again."""
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    consumer = session.create_consumer("in")
    broker.put("/queue/in", "request")
    assert consumer.receive(10) is not None
    session.create_producer("out").send(jms.Message("reply"))
    link = session.link
    check = link.check_alive

    def lose_after_commit() -> None:
        if broker.stored("/queue/out"):
            link.lose("the node went down")
        check()

    monkeypatch.setattr(link, "check_alive", lose_after_commit)
    with pytest.raises(jms.TransactionInDoubtError, match="is committed"):
        session.commit()

    assert [one.body for one in broker.stored("/queue/out")] == [b"reply"]


def test_closing_a_transacted_session_rolls_its_transaction_back_after_draining(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()
    producer.send_async(jms.Message("1"), listener)

    session.close()

    assert listener.told == [("1", None)]
    assert commands(broker) == ["BEGIN", "SEND", "ABORT"]
    assert broker.stored(ADDRESS) == []


def test_commit_and_rollback_need_a_transacted_session(session: jms.Session) -> None:
    for verb in (session.commit, session.rollback):
        with pytest.raises(jms.IllegalStateError, match="transacted=True"):
            verb()


def test_recover_is_for_sessions_without_transactions(
    broker: ScriptedBroker, connect: Connect
) -> None:
    with pytest.raises(jms.IllegalStateError, match="rollback"):
        connect(broker).create_session(transacted=True).recover()


def test_a_transaction_does_not_outgrow_memory_while_the_broker_reads_nothing(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    connection = connect(broker, max_in_flight_bytes=1_000_000)
    producer = connection.create_session(transacted=True).create_producer("x")
    broker.stall()

    def fill() -> None:
        for _ in range(100):
            producer.send(jms.Message(b"x" * 500_000), timeout=0.3)

    with pytest.raises(jms.WindowFullError, match="not read"):
        fill()
    assert connection.link.writer.queued_bytes < 3_000_000


def test_an_abort_that_is_not_answered_ends_the_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    broker.on("ABORT").drop_receipt()

    session.rollback(timeout=0.2)

    assert session.connection.failed
    assert broker.stored(ADDRESS) == []


def test_on_rabbitmq_a_barrier_without_answer_rolls_back_and_tells_the_listeners(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("ABORT", nth=1).drop_receipt()
    producer.send_async(jms.Message("1"), listener, timeout=0.2)

    with pytest.raises(jms.TransactionRolledBackError):
        session.commit()

    assert [type(error) for error in listener.errors] == [jms.SendTimeoutError]
    assert broker.received("COMMIT") == []


def test_on_rabbitmq_a_lost_connection_tells_the_listeners_of_its_transaction(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    session = connect(broker).create_session(transacted=True)
    producer, listener = session.create_producer(DESTINATION), Listener()
    broker.on("ABORT").drop_receipt()
    producer.send_async(jms.Message("1"), listener)
    broker.wait_for("SEND")

    broker.cut()

    listener.wait_for(1)
    assert isinstance(listener.errors[0], jms.ConnectionLostError)
    with pytest.raises(jms.TransactionRolledBackError):
        session.commit()


def test_a_refused_commit_without_a_reason_does_not_wait_for_long(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("1"))
    broker.on("COMMIT").reject("marked rollback only")

    with pytest.raises(jms.TransactionRolledBackError, match="marked rollback only"):
        session.commit()

    assert session.link.ledger.refused == []


def test_a_rollback_takes_back_only_what_its_own_transaction_received(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)
    consumer = session.create_consumer("in")
    broker.put("/queue/in", "kept back")
    assert consumer.receive(10) is not None
    session.rollback(redeliver=False)

    broker.put("/queue/in", "taken back")
    message = consumer.receive(10)
    session.rollback()

    assert consumer.receive(10) is message
    assert consumer.receive(0.1) is None
