"""Facts about real brokers on which the design depends, and which no manual states.

These tests check the brokers, not our code: a raw client writes frames and reads the
answers. If a test fails, a broker has changed. Then `docs/explanation/broker-facts.md`
and a dialect must change too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise

import amqp
import pytest

from django_txmsg.testing.frames import Frame
from tests.faults import wait_until
from tests.raw_client import RawClient
from tests.services import ActiveMQ, RabbitMQ
from tests.services.activemq import CRAMPED
from tests.services.stomp_server import (
    ALLOWED,
    LIMITED_USER,
    PASSWORD,
    USER,
    StompServer,
)

FORBIDDEN = "/queue/forbidden"
#: More than a cramped queue holds, by far.
TOO_MANY = 100
KILOBYTE = b"k" * 1000

STORED = {"persistent": "true"}
# RabbitMQ would declare a queue of the connection's own for `persistent:false`.
VOLATILE: dict[str, str] = {}
QUORUM = {**STORED, "x-queue-type": "quorum"}

Client = Callable[..., RawClient]


@pytest.fixture
def client() -> Iterator[Client]:
    """Return a function that connects a raw client. The clients are closed at the end
    of the test."""
    with ExitStack() as stack:

        def connect(server: StompServer, user: str = USER) -> RawClient:
            address = ("127.0.0.1", server.port)
            return stack.enter_context(
                RawClient(address, timeout=60, login=user, passcode=PASSWORD)
            )

        yield connect


def queue(prefix: str = ALLOWED) -> str:
    """Return a new queue's address. The user with limited permissions may use queues
    with the default prefix."""
    return f"/queue/{prefix}{uuid.uuid4().hex}"


def send(
    client: RawClient,
    destination: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    **more: str,
) -> None:
    """Send a SEND frame. Unless `headers` are given, the message is persistent. `more`
    are further headers."""
    chosen = STORED if headers is None else headers
    client.send("SEND", {"destination": destination, **chosen}, body, **more)


def read_to(client: RawClient, receipt: str) -> list[str]:
    """Read frames until this receipt arrives, and return a short name for each."""
    found: list[str] = []
    while receipt not in found:
        frame = client.next()
        assert frame is not None, f"no receipt {receipt}; came: {found}"
        found.append(short(frame))
    return found


def short(frame: Frame) -> str:
    """Return a short name for a frame: the receipt id of a RECEIPT, otherwise the
    command and the receipt id."""
    receipt = frame.headers.get("receipt-id", "-")
    return receipt if frame.command == "RECEIPT" else f"{frame.command} {receipt}"


def contents(client: RawClient, destination: str) -> list[bytes]:
    """Receive all messages of a queue. First send a message that marks the end, then
    read until it arrives."""
    send(client, destination, b"end", receipt="end put")
    read_to(client, "end put")
    client.send("SUBSCRIBE", id="all", destination=destination, ack="auto")
    found = []
    while (body := client.expect("MESSAGE").body) != b"end":
        found.append(body)
    client.send("UNSUBSCRIBE", id="all", receipt="left")
    read_to(client, "left")
    return found


# -- a failed SEND inside a transaction ---------------------------------------------


def test_activemq_commits_the_rest_when_a_send_with_receipt_failed(
    activemq: ActiveMQ, client: Client
) -> None:
    """ActiveMQ refuses one SEND of a transaction, and COMMIT stores the other messages.
    So a client must count the refusals, and then send ABORT."""
    producer, name = client(activemq, LIMITED_USER), queue()

    producer.send("BEGIN", transaction="t")
    send(producer, name, b"first", transaction="t", receipt="first")
    send(producer, FORBIDDEN, b"refused", transaction="t", receipt="refused")
    send(producer, name, b"last", transaction="t", receipt="last")
    before = read_to(producer, "last")
    producer.send("COMMIT", transaction="t", receipt="commit")

    assert before == ["first", "ERROR refused", "last"]
    assert read_to(producer, "commit") == ["commit"]
    assert contents(client(activemq), name) == [b"first", b"last"]


def test_activemq_refuses_the_commit_when_a_send_without_receipt_failed(
    activemq: ActiveMQ, client: Client
) -> None:
    """One SEND without a receipt fails, so ActiveMQ refuses COMMIT and stores no
    message. The relay relies on this, because it requests a receipt only for COMMIT."""
    producer, name = client(activemq, LIMITED_USER), queue()

    producer.send("BEGIN", transaction="t")
    send(producer, name, b"first", transaction="t")
    send(producer, FORBIDDEN, b"refused", transaction="t")
    send(producer, name, b"last", transaction="t")
    producer.send("COMMIT", transaction="t", receipt="commit")
    answers = {short(producer.expect("ERROR")), short(producer.expect("ERROR"))}

    # The two come in any order: an ERROR without receipt is sent on another thread.
    assert answers == {"ERROR -", "ERROR commit"}
    assert contents(client(activemq), name) == []


def test_activemq_keeps_a_transaction_whose_commit_it_refused(
    activemq: ActiveMQ, client: Client
) -> None:
    """After a refused COMMIT, ABORT fails because the transaction's name is unknown.
    Messages that the transaction acknowledged cannot be acknowledged again. Only the
    end of the connection releases them."""
    name = queue()
    send(client(activemq), name, b"one")
    consumer = client(activemq, LIMITED_USER)
    consumer.send("SUBSCRIBE", id="1", destination=name, ack="client-individual")
    given = consumer.expect("MESSAGE")
    consumer.send("BEGIN", transaction="t")
    consumer.send("ACK", id=given["ack"], transaction="t")
    send(consumer, FORBIDDEN, b"refused", transaction="t")
    consumer.send("COMMIT", transaction="t", receipt="commit")
    assert {short(consumer.expect("ERROR")), short(consumer.expect("ERROR"))} == {
        "ERROR -", "ERROR commit",
    }  # fmt: skip

    consumer.send("ABORT", transaction="t", receipt="abort")
    assert "Invalid transaction id" in consumer.expect("ERROR")["message"]
    consumer.send("ACK", id=given["ack"], receipt="again")
    assert "Unexpected ACK" in consumer.expect("ERROR")["message"]
    consumer.sock.close()
    successor = client(activemq)  # waits: the broker notices the end a moment later
    successor.send("SUBSCRIBE", id="1", destination=name, ack="auto")
    assert successor.expect("MESSAGE").body == b"one"


def test_rabbitmq_closes_the_connection_on_a_forbidden_send_and_stores_nothing(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """RabbitMQ declares a queue as soon as a SEND to it arrives. So it refuses a
    forbidden SEND before the COMMIT, and stores no message of the transaction."""
    producer, name = client(rabbitmq, LIMITED_USER), queue()

    producer.send("BEGIN", transaction="t", receipt="begin")
    send(producer, name, b"first", transaction="t", receipt="first")
    send(producer, FORBIDDEN, b"refused", transaction="t", receipt="refused")

    assert producer.expect("RECEIPT")["receipt-id"] == "begin"
    assert short(producer.expect("ERROR")) == "ERROR -"
    producer.expect_end()
    assert contents(client(rabbitmq), name) == []


def test_rabbitmq_commits_the_rest_when_a_destination_was_malformed(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """A SEND to a malformed destination gets an ERROR that names no receipt. The
    connection and the transaction stay open, and COMMIT stores the other messages."""
    producer, name = client(rabbitmq), queue()

    producer.send("BEGIN", transaction="t")
    send(producer, name, b"first", transaction="t", receipt="first")
    send(producer, "/nonsense/x", b"refused", transaction="t", receipt="refused")
    send(producer, name, b"last", transaction="t", receipt="last")
    producer.send("COMMIT", transaction="t", receipt="commit")

    assert read_to(producer, "last") == ["ERROR -", "commit", "first", "last"]
    assert contents(client(rabbitmq), name) == [b"first", b"last"]


def test_rabbitmq_confirms_a_commit_that_stored_half_of_the_transaction(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """At COMMIT, RabbitMQ executes the frames one by one, so the receipt of COMMIT does
    not prove that all messages are stored."""
    producer, name = client(rabbitmq), queue()

    producer.send("BEGIN", transaction="t")
    send(producer, name, b"first", transaction="t")
    send(producer, "/exchange/nobody-made-this/key", b"lost", transaction="t")
    send(producer, name, b"last", transaction="t")
    producer.send("COMMIT", transaction="t", receipt="commit")

    assert read_to(producer, "commit") == ["commit"]
    assert short(producer.expect("ERROR")) == "ERROR -"
    producer.expect_end()
    assert contents(client(rabbitmq), name) == [b"first"]


# -- when receipts inside a transaction come ----------------------------------------


def test_activemq_sends_a_receipt_inside_a_transaction_before_the_commit(
    activemq: ActiveMQ, client: Client
) -> None:
    producer, name = client(activemq), queue()

    producer.send("BEGIN", transaction="t", receipt="begin")
    send(producer, name, b"1", transaction="t", receipt="send")
    assert read_to(producer, "send") == ["begin", "send"]
    producer.send("ABORT", transaction="t", receipt="abort")

    assert read_to(producer, "abort") == ["abort"]
    assert contents(client(activemq), name) == []


def test_rabbitmq_sends_a_receipt_inside_a_transaction_only_after_the_commits(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """RabbitMQ sends the receipts of a transaction's SENDs only after the COMMIT. A
    client that waits for such a receipt before the COMMIT waits for ever. After the
    SENDs, the test aborts a second transaction. The receipt of this ABORT shows that
    RabbitMQ has read the SENDs."""
    producer, name = client(rabbitmq), queue()

    producer.send("BEGIN", transaction="t", receipt="begin")
    for number in range(3):
        send(producer, name, b"x", transaction="t", receipt=f"send {number}")
    producer.send("BEGIN", transaction="barrier")
    producer.send("ABORT", transaction="barrier", receipt="barrier")
    assert read_to(producer, "barrier") == ["begin", "barrier"]
    assert producer.drain(0.5) == []
    producer.send("COMMIT", transaction="t", receipt="commit")

    answers = [short(producer.expect("RECEIPT")) for _ in range(4)]
    assert answers[0] == "commit"
    assert sorted(answers[1:]) == ["send 0", "send 1", "send 2"]


def test_rabbitmq_never_sends_the_receipts_of_an_aborted_transaction(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    producer, name = client(rabbitmq), queue()

    producer.send("BEGIN", transaction="t")
    send(producer, name, b"taken back", transaction="t", receipt="send")
    producer.send("ABORT", transaction="t", receipt="abort")
    send(producer, name, b"stays", receipt="later")

    assert read_to(producer, "later") == ["abort", "later"]
    assert contents(client(rabbitmq), name) == [b"stays"]


# -- the order of receipts ----------------------------------------------------------


def test_activemq_sends_receipts_in_order_while_no_queue_is_full(
    activemq: ActiveMQ, client: Client
) -> None:
    """ActiveMQ sends receipts in the order of the SENDs. The messages are large and
    small, persistent and not, and go to queues and to a topic."""
    producer = client(activemq)
    names = [queue(), queue(), queue().replace("/queue/", "/topic/")]

    for number in range(300):
        send(
            producer,
            names[number % 3],
            b"x" * (50_000 if number % 20 == 0 else 10),
            VOLATILE if number % 4 == 0 else None,
            receipt=str(number),
        )

    assert read_to(producer, "299") == [str(number) for number in range(300)]


def test_activemq_lets_later_receipts_overtake_those_of_a_full_queue(
    activemq: ActiveMQ, client: Client
) -> None:
    """ActiveMQ does not answer a SEND to a full queue, and handles later frames of the
    connection meanwhile."""
    producer, full, roomy = client(activemq), queue(CRAMPED), queue()

    for number in range(TOO_MANY):
        send(producer, full, KILOBYTE, receipt=f"full {number}")
    send(producer, roomy, b"x", receipt="roomy")
    early = read_to(producer, "roomy")
    assert contents(client(activemq), roomy) == [b"x"]
    taken = take(client(activemq), full, TOO_MANY)
    late = read_to(producer, f"full {TOO_MANY - 1}")

    assert taken == [KILOBYTE] * TOO_MANY
    assert 1 < len(early) < TOO_MANY
    assert sorted([*early, *late]) == sorted(
        ["roomy", *(f"full {number}" for number in range(TOO_MANY))]
    )


def test_activemq_commits_without_a_send_that_waits_for_a_full_queue(
    activemq: ActiveMQ, client: Client
) -> None:
    """A SEND of a transaction requests a receipt. Its queue is full, so ActiveMQ holds
    the SEND back. ActiveMQ sends the receipt of COMMIT nevertheless, and then refuses
    the SEND. So a client must wait for the receipt of every SEND before it commits."""
    filler, producer = client(activemq), client(activemq)
    full, roomy, other = queue(CRAMPED), queue(), queue()
    for _ in range(TOO_MANY):
        send(filler, full, KILOBYTE, receipt="full")
    send(filler, other, b"x", receipt="full by now")
    filled = len(read_to(filler, "full by now")) - 1

    producer.send("BEGIN", transaction="t")
    send(producer, roomy, b"first", transaction="t", receipt="first")
    send(producer, full, b"parked", transaction="t", receipt="parked")
    send(producer, roomy, b"last", transaction="t", receipt="last")
    producer.send("COMMIT", transaction="t", receipt="commit")
    assert read_to(producer, "commit") == ["first", "last", "commit"]
    assert contents(client(activemq), roomy) == [b"first", b"last"]
    taken = take(client(activemq), full, TOO_MANY)

    assert filled < TOO_MANY
    assert taken == [KILOBYTE] * TOO_MANY
    assert short(producer.expect("ERROR")) == "ERROR parked"
    assert contents(client(activemq), full) == []


def test_activemq_answers_a_barrier_while_a_send_with_receipt_waits(
    activemq: ActiveMQ, client: Client
) -> None:
    """The answer to a barrier proves that earlier frames without a receipt were
    handled. It proves nothing about frames with a receipt."""
    filler, producer = client(activemq), client(activemq)
    full, other = queue(CRAMPED), queue()
    for _ in range(TOO_MANY):
        send(filler, full, KILOBYTE, receipt="full")
    send(filler, other, b"x", receipt="full by now")
    read_to(filler, "full by now")

    send(producer, full, b"parked", receipt="parked")
    producer.send("BEGIN", transaction="barrier")
    producer.send("ABORT", transaction="barrier", receipt="barrier")
    assert read_to(producer, "barrier") == ["barrier"]
    taken = take(client(activemq), full, TOO_MANY)

    assert read_to(producer, "parked") == ["parked"]
    assert [*taken, *contents(client(activemq), full)].count(b"parked") == 1


def test_activemq_holds_the_commit_back_while_a_send_without_receipt_waits(
    activemq: ActiveMQ, client: Client
) -> None:
    """If the SENDs of a transaction request no receipts, ActiveMQ sends the receipt of
    COMMIT only after it has stored all their messages. The relay relies on this."""
    filler, producer = client(activemq), client(activemq)
    full, roomy, other = queue(CRAMPED), queue(), queue()
    for _ in range(TOO_MANY):
        send(filler, full, KILOBYTE, receipt="full")
    send(filler, other, b"x", receipt="full by now")
    read_to(filler, "full by now")

    producer.send("BEGIN", transaction="t")
    send(producer, roomy, b"first", transaction="t")
    send(producer, full, b"waits", transaction="t")
    send(producer, roomy, b"last", transaction="t")
    producer.send("COMMIT", transaction="t", receipt="commit")
    assert producer.drain(1.0) == []
    taken = take(client(activemq), full, TOO_MANY)

    assert read_to(producer, "commit") == ["commit"]
    assert contents(client(activemq), roomy) == [b"first", b"last"]
    assert [*taken, *contents(client(activemq), full)].count(b"waits") == 1


def take(client: RawClient, destination: str, count: int) -> list[bytes]:
    """Receive at least `count` messages from a full queue, and return their bodies.
    After that, the queue has room for the messages that wait to be stored.

    The broker may send further messages before it reads the UNSUBSCRIBE. Their bodies
    are in the returned list, too, because these messages are no longer in the queue.
    """
    client.send("SUBSCRIBE", id="some", destination=destination, ack="auto")
    bodies = [client.expect("MESSAGE").body for _ in range(count)]
    client.send("UNSUBSCRIBE", id="some", receipt="left")
    while (frame := client.next()) is not None and frame.command == "MESSAGE":
        bodies.append(frame.body)
    assert frame is not None
    assert short(frame) == "left"
    return bodies


@pytest.mark.parametrize(
    ("of_odd_ones", "size"),
    [
        pytest.param(VOLATILE, 300, id="stored-and-volatile"),
        pytest.param(QUORUM, 300, id="classic-and-quorum-queue"),
        pytest.param(STORED, 200_000, id="small-and-big"),
    ],
)
def test_rabbitmq_sends_receipts_out_of_order_over_two_queues(
    rabbitmq: RabbitMQ, client: Client, of_odd_ones: dict[str, str], size: int
) -> None:
    """Each receipt arrives once, in any order."""
    overtaken = 0
    for _ in range(20):
        producer, names = client(rabbitmq), [queue(), queue()]
        for number in range(200):
            odd = number % 2
            send(
                producer,
                names[odd],
                b"x" * (size if odd else 300),
                of_odd_ones if odd else STORED,
                receipt=str(number),
            )
        found = [int(short(producer.expect("RECEIPT"))) for _ in range(200)]
        assert sorted(found) == list(range(200))
        overtaken += sum(later < earlier for earlier, later in pairwise(found))
        if overtaken:
            break

    assert overtaken


def test_rabbitmq_sends_receipts_in_order_over_one_queue(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    producer, name = client(rabbitmq), queue()

    for number in range(300):
        send(producer, name, b"x", receipt=str(number))

    assert read_to(producer, "299") == [str(number) for number in range(300)]


# -- what a SEND does to its queue --------------------------------------------------


def test_rabbitmq_makes_a_queue_exclusive_for_a_send_that_says_persistent_false(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """A SEND with `persistent:false` makes RabbitMQ declare an exclusive queue, which
    other connections cannot use. So our client sends volatile messages without the
    header `persistent`."""
    name, first, second = queue(), client(rabbitmq), client(rabbitmq)
    send(first, name, b"x", receipt="declared")
    read_to(first, "declared")
    second.send("SEND", {"destination": name, "persistent": "false"}, receipt="no")
    assert "exclusive" in second.expect("ERROR").text
    second.expect_end()

    alone, name = client(rabbitmq), queue()
    alone.send("SEND", {"destination": name, "persistent": "false"}, receipt="sent")
    read_to(alone, "sent")
    send(first, name, b"x", receipt="no")
    assert "exclusive" in first.expect("ERROR").text


# -- receipts for what is lost ------------------------------------------------------


@pytest.mark.parametrize("nowhere", ["/amq/queue/nobody-made-this", "no-slash"])
def test_rabbitmq_confirms_unroutable_messages(
    rabbitmq: RabbitMQ, client: Client, nowhere: str
) -> None:
    producer = client(rabbitmq)
    send(producer, nowhere, b"lost", receipt="lost")
    assert read_to(producer, "lost") == ["lost"]


def test_rabbitmq_receipts_a_subscribe_it_has_just_refused(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """RabbitMQ refuses a SUBSCRIBE with an ERROR. Then it sends the receipt of the
    SUBSCRIBE, and closes the connection."""
    consumer = client(rabbitmq, LIMITED_USER)
    consumer.send("SUBSCRIBE", id="s", destination=FORBIDDEN, receipt="subscribed")
    assert [short(frame) for frame in consumer.drain(30)] == ["ERROR -", "subscribed"]
    assert consumer.closed_by_peer


def test_rabbitmq_confirms_messages_to_a_deleted_queue(
    rabbitmq: RabbitMQ, client: Client
) -> None:
    """RabbitMQ declares a queue only once for each connection. After the queue is
    deleted, messages to it are confirmed and lost. So never delete a queue while a
    relay runs."""
    producer, name = client(rabbitmq), queue()
    send(producer, name, b"before", receipt="before")
    read_to(producer, "before")

    with amqp.Connection(
        f"127.0.0.1:{rabbitmq.amqp_port}", userid=USER, password=PASSWORD
    ) as connection:
        connection.channel().queue_delete(name.removeprefix("/queue/"))
    send(producer, name, b"lost", receipt="lost")

    assert read_to(producer, "lost") == ["lost"]
    assert contents(client(rabbitmq), name) == []


# -- what RabbitMQ 4 changed --------------------------------------------------------


def release(rabbitmq: RabbitMQ) -> tuple[int, int]:
    """Return the first two numbers of RabbitMQ's version."""
    major, minor, *_ = map(int, rabbitmq.version.split("."))
    return major, minor


