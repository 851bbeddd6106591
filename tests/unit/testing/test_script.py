"""Each verb of a script works on a real connection."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_txmsg.testing import ARTEMIS, CLASSIC, RABBITMQ, ScriptedBroker
from django_txmsg.testing.frames import Frame
from tests.raw_client import RawClient
from tests.services.certificates import Certificates

QUEUE = "/queue/a"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[ScriptedBroker]:
    with ScriptedBroker(getattr(request, "param", CLASSIC)) as broker:
        yield broker


@pytest.fixture
def client(broker: ScriptedBroker) -> Iterator[RawClient]:
    with RawClient(broker.address) as client:
        yield client


def send(client: RawClient, *receipts: str, destination: str = QUEUE) -> None:
    for receipt in receipts:
        client.send("SEND", {"destination": destination}, b"", receipt=receipt)


def receipts(client: RawClient, count: int) -> list[str]:
    return [client.expect("RECEIPT")["receipt-id"] for _ in range(count)]


def stored(broker: ScriptedBroker) -> int:
    return len(broker.stored(QUEUE))


def test_held_receipts_wait_for_their_release(
    broker: ScriptedBroker, client: RawClient
) -> None:
    rule = broker.on("SEND").hold_receipt()
    assert rule is not None
    send(client, "1", "2", "3")
    held = broker.wait_for_held(3)
    assert [frame.receipt for frame in held] == ["1", "2", "3"]
    assert stored(broker) == 3, "held is the receipt, not the message"
    assert client.next(0.05) is None
    assert broker.release(1) == 1
    assert receipts(client, 1) == ["1"]
    assert broker.release() == 2
    assert receipts(client, 2) == ["2", "3"]


def test_receipts_are_released_in_the_order_asked_for(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND").hold_receipt()
    send(client, "1", "2", "3")
    broker.wait_for_held(3)
    assert broker.release(order=[2, 0]) == 2
    assert receipts(client, 2) == ["3", "1"]
    assert broker.release() == 1
    assert receipts(client, 1) == ["2"]


def test_permuted_receipts_stay_in_their_window(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND").permute_receipts(5, seed=3)
    send(client, *map(str, range(12)))
    windows = [receipts(client, 5), receipts(client, 5)]
    assert set(windows[0]) == set(map(str, range(5)))
    assert windows[0] != sorted(windows[0], key=int)
    assert set(windows[1]) == set(map(str, range(5, 10)))
    assert client.next(0.05) is None
    broker.release()
    assert set(receipts(client, 2)) == {"10", "11"}


@pytest.mark.parametrize("broker", [RABBITMQ], indirect=True)
def test_a_forgotten_rule_still_permutes_the_receipts_of_a_transaction(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND").permute_receipts(2, seed=3)
    send(client, "alone")
    client.send("BEGIN", transaction="t")
    for receipt in "12345":
        client.send(
            "SEND", {"destination": QUEUE}, b"", transaction="t", receipt=receipt
        )
    broker.wait_for("SEND", 6)
    broker.forget_rules()
    assert broker.release() == 1
    assert receipts(client, 1) == ["alone"]
    client.send("COMMIT", transaction="t")
    assert {*receipts(client, 2)} == {"1", "2"}
    assert {*receipts(client, 2)} == {"3", "4"}
    broker.wait_for_held(1)
    assert broker.release() == 1
    assert receipts(client, 1) == ["5"]


def test_a_dropped_receipt_never_comes_and_a_doubled_comes_twice(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", nth=1).drop_receipt()
    broker.on("SEND", nth=2).duplicate_receipt(3)
    send(client, "1", "2", "3", "4")
    assert receipts(client, 5) == ["2", "2", "2", "3", "4"]
    assert stored(broker) == 4


def test_a_rule_counts_what_an_earlier_rule_decided_over(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", times=2).drop_receipt()
    broker.on("SEND", nth=3).duplicate_receipt()
    broker.on("SEND", nth=4).reject(closes=False)
    send(client, "1", "2", "3", "4")
    assert receipts(client, 2) == ["3", "3"]
    assert client.expect("ERROR")["receipt-id"] == "4"


@pytest.mark.parametrize("where", [True, False])
def test_what_a_tests_function_raises_in_a_rule_is_raised_in_the_test(
    broker: ScriptedBroker, client: RawClient, where: bool
) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("a mistake of the test")

    if where:
        broker.on("SEND", where=broken, times=1).drop_receipt()
    else:
        broker.on("SEND", nth=1).call_with(broken)
    send(client, "1")
    with pytest.raises(KeyError, match="a mistake of the test"):
        broker.wait_for("COMMIT")
    broker.forget_rules()
    send(client, "2")
    assert receipts(client, 1) == ["2"], "the broker goes on"


def test_an_error_that_no_wait_raised_is_raised_as_the_broker_closes() -> None:
    def broken(*_: object) -> None:
        raise KeyError("a mistake of the test")

    def play() -> None:
        with ScriptedBroker() as broker, RawClient(broker.address) as client:
            broker.on("SEND").call_with(broken)
            send(client, "1")
            with broker.changed:
                assert broker.changed.wait_for(lambda: broker.errors, 10)

    with pytest.raises(KeyError, match="a mistake of the test"):
        play()


@pytest.mark.parametrize("strict", [True, False])
def test_a_client_that_breaks_the_rules_fails_the_test(strict: bool) -> None:
    def play() -> None:
        with ScriptedBroker(strict=strict) as broker, RawClient(broker.address) as bad:
            bad.send("ACK", id="what was never delivered")
            broker.wait_until(lambda: bool(broker.violations))

    if strict:
        with pytest.raises(AssertionError, match="broke STOMP's rules"):
            play()
    else:
        play()


def test_rules_pick_by_destination_condition_and_number(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", destination="/queue/b", times=1).drop_receipt()
    broker.on("SEND", where=lambda frame: frame.receipt == "x").drop_receipt()
    broker.on("*", where=lambda frame: frame.command == "BEGIN").drop_receipt()
    send(client, "1", destination="/queue/b")
    send(client, "2", destination="/queue/b")
    send(client, "x", "3")
    client.send("BEGIN", transaction="t", receipt="4")
    client.send("ABORT", transaction="t", receipt="5")
    assert receipts(client, 3) == ["2", "3", "5"]
    broker.forget_rules()
    send(client, "x")
    assert receipts(client, 1) == ["x"]


def test_a_parked_frame_is_overtaken(broker: ScriptedBroker, client: RawClient) -> None:
    broker.on("SEND", nth=1).park()
    send(client, "1", "2")
    assert receipts(client, 1) == ["2"]
    assert stored(broker) == 1
    broker.release()
    assert receipts(client, 1) == ["1"]
    assert stored(broker) == 2


def test_a_send_parked_beyond_its_commit_is_not_committed(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND").park()
    client.send("BEGIN", transaction="t")
    client.send("SEND", {"destination": QUEUE}, transaction="t", receipt="s")
    client.send("COMMIT", transaction="t", receipt="c")
    client.expect_receipt("c")
    broker.release()
    assert client.expect("ERROR")["receipt-id"] == "s"
    assert stored(broker) == 0


@pytest.mark.parametrize(
    ("broker", "named", "closes"),
    [(CLASSIC, True, False), (ARTEMIS, True, True), (RABBITMQ, False, True)],
    indirect=["broker"],
    ids=["classic", "artemis", "rabbitmq"],
)
def test_a_refusal_follows_the_profile(
    broker: ScriptedBroker, client: RawClient, named: bool, closes: bool
) -> None:
    broker.on("SEND", nth=2).reject("no room", "a trace")
    client.send("SEND", {"destination": QUEUE}, b"", receipt="1")
    client.expect_receipt("1")
    send(client, "2")
    error = client.expect("ERROR")
    assert (error["message"], error.text) == ("no room", "a trace")
    assert ("receipt-id" in error.headers) is named
    if closes:
        client.expect_end()
    else:
        send(client, "3")
        client.expect_receipt("3")


@pytest.mark.parametrize("names_receipt", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_a_refusal_takes_the_options_of_its_rule(
    broker: ScriptedBroker, client: RawClient, names_receipt: bool, closes: bool
) -> None:
    broker.on("SEND", nth=1).reject(names_receipt=names_receipt, closes=closes)
    send(client, "1", "2")
    error = client.expect("ERROR")
    assert ("receipt-id" in error.headers) is names_receipt
    if closes:
        client.expect_end()
    else:
        client.expect_receipt("2")
    assert stored(broker) == (0 if closes else 1)


@pytest.mark.parametrize(
    ("broker", "receipted", "spoils"),
    [(CLASSIC, True, False), (CLASSIC, False, True)],
    indirect=["broker"],
)
def test_classic_commits_without_a_refused_send_that_had_a_receipt(
    broker: ScriptedBroker, client: RawClient, receipted: bool, spoils: bool
) -> None:
    broker.on("SEND", nth=1).reject()
    client.send("BEGIN", transaction="t")
    asked = {"receipt": "s"} if receipted else {}
    client.send("SEND", {"destination": QUEUE, "transaction": "t", **asked})
    client.expect("ERROR")
    client.send("SEND", {"destination": QUEUE, "transaction": "t"})
    client.send("COMMIT", transaction="t", receipt="c")
    client.expect("ERROR" if spoils else "RECEIPT")
    assert stored(broker) == (0 if spoils else 1)


@pytest.mark.parametrize("broker", [RABBITMQ], indirect=True)
def test_rabbitmq_commits_without_a_frame_it_refused(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", nth=2).reject(closes=False)
    client.send("BEGIN", transaction="t")
    for receipt in "123":
        client.send("SEND", {"destination": QUEUE}, transaction="t", receipt=receipt)
    assert "receipt-id" not in client.expect("ERROR").headers
    client.send("COMMIT", transaction="t", receipt="c")
    assert receipts(client, 3) == ["c", "1", "3"]
    assert stored(broker) == 2


@pytest.mark.parametrize("broker", [RABBITMQ], indirect=True)
def test_rabbitmq_has_stored_a_part_when_the_replay_fails(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", nth=2).reject(at_commit=True)
    client.send("BEGIN", transaction="t")
    for receipt in "123":
        client.send("SEND", {"destination": QUEUE}, transaction="t", receipt=receipt)
    client.send("COMMIT", transaction="t", receipt="c")
    client.expect_receipt("c")
    client.expect_receipt("1")
    client.expect("ERROR")
    client.expect_end()
    assert stored(broker) == 1


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_comes_before_the_frame_is_handled(
    broker: ScriptedBroker, client: RawClient, reset: bool
) -> None:
    broker.on("SEND", nth=2).cut(reset=reset)
    send(client, "1")
    client.expect_receipt("1")
    send(client, "2")
    client.expect_end()
    assert stored(broker) == 1
    assert len(broker.received("SEND")) == 2


@pytest.mark.parametrize("answered", [True, False])
def test_a_cut_comes_after_the_frame_is_handled(
    broker: ScriptedBroker, client: RawClient, answered: bool
) -> None:
    broker.on("SEND", nth=2).cut_after(answered=answered)
    send(client, "1", "2", "3")
    assert receipts(client, 2 if answered else 1)[-1] == ("2" if answered else "1")
    client.expect_end()
    assert stored(broker) == 2


def test_a_stall_reads_nothing_until_resumed(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND", nth=2).stall()
    send(client, "1", "2", "3")
    client.expect_receipt("1")
    assert client.next(0.05) is None
    assert len(broker.received("SEND")) == 1
    broker.resume()
    assert receipts(client, 2) == ["2", "3"]


def test_a_stalled_broker_s_socket_fills_up() -> None:
    with (
        ScriptedBroker(receive_buffer=4096) as broker,
        RawClient(broker.address) as client,
    ):
        broker.stall()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.write(b"SEND\ndestination:/queue/a\n\n" + b"x" * 10_000_000)


def test_a_function_of_the_test_decides(
    broker: ScriptedBroker, client: RawClient
) -> None:
    broker.on("SEND").call_with(
        lambda talk, frame: (
            talk.send(Frame("RECEIPT", {"receipt-id": "other"})),
            talk.handle(frame),
        )
    )
    send(client, "1")
    assert receipts(client, 2) == ["other", "1"]


@pytest.mark.parametrize("every", [1, 7])
def test_split_writes_are_the_same_frames(
    broker: ScriptedBroker, client: RawClient, every: int
) -> None:
    broker.split_writes(every=every)
    send(client, "1", "2")
    assert receipts(client, 2) == ["1", "2"]


def test_heartbeats_go_both_ways_until_silenced() -> None:
    with ScriptedBroker(strict=False) as broker:
        client = RawClient(broker.address, heart_beat="50,50")
        with client:
            assert client.connected["heart-beat"] == "50,50"
            for _ in range(300):
                if client.decoder.heartbeats > 1:
                    break
                client.next(0.1)
            assert client.decoder.heartbeats > 1
            client.write(b"\n\n")
            broker.wait_until(lambda: broker.peers[0].heartbeats >= 2)
            broker.silence_heartbeats()
            client.send("BEGIN", transaction="t", receipt="last")
            client.expect_receipt("last")
            seen = client.decoder.heartbeats
            client.next(0.3)
            assert client.decoder.heartbeats == seen
            broker.wait_until(lambda: bool(broker.violations))
            client.expect("ERROR")


def test_the_broker_s_own_heartbeat_wishes() -> None:
    with (
        ScriptedBroker(heart_beat=(0, 0)) as broker,
        RawClient(broker.address, heart_beat="50,50") as client,
    ):
        assert client.connected["heart-beat"] == "0,0"
        client.next(0.2)
        assert client.decoder.heartbeats == 0


def test_it_speaks_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "tls")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.certificate, certificates.key)
    trust = ssl.create_default_context(cafile=str(certificates.authority))
    with ScriptedBroker(tls=tls) as broker:
        assert broker.url.startswith("stomp+ssl://")
        with RawClient(broker.address, tls=trust) as client:
            client.send("SEND", {"destination": QUEUE}, b"x" * 1_000_000, receipt="1")
            client.expect_receipt("1")
            subscribe = {"id": "s", "destination": QUEUE, "ack": "client-individual"}
            client.send("SUBSCRIBE", subscribe)
            assert len(client.expect("MESSAGE").body) == 1_000_000
            broker.cut()
            client.sock.settimeout(5)
            client.expect_end()


def test_it_listens_on_ipv6() -> None:
    with (
        ScriptedBroker(host="::1") as broker,
        RawClient(broker.address) as client,
    ):
        assert "[::1]" in broker.url
        send(client, "1")
        client.expect_receipt("1")


def test_a_wait_that_fails_says_what_happened(
    broker: ScriptedBroker, client: RawClient
) -> None:
    send(client, "1")
    client.expect_receipt("1")
    with pytest.raises(AssertionError, match=r"still no 2 SEND frames.*1 SEND"):
        broker.wait_for("SEND", 2, timeout=0.1)


def test_the_record_names_the_connection_of_each_frame(broker: ScriptedBroker) -> None:
    with RawClient(broker.address) as first, RawClient(broker.address) as second:
        send(second, "1")
        send(first, "2")
        frames = broker.wait_for("SEND", 2)
        assert {frame.receipt: frame.connection for frame in frames} == {
            "1": 2,
            "2": 1,
        }
        assert broker.accepted == 2
