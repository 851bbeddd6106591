"""`send_batch`: each message has one certain outcome, and only the bad message is
rejected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import ADDRESS, DESTINATION

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


def batch_of(count: int) -> list[tuple[str, jms.Message]]:
    return [(DESTINATION, jms.Message(str(n))) for n in range(count)]


@pytest.mark.parametrize("profile", ["classic", "artemis", "rabbitmq"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 500, 1500])
def test_every_message_is_stored_once_and_in_order(
    scripted: Scripted, connect: Connect, profile: str, count: int
) -> None:
    broker = scripted(profile)
    session = connect(broker).create_session()

    outcomes = session.send_batch(batch_of(count))

    assert outcomes == [None] * count
    address = DESTINATION if profile == "artemis" else ADDRESS
    stored = [int(message.body) for message in broker.stored(address)]
    assert stored == list(range(count))


def test_on_activemq_a_batch_is_one_transaction_with_one_receipt(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    messages = batch_of(100)

    session.send_batch(messages)

    sent = broker.received("SEND")
    assert {frame.receipt for frame in sent} == {None}
    assert len({frame.transaction for frame in sent}) == 1
    assert len(broker.received("COMMIT")) == 1
    ids = [frame["txmsg-id"] for frame in sent]
    assert ids == [message.message_id for _, message in messages]


def test_on_rabbitmq_the_receipts_of_a_batch_are_pipelined(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    broker.on("SEND").permute_receipts(100, seed=1)  # none before all have come
    session = connect(broker).create_session()

    assert session.send_batch(batch_of(100)) == [None] * 100
    assert all(frame.receipt for frame in broker.received("SEND"))


@pytest.mark.parametrize("bad", [0, 5, 9])
def test_on_activemq_only_the_refused_message_is_rejected(
    broker: ScriptedBroker, session: jms.Session, bad: int
) -> None:
    broker.on("SEND", where=lambda f: f.text == str(bad)).reject("not authorised")

    outcomes = session.send_batch(batch_of(10))

    assert [n for n, error in enumerate(outcomes) if error] == [bad]
    assert isinstance(outcomes[bad], jms.SendRejectedError)
    stored = [int(message.body) for message in broker.stored(ADDRESS)]
    assert stored == [n for n in range(10) if n != bad]
    assert not session.connection.failed


def test_a_refused_message_holds_back_its_key_in_the_next_part_of_the_batch(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    """A batch of more than a thousand messages is sent in two transactions."""
    broker.on("SEND", where=lambda f: f.text == "7").reject("not authorised")
    keys = ["k" if n in (7, 1100) else "" for n in range(1200)]

    outcomes = session.send_batch(batch_of(1200), keys=keys)

    assert isinstance(outcomes[7], jms.SendRejectedError)
    assert isinstance(outcomes[1100], jms.SendHeldBackError)
    stored = [int(message.body) for message in broker.stored(ADDRESS)]
    assert stored == [n for n in range(1200) if n not in (7, 1100)]


def test_batch_with_keys_for_only_some_messages_is_not_sent(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    with pytest.raises(ValueError, match="argument"):
        session.send_batch(batch_of(5), keys=["k"])
    assert not broker.received("SEND")


def test_a_refused_transaction_ends_the_connection_when_each_message_has_its_outcome(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    """ActiveMQ may send the ERROR for a SEND after the barrier's receipt, and then
    refuse COMMIT. The connection ends as soon as each message has its outcome."""
    broker.on("COMMIT", nth=1).reject("marked rollback only")
    bad = broker.on("SEND", where=lambda f: f.text == "7" and f.receipt is not None)
    bad.reject("not authorised")

    outcomes = session.send_batch(batch_of(10))

    assert [n for n, error in enumerate(outcomes) if error] == [7]
    assert isinstance(outcomes[7], jms.SendRejectedError)
    assert session.connection.failed
    with pytest.raises(jms.ConnectionLostError):
        session.send_batch(batch_of(1))


def test_unencodable_message_is_rejected_alone(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    outcomes = session.send_batch(
        [
            (DESTINATION, jms.Message("good")),
            (DESTINATION, jms.Message(object())),
            ("", jms.Message("nowhere")),
            (DESTINATION, jms.Message("x", {"destination": "/queue/other"})),
            (DESTINATION, jms.Message("good too")),
        ]
    )

    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        jms.SendRejectedError,
        jms.SendRejectedError,
        jms.SendRejectedError,
        type(None),
    ]
    assert isinstance(outcomes[1].__cause__, jms.MessageFormatError)  # type: ignore[union-attr]
    assert len(broker.stored(ADDRESS)) == 2


@pytest.mark.parametrize("isolate", [False, True])
def test_on_rabbitmq_a_bad_message_ends_the_connection_and_isolation_finds_it(
    scripted: Scripted, connect: Connect, isolate: bool
) -> None:
    broker = scripted("rabbitmq")
    broker.on("SEND", where=lambda f: f.text == "5").reject("PRECONDITION_FAILED")
    session = connect(broker).create_session()

    outcomes = session.send_batch(batch_of(10), isolate=isolate)

    if isolate:
        assert outcomes[:5] == [None] * 5
        assert isinstance(outcomes[5], jms.SendRejectedError)
        left = outcomes[6:]
    else:
        left = [outcome for outcome in outcomes if outcome is not None]
        assert any("PRECONDITION" in e.broker_message for e in left)  # type: ignore[union-attr]
    assert left
    assert all(isinstance(error, jms.ConnectionLostError) for error in left)


def test_a_batch_cut_before_commit_was_certainly_not_stored(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND", nth=50).cut()

    outcomes = session.send_batch(batch_of(100))

    assert all(isinstance(error, jms.ConnectionLostError) for error in outcomes)
    assert {error.written for error in outcomes} == {False}  # type: ignore[union-attr]
    assert broker.stored(ADDRESS) == []


def test_a_batch_whose_barrier_is_not_answered_waits_for_no_abort(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("ABORT").drop_receipt()

    outcomes = session.send_batch(batch_of(4), timeout=0.5)

    assert all(isinstance(error, jms.ConnectionLostError) for error in outcomes)
    assert {(e.silent, e.written) for e in outcomes} == {(True, False)}  # type: ignore[union-attr]
    (barrier,) = broker.received("ABORT")
    assert str(barrier.transaction).startswith("barrier")


def test_the_commit_of_a_batch_has_a_time_out_of_its_own(
    broker: ScriptedBroker, connect: Connect
) -> None:
    """The broker answers the barrier just in time, and COMMIT after that time-out."""
    session = connect(broker, send_timeout=3).create_session()
    broker.on("ABORT").hold_receipt()
    broker.on("COMMIT").hold_receipt()

    def answer() -> None:
        broker.wait_for("COMMIT")
        time_out_of_the_barrier.wait(2.5)
        broker.release()

    time_out_of_the_barrier = threading.Event()
    first = threading.Timer(1.5, broker.release)
    second = threading.Thread(target=answer)
    first.start()
    second.start()

    outcomes = session.send_batch(batch_of(4))

    first.join()
    second.join()
    assert outcomes == [None] * 4


def test_the_barrier_and_the_commit_of_a_batch_share_the_time_out_of_the_call(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("ABORT").hold_receipt()
    broker.on("COMMIT").drop_receipt()
    late = threading.Timer(2.0, broker.release)
    late.start()

    began = time.monotonic()
    outcomes = session.send_batch(batch_of(4), timeout=3)
    took = time.monotonic() - began
    late.join()

    assert all(isinstance(e, jms.SendOutcomeUnknownError) for e in outcomes)
    assert len(broker.received("COMMIT")) == 1
    assert took < 4.5


@pytest.mark.parametrize("stored", [True, False])
def test_a_batch_cut_at_commit_is_of_unknown_outcome(
    broker: ScriptedBroker, session: jms.Session, stored: bool
) -> None:
    rule = broker.on("COMMIT")
    if stored:
        rule.cut_after()
    else:
        rule.cut()

    outcomes = session.send_batch(batch_of(100))

    assert all(isinstance(e, jms.SendOutcomeUnknownError) for e in outcomes)
    assert {error.written for error in outcomes} == {True}  # type: ignore[union-attr]
    assert len(broker.stored(ADDRESS)) == (100 if stored else 0)


def test_receipts_that_never_come_make_their_messages_unknown_and_no_others(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    broker.on("SEND", where=lambda f: int(f.text) % 3 == 0).drop_receipt()
    session = connect(broker, give_up_after_timeouts=0).create_session()

    outcomes = session.send_batch(batch_of(9), timeout=0.5)

    late = [n for n, error in enumerate(outcomes) if error]
    assert late == [0, 3, 6]
    assert all(isinstance(outcomes[n], jms.SendTimeoutError) for n in late)


def test_a_batch_is_cut_into_parts_by_bytes(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker, max_in_flight_bytes=100_000).create_session()
    messages = [(DESTINATION, jms.Message(b"x" * 20_000)) for _ in range(16)]

    assert session.send_batch(messages) == [None] * 16
    assert len(broker.received("COMMIT")) == 4


def test_a_transacted_session_has_no_batches(
    broker: ScriptedBroker, connect: Connect
) -> None:
    session = connect(broker).create_session(transacted=True)

    with pytest.raises(jms.IllegalStateError, match="transacted=False"):
        session.send_batch(batch_of(1))


def test_a_lost_connection_refuses_the_next_batch_as_certainly_not_written(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    session.connection.link.lose("for the test")

    with pytest.raises(jms.ConnectionLostError) as caught:
        session.send_batch(batch_of(3))

    assert caught.value.written is False