@pytest.fixture
def channel(rabbitmq: RabbitMQ) -> Iterator[amqp.Channel]:
    """A channel of a user with all permissions."""
    with amqp.Connection(
        f"127.0.0.1:{rabbitmq.amqp_port}", userid=USER, password=PASSWORD
    ) as connection:
        yield connection.channel()


def quorum_queue(channel: amqp.Channel, **arguments: object) -> str:
    """Declare a quorum queue with one message in it, and return its name."""
    name = uuid.uuid4().hex
    named = {key.replace("_", "-"): value for key, value in arguments.items()}
    channel.queue_declare(
        name,
        durable=True,
        auto_delete=False,
        arguments={"x-queue-type": "quorum", **named},
    )
    channel.basic_publish(amqp.Message("m"), routing_key=name)
    return name


def returned(channel: amqp.Channel, *names: str) -> str:
    """Take a message from the first queue that has one, and requeue it. Return the name
    of this queue, or "" if all queues are empty."""
    for name in names:
        if message := channel.basic_get(name):
            channel.basic_reject(message.delivery_tag, requeue=True)
            return name
    return ""


def deliveries(channel: amqp.Channel, name: str, grave: str) -> int:
    """Return how many deliveries of a message precede its dead-lettering. Stop at 30,
    and return 30."""
    for number in range(30):
        came: list[str] = []

        def some(came: list[str] = came) -> bool:
            came.append(returned(channel, grave, name))
            return bool(came[-1])

        wait_until(some)
        if came[-1] == grave:
            return number
    return 30


