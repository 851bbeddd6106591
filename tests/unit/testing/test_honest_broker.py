"""Without a script, the scripted broker behaves like the real broker of its profile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from django_txmsg.testing import ARTEMIS, CLASSIC, RABBITMQ, Profile, ScriptedBroker
from tests.raw_client import RawClient

QUEUE = {"destination": "/queue/a", "destination-type": "ANYCAST"}
SUBSCRIBE = {
    "destination": "/queue/a",
    "subscription-type": "ANYCAST",
    "id": "s",
    "ack": "client-individual",
}
Open = Callable[..., RawClient]


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[ScriptedBroker]:
    profile = getattr(request, "param", CLASSIC)
    with ScriptedBroker(profile, strict=False) as broker:
        yield broker


@pytest.fixture
def client() -> Iterator[Open]:
    with ExitStack() as stack:

        def connect(broker: ScriptedBroker, **options: str) -> RawClient:
            return stack.enter_context(RawClient(broker.address, **options))

        yield connect


def each(profile_names: str) -> pytest.MarkDecorator:
    """Run the test with a scripted broker of each of these profiles."""
    profiles = {"classic": CLASSIC, "artemis": ARTEMIS, "rabbitmq": RABBITMQ}
    chosen = [profiles[name] for name in profile_names.split()]
    ids = profile_names.split()
    return pytest.mark.parametrize("broker", chosen, indirect=True, ids=ids)


ANY = each("classic artemis rabbitmq")


@ANY
def test_a_message_goes_through(broker: ScriptedBroker, client: Open) -> None:
    c = client(broker)
    assert c.connected["server"] == broker.profile.server
    c.send("SUBSCRIBE", SUBSCRIBE)
    headers = {"odd: name": "a:b\nc\\d\rä", "content-length": "3"}
    c.send("SEND", {**QUEUE, **headers}, b"\0\n\0", receipt="1")
    frames = {frame.command: frame for frame in (c.next(), c.next()) if frame}
    assert frames["RECEIPT"]["receipt-id"] == "1"
    message = frames["MESSAGE"]
    assert message.body == b"\0\n\0"
    assert message["odd: name"] == "a:b\nc\\d\rä"
    assert message["subscription"] == "s"
    assert ("receipt" in message.headers) is (broker.profile is RABBITMQ)
    c.send("ACK", id=message["ack"], receipt="2")
    c.expect_receipt("2")
    assert broker.stored("/queue/a") == []
    assert broker.violations == []


def test_a_client_without_stomp_1_2_is_refused(broker: ScriptedBroker) -> None:
    with RawClient(broker.address, connect=False) as c:
        c.send("CONNECT", {"accept-version": "1.0,1.1"})
        c.expect("ERROR")
        c.expect_end()


def test_a_wrong_password_is_refused() -> None:
    with ScriptedBroker(users={"me": "secret"}) as broker:
        with RawClient(broker.address, login="me", passcode="secret"):
            pass
        with RawClient(broker.address, connect=False) as c:
            c.send("CONNECT", {"accept-version": "1.2", "login": "me"})
            c.expect("ERROR")
            c.expect_end()


@each("rabbitmq")
def test_rabbitmq_knows_its_virtual_hosts_only(broker: ScriptedBroker) -> None:
    with RawClient(broker.address, connect=False) as c:
        c.send("CONNECT", {"accept-version": "1.2", "host": "localhost"})
        c.expect("ERROR")
        c.expect_end()


@ANY
def test_unacknowledged_message_is_redelivered_after_a_cut(
    broker: ScriptedBroker, client: Open
) -> None:
    first = client(broker)
    first.send("SUBSCRIBE", SUBSCRIBE)
    for body in ("one", "two", "three"):
        broker.put("/queue/a", body, {"destination-type": "ANYCAST"})
    messages = [first.expect("MESSAGE") for _ in range(3)]
    assert "true" not in {m.headers.get("redelivered") for m in messages}
    first.send("ACK", id=messages[1]["ack"], receipt="r")
    first.expect_receipt("r")
    first.sock.close()
    broker.wait_for_connections(0)
    second = client(broker)
    second.send("SUBSCRIBE", SUBSCRIBE)
    again = [second.expect("MESSAGE") for _ in range(2)]
    assert [m.text for m in again] == ["one", "three"]
    assert {m["redelivered"] for m in again} == {"true"}
    assert second.next(0.05) is None


@each("classic rabbitmq")
def test_prefetch_bounds_what_is_delivered(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    bound = {broker.profile.prefetch_header: "2"}
    c.send("SUBSCRIBE", {**SUBSCRIBE, **bound})
    for number in range(4):
        broker.put("/queue/a", str(number))
    first = c.expect("MESSAGE")
    assert c.expect("MESSAGE").text == "1"
    assert c.next(0.05) is None
    c.send("ACK", id=first["ack"])
    assert c.expect("MESSAGE").text == "2"
    assert c.next(0.05) is None


@each("artemis")
def test_artemis_bounds_bytes(broker: ScriptedBroker, client: Open) -> None:
    c = client(broker)
    bound = {"consumer-window-size": "15"}
    c.send("SUBSCRIBE", {**SUBSCRIBE, **bound})
    for _ in range(3):
        broker.put("/queue/a", b"x" * 10, {"destination-type": "ANYCAST"})
    c.expect("MESSAGE")
    c.expect("MESSAGE")
    assert c.next(0.05) is None


@each("artemis")
def test_artemis_drops_what_names_no_routing(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("SEND", destination="a", receipt="r")
    c.expect_receipt("r")
    assert broker.stored("a") == []


def test_a_topic_reaches_every_subscription_and_waits_for_durable_ones(
    broker: ScriptedBroker, client: Open
) -> None:
    durable = {"activemq.subscriptionName": "audit"}
    topic = {"destination": "/topic/t", "id": "1", "ack": "client-individual"}
    first = client(broker, client_id="me")
    first.send("SUBSCRIBE", {**topic, **durable}, receipt="r")
    first.expect_receipt("r")
    passing = client(broker)
    passing.send("SUBSCRIBE", topic, receipt="r")
    passing.expect_receipt("r")
    broker.put("/topic/t", "both")
    both = first.expect("MESSAGE")
    assert both.text == passing.expect("MESSAGE").text == "both"
    first.send("ACK", id=both["ack"], receipt="a")
    first.expect_receipt("a")
    first.sock.close()
    passing.sock.close()
    broker.wait_for_connections(0)
    broker.put("/topic/t", "kept")
    late = client(broker)
    late.send("SUBSCRIBE", topic, receipt="r")
    late.expect_receipt("r")
    assert late.next(0.05) is None
    back = client(broker, client_id="me")
    back.send("SUBSCRIBE", {**topic, **durable})
    assert back.expect("MESSAGE").text == "kept"
    back.send("UNSUBSCRIBE", {**topic, **durable}, receipt="u")
    back.expect_receipt("u")
    broker.put("/topic/t", "lost")
    back.send("SUBSCRIBE", {**topic, **durable}, receipt="r")
    back.expect_receipt("r")
    assert back.next(0.05) is None


@each("classic artemis")
def test_a_transaction_is_receipted_at_once_and_stored_at_commit(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("BEGIN", transaction="t")
    c.send("SEND", QUEUE, b"x", transaction="t", receipt="send")
    c.expect_receipt("send")
    assert broker.stored("/queue/a") == []
    c.send("COMMIT", transaction="t", receipt="commit")
    c.expect_receipt("commit")
    assert [m.body for m in broker.stored("/queue/a")] == [b"x"]


@each("rabbitmq")
def test_rabbitmq_reads_a_transaction_at_commit(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("BEGIN", transaction="t")
    c.send("SEND", QUEUE, b"x", transaction="t", receipt="send")
    assert c.next(0.05) is None
    c.send("COMMIT", transaction="t", receipt="commit")
    c.expect_receipt("commit")
    c.expect_receipt("send")
    c.send("BEGIN", transaction="t")
    c.send("SEND", QUEUE, b"y", transaction="t", receipt="never")
    c.send("ABORT", transaction="t", receipt="abort")
    c.expect_receipt("abort")
    assert c.next(0.05) is None
    assert [m.body for m in broker.stored("/queue/a")] == [b"x"]


@ANY
def test_an_aborted_acknowledgement_can_be_given_again(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("SUBSCRIBE", SUBSCRIBE)
    broker.put("/queue/a", "x", {"destination-type": "ANYCAST"})
    message = c.expect("MESSAGE")
    c.send("BEGIN", transaction="t")
    c.send("ACK", id=message["ack"], transaction="t")
    c.send("ABORT", transaction="t", receipt="abort")
    c.expect_receipt("abort")
    assert c.next(0.05) is None, "nothing is redelivered while the subscription lives"
    c.send("ACK", id=message["ack"], receipt="again")
    if broker.profile is ARTEMIS:  # there the first one took effect at once
        assert c.expect("ERROR")["receipt-id"] == "again"
    else:
        c.expect_receipt("again")


@ANY
def test_a_transaction_ends_with_its_connection(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("BEGIN", transaction="t")
    c.send("SEND", QUEUE, transaction="t")
    broker.wait_for("SEND")
    c.sock.close()
    broker.wait_for_connections(0)
    assert broker.stored("/queue/a") == []


def test_a_delayed_message_comes_later_and_an_expired_one_never(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("SUBSCRIBE", SUBSCRIBE)
    began = time.monotonic()
    c.send("SEND", {**QUEUE, "AMQ_SCHEDULED_DELAY": "300"}, b"later")
    past = str(int(time.time() * 1000) - 1)
    c.send("SEND", {**QUEUE, "expires": past}, b"never", receipt="r")
    c.expect_receipt("r")
    assert c.expect("MESSAGE").text == "later"
    assert time.monotonic() - began >= 0.3


def test_a_restart_keeps_persistent_messages_only(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("SEND", QUEUE, b"kept", persistent="true")
    c.send("SEND", QUEUE, b"lost", receipt="r")
    c.expect_receipt("r")
    broker.stop()
    c.expect_end()
    with pytest.raises(OSError, match=r"[Rr]efused"):
        client(broker)
    broker.restart()
    client(broker)
    assert [m.text for m in broker.stored("/queue/a")] == ["kept"]


@pytest.mark.parametrize(
    ("command", "headers"),
    [
        ("SEND", {}),
        ("SUBSCRIBE", {"destination": "/queue/a"}),
        ("SUBSCRIBE", {**SUBSCRIBE, "ack": "client"}),
        ("ACK", {"id": "nobody's"}),
        ("COMMIT", {"transaction": "none"}),
        ("SEND", {"destination": "/queue/a", "transaction": "none"}),
        ("UNSUBSCRIBE", {"id": "none"}),
        ("NACK", {"id": "nobody's"}),
        ("DANCE", {}),
    ],
)
def test_senseless_frame_is_refused(
    broker: ScriptedBroker, client: Open, command: str, headers: dict[str, str]
) -> None:
    c = client(broker)
    c.send(command, headers, receipt="r")
    assert c.expect("ERROR")["receipt-id"] == "r"


def test_a_client_that_breaks_the_protocol_gets_an_error_and_is_recorded(
    broker: ScriptedBroker,
) -> None:
    with RawClient(broker.address, connect=False) as c:
        c.write(b"SEND\nwithout a colon\n\n\0")
        c.expect("ERROR")
        c.expect_end()
    with RawClient(broker.address, connect=False) as c:
        c.send("SEND", QUEUE)
        c.expect("ERROR")
        c.expect_end()
    assert len(broker.violations) == 2


def test_the_connection_ends_after_the_receipt_of_disconnect(
    broker: ScriptedBroker, client: Open
) -> None:
    c = client(broker)
    c.send("DISCONNECT", receipt="d")
    c.expect_receipt("d")
    c.expect_end()


def test_a_profile_can_be_derived(client: Open) -> None:
    profile: Profile = dataclasses.replace(
        CLASSIC, server="Mine/1", always_says_redelivered=True
    )
    with ScriptedBroker(profile) as broker:
        c = client(broker)
        assert c.connected["server"] == "Mine/1"
        c.send("SUBSCRIBE", SUBSCRIBE)
        broker.put("/queue/a", "x")
        assert c.expect("MESSAGE")["redelivered"] == "false"
