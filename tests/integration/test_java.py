"""A real Java client (JMS) sends messages to a stage, and receives messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from django_txmsg import Message, message_type
from django_txmsg.brokers.java import for_java, from_java
from django_txmsg.models import DeadLetter
from tests.faults import wait_until
from tests.running import committing, declared, running, send, txmsg
from tests.services import ActiveMQ, java
from tests.services.java import JmsPeer

pytestmark = [committing, pytest.mark.postgresql]


@message_type("java.Greeting", version=2, readable_from=1)
@dataclass
class Greeting:
    text: str


got: list[tuple[Any, Message]] = []


def greet(greeting: Greeting, message: Message) -> None:
    got.append((greeting, message))


@pytest.fixture(scope="module")
def client(activemq: ActiveMQ, tmp_path_factory: pytest.TempPathFactory) -> JmsPeer:
    """A JMS client, which is compiled only once."""
    absent = java.missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)
    return JmsPeer(activemq, tmp_path_factory.mktemp("classes"))


@pytest.fixture
def peer(client: JmsPeer, activemq: ActiveMQ) -> Iterator[JmsPeer]:
    """The JMS client of the test's default broker."""
    got.clear()
    with txmsg(BROKERS={"default": {"URL": activemq.url()}}):
        yield client


TEXT = 'ä€\U0001f600 and "\U0001f468\u200d\U0001f469"'


def test_java_sends_to_a_typed_stage(peer: JmsPeer, destination: str) -> None:
    own = str(uuid4())
    body = json.dumps({"text": TEXT}, ensure_ascii=False)
    with declared(greet, destination) as stage, running(stage):
        peer.send(destination, body, tenant="é", txmsg_id=own)
        peer.send(destination, body, txmsg_type="java.Greeting;v=1;min=1")
        peer.send(destination, '{"text": 5}')
        wait_until(lambda: len(got) == 2 and DeadLetter.objects.count() == 1)

    assert [greeting for greeting, _ in got] == [Greeting(TEXT)] * 2
    first = got[0][1]
    assert (str(first.id), first.headers) == (own, {"tenant": "é"})
    assert DeadLetter.objects.get().exception == "text: string_type"


def test_java_receives_sent_messages(peer: JmsPeer, destination: str) -> None:
    sent = send(
        destination, Greeting(TEXT), headers={"tenant": "é", "correlation-id": "c"}
    )
    send(destination, {"text": TEXT})
    send(destination, TEXT.encode())

    typed, plain, raw = peer.receive(destination, 3)

    assert (typed.kind, json.loads(typed.body)) == ("text", {"text": TEXT})
    assert typed.properties["tenant"] == "é"
    assert typed.properties["txmsg_id"] == str(sent.id)
    assert typed.properties["txmsg_type"] == "java.Greeting;v=2;min=1"
    assert typed.properties["JMSCorrelationID"] == "c"
    assert (plain.kind, json.loads(plain.body)) == ("text", {"text": TEXT})
    assert (raw.kind, raw.body) == ("bytes", TEXT.encode())


def test_java_selects_by_our_headers(peer: JmsPeer, destination: str) -> None:
    send(destination, {"text": "other"})
    sent = [send(destination, Greeting(str(number))) for number in range(2)]

    (first,) = peer.receive(destination, 1, "txmsg_type LIKE 'java.Greeting;%'")
    (second,) = peer.receive(destination, 1, f"txmsg_id = '{sent[1].id}'")

    assert json.loads(first.body) == {"text": "0"}
    assert json.loads(second.body) == {"text": "1"}


def test_our_own_consumers_see_no_twins_of_headers(
    activemq: ActiveMQ, destination: str
) -> None:
    seen: list[Message] = []
    with (
        txmsg(BROKERS={"default": {"URL": activemq.url()}}),
        declared(seen.append, destination) as stage,
        running(stage),
    ):
        send(destination, {"text": TEXT}, headers={"a": "b"})
        send(destination, TEXT.encode())
        wait_until(lambda: len(seen) == 2)

    assert [one.body for one in seen] == [{"text": TEXT}, TEXT.encode()]
    assert [dict(one.headers) for one in seen] == [{"a": "b"}, {}]


@pytest.mark.parametrize(
    ("content_type", "body", "kind", "sent"),
    [
        ("application/json", b'"\xc3\xa9"', "text", b'"\xc3\xa9"'),
        ("application/json", '"\U0001f600"'.encode(), "text", b'"\\ud83d\\ude00"'),
        ("application/json", b'"\xff"', None, b'"\xff"'),
        ("application/json", b'"\x00"', None, b'"\x00"'),
        ("text/plain", b"a", "text", b"a"),
        ("text/plain", "\U0001f600".encode(), None, "\U0001f600".encode()),
        ("application/octet-stream", b"a", None, b"a"),
    ],
)
def test_which_bodies_java_gets_as_text(
    content_type: str, body: bytes, kind: str | None, sent: bytes
) -> None:
    headers = {"content-type": content_type}

    assert for_java(headers, body) == sent
    assert headers.get("amq-msg-type") == kind


def test_bytes_of_java_are_left_alone() -> None:
    pair = "\U0001f600".encode("utf-16", "surrogatepass").decode("utf-16")
    cesu = b"\xed\xa0\xbd\xed\xb8\x80"

    assert from_java({}, cesu) == ({}, pair.encode())
    assert from_java({"content-length": "6"}, cesu)[1] == cesu
    assert from_java({"content-type": "image/png"}, cesu)[1] == cesu
    twin = {"txmsg_id": "1", "txmsg-id": "2", "txmsg_key": "k", "amq-msg-type": "text"}
    assert from_java(twin, b"")[0] == {"txmsg-id": "2", "txmsg-key": "k"}