def test_a_quorum_queue_of_rabbitmq_4_drops_a_message_after_21_deliveries(
    rabbitmq: RabbitMQ, channel: amqp.Channel
) -> None:
    grave = uuid.uuid4().hex
    channel.queue_declare(grave, durable=True, auto_delete=False)
    dead = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": grave}
    name = quorum_queue(channel, **dead)

    # Unless it was declared without a limit, as ours are there. To 3.10, -1 is a limit.
    limit = {"x_delivery_limit": -1} if release(rabbitmq) >= (4, 0) else {}
    assert deliveries(channel, quorum_queue(channel, **dead, **limit), grave) == 30
    assert deliveries(channel, name, grave) == (21 if limit else 30)


def test_rabbitmq_4_3_delays_returned_messages_by_the_queues_rule(
    rabbitmq: RabbitMQ, channel: amqp.Channel
) -> None:
    """RabbitMQ 4.3 and later deliver a returned message after a delay. The delay starts
    at the queue's `min` and grows up to its `max`."""
    name = quorum_queue(
        channel,
        x_delayed_retry_type="all",
        x_delayed_retry_min=300,
        x_delayed_retry_max=600,
    )
    delays = []
    for _ in range(5):
        began = time.monotonic()
        wait_until(lambda: returned(channel, name))
        delays.append(time.monotonic() - began)

    least = [0, 0.28, 0.58, 0.58, 0.58] if release(rabbitmq) >= (4, 3) else [0] * 5
    assert all(delay >= wait for delay, wait in zip(delays, least, strict=True))


