"""Each foreign message is processed, or becomes a dead letter with its bytes. Consumers
continue, and no message stays in the queue.

The messages combine random faults of headers and bodies. They are sent over AMQP, by a
raw STOMP client, and as rows of the embedded broker. The test prints its random seed.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import amqp
import pytest
from django.db import connection

from django_txmsg import wire
from django_txmsg.brokers import get_broker
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage
from tests.raw_client import RawClient
from tests.running import IMPATIENT, committing, declared, put, txmsg
from tests.services import ByAmqp, RabbitMQ
from tests.services.stomp_server import PASSWORD, USER, StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

EACH = 40

NAMES = [
    "txmsg-id", "txmsg-key", "txmsg-service", "txmsg-created", "txmsg-expires",
    "txmsg-failed-attempt", "txmsg-broker-id", "txmsg-session", "txmsg-using",
    "txmsg-oracle", "txmsg-signed", "txmsg-signature", "content-type",
    "content-length-x", "correlation-id", "traceparent", "redelivered", "JMSXGroupX",
    "x-first-death-queue", "originalDestination", "dlqDeliveryFailureCause", "colour",
    "ce-specversion", "ce-id", "ce-source", "ce-type", "ce-time",
    "ключ", "a:b", "a\\b", "a\nb", " a ", "x" * 300,
]  # fmt: skip
VALUES = [
    "", " ", "0", "-1", "nan", "inf", "null", "7" * 5000, "a:b\\c\n\td", "ключ 😀",
    "a\rb", "\x01\x7f", "é" * 3000, "2099-01-01T00:00:00Z", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59-23:59", "2020-13-45", "default", "transaction", "delay",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "/queue/elsewhere",
    "queue://tests.txmsg.control", '["txmsg-id"]', "[" * 3000, "true",
]  # fmt: skip
TYPES = [
    "application/json", "application/problem+json; charset=utf-8", "text/plain",
    "text/plain; charset=klingon", "application/octet-stream", "nonsense", "", "/",
    "application/json; charset=utf-16", "text/html; charset=\x01",
    "application/cloudevents+json", "text/plain; charset=utf-7",
]  # fmt: skip
BODIES = [
    b"", b"null", b"1", b'"text"', b'{"a": [1, 2, {"b": null}]}', b'{"a":', b"NaN",
    b"\xff\xfe\x00", b"\xef\xbb\xbf1", b"\x00" * 50, b"[" * 50_000, b"9" * 5000,
    b'"\\ud800"', b'{"a": 1, "a": 2}', b"1e999", "ключ 😀".encode("utf-16"),
    b'{"specversion": "1.0", "id": "\\ud800", "source": "\\u0000", "type": "a"}',
    b'{"specversion": "1.0", "id": "1", "source": "/", "type": "a", "data": "\\ud800"}',
    b"+2AA-", bytes(range(256)) * 40, b"\n\n\x00\n\nMESSAGE\n\n\x00",
]  # fmt: skip
#: What AMQP carries in its table of headers beside text.
TABLE = [
    0, -1, 2**31, 2**63 - 1, 0.5, float("nan"), True, None, Decimal("1.5"), [1, "a"],
    {"a": {"b": []}}, dt.datetime(2000, 1, 1), "a\0b", "\0",
]  # fmt: skip

Draw = random.Random


def drawn_headers(draw: Draw) -> dict[str, str]:
    """Return random text headers. About half of the results contain a valid and unique
    `txmsg-id`."""
    names = draw.sample(NAMES, draw.randint(0, 6))
    headers = {name: draw.choice(VALUES) for name in names}
    if draw.random() < 0.8:
        headers["content-type"] = draw.choice(TYPES)
    if draw.random() < 0.5:
        headers["txmsg-id"] = str(uuid.UUID(int=draw.getrandbits(128)))
    return headers


def by_amqp(server: RabbitMQ, queue: str, draw: Draw) -> bytes | None:
    """Publish one random message over AMQP, and return its body."""
    headers: dict[str, Any] = drawn_headers(draw)
    for name in draw.sample(NAMES, draw.randint(0, 2)):
        headers[name] = draw.choice(TABLE)
    properties: dict[str, Any] = {"application_headers": headers, "delivery_mode": 2}
    for name in ("correlation_id", "message_id", "reply_to", "type", "app_id"):
        if draw.random() < 0.2:
            properties[name] = draw.choice(
                ["", "7", "a\0b", "a\nb:c", "ключ", "x" * 80]
            )
    properties["content_type"] = str(headers.pop("content-type", ""))
    if draw.random() < 0.2:
        properties |= {"priority": draw.choice([0, 9, 255]), "user_id": USER}
    body = draw.choice(BODIES)
    message = amqp.Message(body, **properties)
    link = amqp.Connection(
        f"127.0.0.1:{server.amqp_port}", USER, PASSWORD, confirm_publish=True
    )
    try:
        with link:
            channel = link.channel()
            channel.queue_declare(queue, durable=True, auto_delete=False)
            channel.basic_publish(message, routing_key=queue)
    except (amqp.AMQPError, OSError, struct.error):
        return None
    return body


def by_stomp(
    server: StompServer, queue: str, draw: Draw, longest: int | None = None
) -> bytes | None:
    """Send one random message over STOMP. Return its body, or None if the broker
    refused it."""
    drawn, body = drawn_headers(draw), draw.choice(BODIES)
    headers = {
        name: value
        for name, value in drawn.items()
        if longest is None or max(len(name.encode()), len(value.encode())) <= longest
    }
    to = {"destination": f"/queue/{queue}", "persistent": "true"}
    headers["content-length"] = str(len(body))
    with RawClient(("127.0.0.1", server.port), login=USER, passcode=PASSWORD) as client:
        client.send("SEND", {**to, **headers}, body, receipt="sent")
        answer = client.next()
    return body if answer is not None and answer.command == "RECEIPT" else None


def by_stomp_beside(server: ByAmqp, queue: str, draw: Draw) -> bytes | None:
    """Send one random message over STOMP to a queue that is consumed over AMQP.

    The message's header names and values are at most 255 bytes long. RabbitMQ accepts
    longer names over STOMP, but then closes the connection of the AMQP consumer.
    """
    return by_stomp(server.node, queue, draw, longest=255)


def by_hand(_: None, queue: str, draw: Draw) -> bytes | None:
    """Insert a row of the embedded broker, with any headers that PostgreSQL accepts as
    JSON."""
    headers: Any = drawn_headers(draw)
    strange = [0, -1, 10**400, 0.5, True, None, [1, "a"], {"a": {"b": []}}]
    for name in draw.sample(NAMES, draw.randint(0, 2)):
        headers[name] = draw.choice(strange)
    headers = draw.choice([*[headers] * 9, None, [], "text", 7, [headers]])
    body = draw.choice(BODIES)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_txmsg_queuemessage"
            " (queue, headers, body, deliveries, enqueued_at, available_at)"
            " VALUES (%s, %s, %s, 0, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)",
            [queue, json.dumps(headers), body],
        )
    return body


SENDERS: dict[str, tuple[str, Callable[[Any, str, Draw], bytes | None]]] = {
    "amqp": ("rabbitmq", by_amqp),
    "amqp to amqp": ("rabbitmq_amqp", by_amqp),
    "stomp to amqp": ("rabbitmq_amqp", by_stomp_beside),
    "stomp at rabbitmq": ("rabbitmq", by_stomp),
    "stomp at activemq": ("activemq", by_stomp),
    "by hand": ("", by_hand),
}
#: What `make test` runs: each client at one broker.
SAMPLE = {"amqp", "stomp to amqp", "stomp at activemq", "by hand"}


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))]
)
@pytest.mark.parametrize(
    "sender",
    [
        pytest.param(one, marks=() if one in SAMPLE else pytest.mark.matrix)
        for one in SENDERS
    ],
)
def test_everything_ends_processed_or_dead_with_its_bytes(
    sender: str, seed: int, destination: str, request: pytest.FixtureRequest
) -> None:
    kind, send = SENDERS[sender]
    server = request.getfixturevalue(kind) if kind else None
    url = server.url() if server else "database://?poll=0.01"
    draw = Draw(f"{sender} {seed}")
    dead = f"DLQ.{destination}"
    control = wire.control_destination(destination)
    got: list[Message] = []
    settings = {
        "SERVICE": destination,
        "BROKERS": {"default": {"URL": url}},
        "DEAD_LETTER_DESTINATIONS": [dead],
        "HTTP": {"MAX_COMMIT_DURATION": 1.0},
        "REDELIVERY": {**IMPATIENT["REDELIVERY"], "MAX_REDELIVERIES": 1},
    }
    with txmsg(**settings), declared(got.append, destination) as stage:
        sent = {
            queue: [send(server, queue, draw) for _ in range(EACH)]
            for queue in (destination, dead, control)
        }
        last = put(destination)
        Consumer([stage]).run(once=True)
        for queue in sent:
            with get_broker().open() as session:
                session.subscribe(queue, prefetch=1)
                assert session.receive(0.5) is None, f"something is left in {queue}"
    taken = {
        q: [one for one in bodies if one is not None] for q, bodies in sent.items()
    }
    assert all(len(bodies) > EACH / 3 for bodies in taken.values())
    assert last in [one.id for one in got]
    of_stage = DeadLetter.objects.filter(stage=stage.name)
    processed = InboxMessage.objects.filter(processed_at__isnull=False)
    ended = len(got) - 1 + sum(of_stage.values_list("deaths", flat=True))
    assert processed.count() == len(got)
    assert ended == len(taken[destination])
    assert {bytes(one.body) for one in of_stage} <= set(taken[destination])
    of_broker = DeadLetter.objects.filter(stage="")
    assert sum(of_broker.values_list("deaths", flat=True)) == len(taken[dead])
    assert {bytes(one.body) for one in of_broker} == set(taken[dead])
