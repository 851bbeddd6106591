"""What the relay and the consumer may rely on, whichever broker is configured."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

import pytest
from django.db import connection

from django_txmsg import wire
from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Broker, Outgoing
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)
from django_txmsg.models import QueueMessage, QueueSubscription
from tests.faults import ManageProcess
from tests.services import ActiveMQ
from tests.services.stomp_server import LIMITED_USER

from .conftest import Party, bodies, take


def numbered(destination: str, count: int) -> list[Outgoing]:
    return [Outgoing(destination, {}, str(number).encode()) for number in range(count)]


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


# -- sending -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 600])
def test_a_batch_is_stored_in_order_and_every_outcome_is_a_receipt(
    party: Party, destination: str, count: int
) -> None:
    with party.open() as session:
        assert session.send(numbered(destination, count)) == [None] * count

    assert party.rest(destination) == numbers(count)


def test_an_isolated_batch_is_stored_as_well(party: Party, destination: str) -> None:
    with party.open() as session:
        assert session.send(numbered(destination, 5), isolate=True) == [None] * 5

    assert party.rest(destination) == numbers(5)


def test_a_batch_may_go_to_many_destinations(party: Party, destination: str) -> None:
    names = [f"{destination}.{number}" for number in range(4)]
    party.send(*(Outgoing(names[i % 4], {}, str(i).encode()) for i in range(40)))

    for index, name in enumerate(names):
        assert party.rest(name) == numbers(40)[index::4]


def ship(broker: Broker, batch: list[Outgoing]) -> dict[bytes, BrokerError | None]:
    """Send until each message has its outcome, as the relay does."""
    outcomes: dict[bytes, BrokerError | None] = {}
    isolate = False
    for _ in range(2 * len(batch)):
        left = [one for one in batch if one.body not in outcomes]
        if not left:
            return outcomes
        with broker.open() as session:
            answers = session.send(left, isolate=isolate)
        for one, answer in zip(left, answers, strict=True):
            hung_up_on = isolate and getattr(answer, "written", False)
            if answer is None or isinstance(answer, DispatchRejected) or hung_up_on:
                outcomes[one.body] = answer
        isolate = any(isinstance(answer, DispatchUnknown) for answer in answers)
    raise AssertionError(f"no end to it: {outcomes}")


@pytest.mark.parametrize("count", [3, 50])
def test_a_message_the_broker_refuses_holds_up_no_other(
    served: Party, allowed: str, count: int
) -> None:
    batch = numbered(allowed, count)
    batch[count // 2] = Outgoing("forbidden", {}, b"bad")

    outcomes = ship(served.broker(user=LIMITED_USER), batch)

    bad = outcomes.pop(b"bad")
    assert isinstance(bad, BrokerError)
    assert set(outcomes.values()) == {None}
    good = [one.body for one in batch if one.body != b"bad"]
    # Resent after a hang-up: at least once, never less.
    assert sorted(set(served.rest(allowed))) == sorted(good)


@pytest.mark.parametrize("count", [3, 50])
def test_what_follows_a_refused_message_of_its_key_is_held_back(
    activemq: ActiveMQ, destination: str, count: int
) -> None:
    allowed = f"allowed.{destination}"
    key = {wire.KEY: "k"}
    batch = [Outgoing("forbidden", key, b"first"), Outgoing(allowed, key, b"second")]
    batch += [Outgoing(allowed, {}, b"other") for _ in range(count - 2)]
    broker = make_broker("default", activemq.url(user=LIMITED_USER))

    with broker.open() as session:
        first, second, *others = session.send(batch)

    assert isinstance(first, DispatchRejected)
    assert isinstance(second, DispatchHeld)
    assert set(others) == {None}


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"name": "NUL \0"}, id="NUL"),
        pytest.param({"": "no name"}, id="no-name"),
        pytest.param({"name": "half a \ud83d pair"}, id="surrogate"),
    ],
)
@pytest.mark.parametrize("count", [3, 50])
def test_headers_no_broker_can_carry_are_refused_alone_or_arrive_whole(
    party: Party, destination: str, bad: dict[str, str], count: int
) -> None:
    batch = numbered(destination, count)
    batch[1] = Outgoing(destination, bad, b"odd")
    with party.open() as session:
        outcomes = session.send(batch)
        odd = outcomes.pop(1)
        assert outcomes == [None] * (count - 1)
        assert odd is None or isinstance(odd, DispatchRejected)

    with party.consumer(destination, prefetch=count) as session:
        found = {one.body: one for one in take(session, count - (odd is not None))}
        session.ack(list(found.values()))
    assert len(found) == count - (odd is not None)
    if odd is None:
        assert found[b"odd"].headers.items() >= bad.items()


# -- receiving ---------------------------------------------------------------------


def test_what_is_acknowledged_never_comes_again(party: Party, destination: str) -> None:
    party.send(*numbered(destination, 10))
    with party.consumer(destination) as session:
        deliveries = take(session, 10)
        session.ack(deliveries[:4])
        session.ack(deliveries[4:])

    assert bodies(deliveries) == numbers(10)
    assert [one.redelivered for one in deliveries] == [False] * 10
    assert {one.destination for one in deliveries} == {destination}
    assert len({one.broker_message_id for one in deliveries} - {""}) == 10
    assert party.rest(destination) == []


def test_nothing_comes_from_an_empty_destination(
    party: Party, destination: str
) -> None:
    with party.consumer(destination) as session:
        began = time.monotonic()
        assert session.receive(0.2) is None
        assert time.monotonic() - began >= 0.19
        assert session.receive(0) is None


def test_what_is_not_acknowledged_comes_again_when_its_session_ends(
    party: Party, destination: str
) -> None:
    party.send(*numbered(destination, 4))
    with party.consumer(destination) as session:
        deliveries = take(session, 4)
        session.ack([deliveries[1]])

    with party.consumer(destination) as session:
        again = take(session, 3)
        session.ack(again)
    assert sorted(bodies(again)) == [b"0", b"2", b"3"]
    assert [one.redelivered for one in again] == [True] * 3
    assert party.rest(destination) == []


def test_what_a_killed_consumer_had_comes_again(
    party: Party, destination: str, manage: Callable[..., ManageProcess]
) -> None:
    party.send(*numbered(destination, 3))
    url = party.broker()._url
    consumer = manage(
        "shell",
        "-c",
        f"from tests.contract.holder import hold; hold({url!r}, {destination!r})",
    )
    consumer.wait_for_line("holds 2")
    consumer.kill()

    with party.consumer(destination) as session:
        again = take(session, 3)
        session.ack(again)
    assert sorted(bodies(again)) == numbers(3)
    redelivered = {one.body: one.redelivered for one in again}
    assert redelivered[b"0"]
    assert redelivered[b"1"]


def test_prefetch_bounds_what_a_consumer_keeps_from_others(
    party: Party, destination: str
) -> None:
    party.send(*numbered(destination, 20))
    slow = party.consumer(destination, prefetch=3)
    [first] = take(slow, 1)
    with party.consumer(destination, prefetch=20) as quick:
        others = take(quick, 17)
        quick.ack(others)
        slow.close()
        rest = take(quick, 3)
        quick.ack(rest)

    found = sorted(int(one.body) for one in [*others, *rest])
    assert found == list(range(20))
    assert first.body in bodies(rest)


def test_a_prefetch_of_one_goes_on_after_each_acknowledgement(
    party: Party, destination: str
) -> None:
    party.send(*numbered(destination, 5))
    with party.consumer(destination, prefetch=1) as session:
        for number in numbers(5):
            [delivery] = take(session, 1)
            assert delivery.body == number
            session.ack([delivery])


# -- what a message carries --------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\0", id="NUL"),
        pytest.param(bytes(range(256)) * 4, id="every-byte"),
        pytest.param(b"\n\nRECEIPT\nreceipt-id:1\n\n\0", id="looks-like-a-frame"),
        pytest.param(b"\xff\xfe\r\n" * 500_000, id="two-megabytes"),
    ],
)
def test_any_bytes_are_a_body(party: Party, destination: str, body: bytes) -> None:
    party.send(Outgoing(destination, {"content-type": "application/x"}, body))
    with party.consumer(destination) as session:
        [delivery] = take(session, 1)
        session.ack([delivery])

    assert delivery.body == body
    assert delivery.problem == ""


def test_any_text_is_a_header(party: Party, destination: str) -> None:
    headers = {
        "colon": "a:b::c:",
        "lines": "one\ntwo\r\nthree\r",
        "backslash": "\\n \\\\ \\",
        "spaces": "  kept on both sides  ",
        "empty": "",
        "quotes": '"it\'s"',
        "not-ascii": "Grüße, 東京, 🚚",
        "näme: with\\every\nthing": "too",
        "long": "x" * 8000,
        "txmsg-id": str(uuid.uuid4()),
    }
    # In a batch as by itself: the two go different ways on some brokers.
    party.send(*(Outgoing(destination, headers, b"x") for _ in range(10)))
    party.send(Outgoing(destination, headers, b"x"))
    with party.consumer(destination, prefetch=20) as session:
        deliveries = take(session, 11)
        session.ack(deliveries)

    for delivery in deliveries:
        received = {name: delivery.headers.get(name) for name in headers}
        assert received == headers
        assert delivery.problem == ""


# -- transactions ------------------------------------------------------------------


def test_a_transaction_sends_and_acknowledges_together(
    party: Party, destination: str
) -> None:
    target = f"{destination}.next"
    party.send(*numbered(destination, 2))
    with party.consumer(destination, transacted=True) as session:
        for number in numbers(2):
            [delivery] = take(session, 1)
            session.enlist(Outgoing(target, {"name": "a:b"}, number))
            session.enlist(Outgoing(target, {}, number))
            session.commit([delivery])

    assert party.rest(target) == [b"0", b"0", b"1", b"1"]
    assert party.rest(destination) == []


def test_a_transaction_rolled_back_sends_nothing_and_its_message_stays_in_hand(
    party: Party, destination: str
) -> None:
    target = f"{destination}.next"
    party.send(*numbered(destination, 1))
    with party.consumer(destination, transacted=True) as session:
        [delivery] = take(session, 1)
        session.enlist(Outgoing(target, {}, b"taken back"))
        session.rollback()
        assert party.rest(target) == []
        session.enlist(Outgoing(target, {}, b"stays"))
        session.commit([delivery])

    assert party.rest(target) == [b"stays"]
    assert party.rest(destination) == []


def test_a_message_can_be_acknowledged_alone_after_a_rollback(
    party: Party, destination: str
) -> None:
    """What the consumer does with a failed message that the database took over."""
    party.send(*numbered(destination, 2))
    with party.consumer(destination, transacted=True, prefetch=1) as session:
        for _ in range(2):
            [delivery] = take(session, 1)
            session.enlist(Outgoing(f"{destination}.next", {}, b"taken back"))
            session.rollback()
            session.ack([delivery])

    assert party.rest(f"{destination}.next") == []
    assert party.rest(destination) == []


def test_a_transaction_its_session_did_not_commit_never_happened(
    party: Party, destination: str
) -> None:
    target = f"{destination}.next"
    party.send(*numbered(destination, 1))
    with party.consumer(destination, transacted=True) as session:
        take(session, 1)
        session.enlist(Outgoing(target, {}, b"never"))

    with party.consumer(destination) as session:
        [again] = take(session, 1)
        session.ack([again])
    assert again.redelivered
    assert party.rest(target) == []


def test_a_transaction_with_nothing_in_it_commits(
    party: Party, destination: str
) -> None:
    with party.consumer(destination, transacted=True) as session:
        session.commit([])
        session.rollback()


# -- topics ------------------------------------------------------------------------


def test_every_subscriber_of_a_topic_gets_a_copy_also_while_it_is_away(
    party: Party, destination: str
) -> None:
    topic = f"topic:{destination}"
    names = [f"{name}-{uuid.uuid4().hex}" for name in ("audit", "stock")]
    for name in names:
        party.consumer(topic, subscriber=name).close()
    party.send(*numbered(topic, 5))

    for name in names:
        with party.consumer(topic, subscriber=name) as session:
            deliveries = take(session, 5)
            session.ack(deliveries)
            assert bodies(deliveries) == numbers(5)
            assert {one.destination for one in deliveries} == {topic}
        with party.consumer(topic, subscriber=name) as session:
            assert session.receive(0.3) is None


def test_a_subscription_that_was_ended_gets_nothing_more(
    party: Party, destination: str
) -> None:
    topic = f"topic:{destination}"
    names = [f"{name}-{uuid.uuid4().hex}" for name in ("gone", "stays")]
    for name in names:
        party.consumer(topic, subscriber=name).close()
    party.send(*numbered(topic, 3))
    party.broker().unsubscribe(topic, names[0])
    party.broker().unsubscribe(topic, names[0])  # as one that never was
    party.send(*numbered(topic, 2))
    for name, count in zip(names, (0, 5), strict=True):
        with party.consumer(topic, subscriber=name) as session:
            session.ack(take(session, count))
            assert session.receive(0.3) is None
        party.broker().unsubscribe(topic, name)


def test_a_topic_does_not_wait_for_who_named_no_subscription(
    party: Party, destination: str
) -> None:
    topic = f"topic:{destination}"
    with party.consumer(topic) as session:
        party.send(*numbered(topic, 2))
        deliveries = take(session, 2)
        session.ack(deliveries)
    party.send(*numbered(topic, 2))
    with party.consumer(topic) as session:
        assert session.receive(0.3) is None
        party.send(Outgoing(topic, {}, b"new"))
        assert bodies(take(session, 1)) == [b"new"]


# -- delays ------------------------------------------------------------------------


def test_a_delayed_message_comes_when_its_time_has_come(
    party: Party, destination: str
) -> None:
    """A long delay before a short one holds nothing up; also in a transaction's
    session, outside of the transaction."""
    with party.open(transacted=True) as session:
        sent = time.monotonic()
        delayed = [
            Outgoing(destination, {"a": "b:c"}, str(delay).encode(), delay=delay)
            for delay in (3.0, 0.5, 1.5)
        ]
        assert session.send_delayed(delayed) == [None] * 3
    with party.consumer(destination) as session:
        for delay in (0.5, 1.5, 3.0):
            [delivery] = take(session, 1)
            assert time.monotonic() - sent >= delay - 0.05
            assert float(delivery.body) == delay
            assert delivery.destination == destination
            assert delivery.headers["a"] == "b:c"
            session.ack([delivery])


# -- the life of a session ---------------------------------------------------------


def test_a_living_broker_answers_a_ping(party: Party) -> None:
    with party.open() as session:
        session.ping()


def test_a_session_can_be_closed_twice(party: Party, destination: str) -> None:
    session = party.consumer(destination)
    session.close()
    session.close()


def test_a_sound_url_has_nothing_wrong(party: Party) -> None:
    assert party.broker().check() == []
    assert "secret" not in repr(party.broker())


@pytest.mark.django_db(transaction=True)
def test_the_embedded_broker_extends_its_lease_while_a_handler_takes_its_time(
    destination: str,
) -> None:
    broker = make_broker("tested", "database://default?lease=0.5&poll=0.02")
    with broker.open() as slow, broker.open() as other:
        slow.send(numbered(destination, 1))
        slow.subscribe(destination, prefetch=1)
        [delivery] = take(slow, 1)
        other.subscribe(destination, prefetch=1)
        assert other.receive(2.0) is None
        # By the one thread that renews all leases in this database.
        names = [one.name for one in threading.enumerate()]
        assert names.count("txmsg-leases-default") == 1
        assert "txmsg-leases" not in names
        slow.ack([delivery])
        assert other.receive(0) is None


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_a_lost_database_connection_is_an_unavailable_broker_and_comes_back(
    destination: str,
) -> None:
    broker = make_broker("tested", "database://")
    with broker.open() as session:
        assert session.send(numbered(destination, 1)) == [None]
        connection.connection.close()  # as a server that goes away does
        with pytest.raises(BrokerUnavailable):
            session.send(numbered(destination, 1))
        session.ping()
    with broker.open() as session:
        session.subscribe(destination, prefetch=5)
        assert bodies(take(session, 1)) == [b"0"]
        assert session.receive(0.1) is None


@pytest.mark.django_db(transaction=True)
def test_the_embedded_broker_forgets_who_named_no_subscription_and_left(
    destination: str,
) -> None:
    broker = make_broker("default", "database://")
    topic = f"topic:{destination}"
    with broker.open() as session:
        session.subscribe(topic, prefetch=1)
        with broker.open() as sender:
            sender.send([Outgoing(topic, {}, b"for nobody any more")])

    assert not QueueSubscription.objects.filter(topic=topic).exists()
    assert not QueueMessage.objects.filter(queue__startswith=topic).exists()
