"""Subscriptions, connections and threads end cleanly, even if an error occurs
meanwhile."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.jms.completion import CompletionPool
from django_txmsg.jms.ledger import Pending
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

from .conftest import ADDRESS, DESTINATION, Listener, ours

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


@pytest.mark.parametrize("fate", ["refused", "unanswered"])
def test_a_subscription_that_does_not_end_costs_no_send_its_outcome(
    broker: ScriptedBroker, connect: Connect, fate: str
) -> None:
    connection = connect(broker, close_timeout=0.2)
    first, second = connection.create_session(), connection.create_session()
    first.create_consumer("in")
    rule = broker.on("UNSUBSCRIBE")
    if fate == "refused":
        rule.reject("not yours")
    else:
        rule.drop_receipt()
    broker.on("SEND").hold_receipt()
    listener = Listener()
    second.create_producer(DESTINATION).send_async(jms.Message("x"), listener)
    broker.wait_for_held(1)

    closing = threading.Thread(target=connection.close)
    closing.start()
    broker.wait_for("UNSUBSCRIBE")
    wait_until(lambda: second.sends._awaited)
    broker.release()
    closing.join(30)

    assert listener.told == [("x", None)]
    assert broker.received("*")[-1].command == "DISCONNECT"


def test_what_ends_a_with_block_does_not_hide_what_happened_in_it(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session()
    broker.on("UNSUBSCRIBE").reject("not yours")

    with pytest.raises(KeyError), session.create_consumer("in"):
        raise KeyError

    broker.on("UNSUBSCRIBE").reject("not yours")
    consumer = session.create_consumer("in")
    with pytest.raises(jms.RequestRejectedError, match="not yours"):
        session.unsubscribe(consumer)


def test_a_subscription_without_an_answer_is_ended_and_takes_no_messages(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    session = connection.create_session()
    broker.on("SUBSCRIBE", nth=1).drop_receipt()

    with pytest.raises(jms.RequestTimeoutError):
        session.create_consumer("in", timeout=0.1)
    consumer = session.create_consumer("in")
    for n in range(10):
        broker.put("/queue/in", str(n))
    bodies = [consumer.receive(10).body for _ in range(10)]  # type: ignore[union-attr]

    assert len(bodies) == 10
    (ended,) = broker.received("UNSUBSCRIBE")
    assert ended["id"] == broker.received("SUBSCRIBE")[0]["id"]


def test_unreferenced_connection_ends_with_a_warning(
    broker: ScriptedBroker,
) -> None:
    before = ours()
    connection = jms.ConnectionFactory(broker.url).create_connection()
    session = connection.create_session()
    consumer = session.create_consumer("in")
    session.create_producer(DESTINATION).send(jms.Message("x"))
    gone = weakref.ref(connection)

    del connection, session, consumer  # which is a circle
    with pytest.warns(ResourceWarning, match="was not closed"):
        gc.collect()
    gc.collect()  # the recorded warning held its source until here

    assert gone() is None
    broker.wait_for_connections(0)
    wait_until(lambda: ours() <= before)


def test_a_session_or_a_consumer_keeps_its_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    factory = jms.ConnectionFactory(broker.url)
    consumer = factory.create_connection().create_session().create_consumer("in")
    gc.collect()
    broker.put("/queue/in", "x")

    message = consumer.receive(10)

    assert message is not None
    assert message.body == b"x"
    session = consumer._on_received.__self__  # type: ignore[attr-defined]
    session.connection.close()


def test_a_commit_that_was_never_written_is_rolled_back_and_not_in_doubt(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    connection = connect(broker)
    session = connection.create_session(transacted=True)
    session.create_producer(DESTINATION).send(jms.Message("x"))
    connection.ping()
    blocker = connection.create_session().create_producer("other")
    broker.stall()
    blocker.submit(jms.Message(b"x" * 10_000_000))
    wait_until(lambda: connection.link.writer.queued_bytes == 0)
    transaction = session.transaction()
    transaction._has_loose_frames = False  # so says the ping

    raised: list[BaseException] = []

    def commit() -> None:
        try:
            session.commit(timeout=0.3)
        except jms.MessagingError as error:
            raised.append(error)

    committing = threading.Thread(target=commit)
    committing.start()
    wait_until(lambda: transaction.committing and transaction.committing.settled)
    broker.resume()
    committing.join(30)

    assert [type(error) for error in raised] == [jms.TransactionRolledBackError]
    assert broker.received("COMMIT") == []
    assert broker.stored(ADDRESS) == []


def test_short_timeouts_do_not_end_a_connection_whose_broker_answers(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker, send_timeout=30)
    session, listener = connection.create_session(), Listener()
    broker.on("SEND", destination="/queue/full").park()
    broker.on("SEND", destination="/queue/slow").hold_receipt()
    healthy = session.connection
    slow = connection.create_session().create_producer("slow")
    slow.send_async(jms.Message("slow"), listener)

    full = session.create_producer("full")
    futures = [full.submit(jms.Message(n), timeout=0.1) for n in range(5)]
    errors = [future.exception(30) for future in futures]
    broker.wait_for_held(6)
    assert all(isinstance(error, jms.SendTimeoutError) for error in errors)
    assert not healthy.failed
    broker.release()

    assert listener.wait_for(1) == ["slow"]
    assert listener.errors == [None]


def test_callbacks_run_as_soon_as_there_are_threads_again(
    broker: ScriptedBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, listener = connect(broker).create_session(), Listener()
    producer = session.create_producer(DESTINATION)
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "jms-completion":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        producer.send_async(jms.Message("1"), listener)
        assert refused.wait(30)
        wait_until(lambda: session.link.pool.stranded)
    assert listener.told == []
    producer.send_async(jms.Message("2"), listener)

    assert listener.wait_for(2) == ["1", "2"]
    assert threading.current_thread() not in listener.threads
    assert not session.link.pool.stranded


def test_a_pool_whose_tasks_wait_for_each_other_has_a_thread_for_each() -> None:
    from django_txmsg.jms.completion import waiting

    pool, done = CompletionPool(max_workers=1), threading.Event()
    ended: list[bool] = []

    def outer() -> None:
        pool.submit(done.set)
        with waiting():
            ended.append(done.wait(30))

    pool.submit(outer)

    wait_until(lambda: ended)
    assert ended == [True]


def test_what_was_received_can_be_sent_on_as_a_copy(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put(
        "/queue/in", '{"a": 1}', {"content-type": "application/json", "colour": "red"}
    )
    received = session.create_consumer("in").receive(10)
    assert received is not None
    producer = session.create_producer(DESTINATION)
    with pytest.raises(jms.MessageFormatError, match="copy"):
        producer.send(received)

    producer.send(received.copy())
    producer.send(received.copy())

    first, second = broker.received("SEND")
    assert first.body == b'{"a": 1}'
    assert first["content-type"] == "application/json"
    assert first["colour"] == "red"
    assert len({first["txmsg-id"], second["txmsg-id"], received.message_id}) == 3
    assert received.copy().body == {"a": 1}


def test_non_message_in_a_batch_is_rejected_alone(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    batch = [
        (DESTINATION, jms.Message("1")),
        (DESTINATION, "no message"),
        (DESTINATION, jms.Message(deep)),
        (DESTINATION, jms.Message("2")),
    ]

    outcomes = session.send_batch(batch)  # type: ignore[arg-type]

    rejected = jms.SendRejectedError
    none = type(None)
    assert [type(one) for one in outcomes] == [none, rejected, rejected, none]
    assert [m.body for m in broker.stored(ADDRESS)] == [b"1", b"2"]


def test_a_send_adds_no_header_to_the_message(
    broker: ScriptedBroker, connect: Connect
) -> None:
    context = jms.Context(
        connect(broker), transacted=False, ack_mode=jms.AckMode.INDIVIDUAL
    )
    message, listener = jms.Message("x"), (id, print)
    producer = context.create_producer()

    producer.set_async(listener)
    with contextlib.suppress(jms.MessagingError):
        producer.set_async(None).send(DESTINATION, message)

    assert broker.received("SEND")[0]["txmsg-id"]
    assert message.headers == {}
    assert producer.set_async(listener).get_async() is listener


@pytest.mark.parametrize("how", ["send", "send_async", "submit"])
def test_a_send_leaves_nothing_to_the_garbage_collector(
    producer: jms.MessageProducer, how: str
) -> None:
    def send() -> None:
        if how == "send":
            producer.send(jms.Message("x"))
        elif how == "send_async":
            producer.send_async(jms.Message("x"), Listener())
        else:
            producer.submit(jms.Message("x")).result(30)

    def kept() -> list[object]:
        # type(), since isinstance() would open whatever lazy object another test left
        return [one for one in gc.get_objects() if type(one) is Pending]

    gc.collect()
    gc.disable()
    try:
        before = len(kept())
        for _ in range(10):
            send()
        wait_until(lambda: len(kept()) <= before)
    finally:
        gc.enable()