def test_rabbitmq_4_3_answers_who_may_not_configure_as_if_the_queue_was_there(
    rabbitmq: RabbitMQ,
) -> None:
    """A user without the permission to configure declares a missing queue passively.
    RabbitMQ 4.3 and later refuse access, as if the queue existed. Earlier versions
    answer that the queue is missing."""
    with amqp.Connection(
        f"127.0.0.1:{rabbitmq.amqp_port}", userid=LIMITED_USER, password=PASSWORD
    ) as connection:
        answer = amqp.AccessRefused if release(rabbitmq) >= (4, 3) else amqp.NotFound
        with pytest.raises(answer):
            connection.channel().queue_declare(uuid.uuid4().hex, passive=True)


def test_rabbitmq_takes_shared_transient_queues_and_4_refuses_mirrors(
    rabbitmq: RabbitMQ, channel: amqp.Channel
) -> None:
    name = uuid.uuid4().hex
    channel.queue_declare(name, durable=False, exclusive=False, auto_delete=True)

    mirrors = ("set_policy", "mirrors", f"^{name}$", '{"ha-mode":"all"}')
    if release(rabbitmq) >= (4, 0):
        with pytest.raises(RuntimeError, match="not recognised"):
            rabbitmq.control(*mirrors)
    else:
        rabbitmq.control(*mirrors)
        rabbitmq.control("clear_policy", "mirrors")


@pytest.mark.parametrize(("kind", "kept"), [("classic", 3), ("quorum", 10)])
def test_rabbitmq_drops_the_surplus_of_a_classic_queue_that_gets_a_limit(
    kind: str, kept: int, rabbitmq: RabbitMQ, channel: amqp.Channel
) -> None:
    """Even with `reject-publish`, which only refuses new messages afterwards."""
    name, limit = uuid.uuid4().hex, '{"max-length": 3, "overflow": "reject-publish"}'
    channel.queue_declare(name, auto_delete=False, durable=True,
                          arguments={"x-queue-type": kind})  # fmt: skip

    def count() -> int:
        found: int = channel.queue_declare(name, passive=True).message_count
        return found

    for _ in range(10):
        channel.basic_publish(amqp.Message(b"1", delivery_mode=2), routing_key=name)
    wait_until(lambda: count() == 10)
    rabbitmq.control("set_policy", name, f"^{name}$", limit, "--apply-to", "queues")
    try:
        wait_until(lambda: name in rabbitmq.control("list_queues", "policy"))
        wait_until(lambda: count() == kept)
    finally:
        rabbitmq.control("clear_policy", name)
        channel.queue_delete(name)
