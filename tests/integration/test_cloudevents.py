"""Foreign CloudEvents, structured and binary, are received as messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_txmsg import Message, message_type
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.models import DeadLetter, InboxMessage
from tests.running import committing, declared, put, ship, step, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@message_type("com.example.order.placed")
@dataclass
class Placed:
    number: str
    amount: Decimal


EVENT: dict[str, Any] = {
    "specversion": "1.0", "id": "A-1", "source": "/shop", "partitionkey": "k",
    "type": "com.example.order.placed", "time": "2026-02-01T10:00:00Z",
}  # fmt: skip
DATA = '{"number": "1", "amount": 12345678901234567.890}'
ORDER = Placed("1", Decimal("12345678901234567.890"))
STRUCTURED = "application/cloudevents+json; charset=utf-8"

got: list[tuple[Any, Message]] = []


def place(order: Placed, message: Message) -> None:
    got.append((order, message))


def anything(message: Message) -> None:
    got.append((message.body, message))


@pytest.fixture(autouse=True)
def _clean() -> None:
    got.clear()


def structured(**more: Any) -> bytes:
    text = json.dumps({**EVENT, **more, "data": "DATA"})
    return text.replace('"DATA"', DATA).encode()


def binary(prefix: str) -> dict[str, str]:
    named = {f"{prefix}{name}": value for name, value in EVENT.items()}
    return {**named, "content-type": "application/json"}


@pytest.mark.parametrize("prefix", ["", "ce-", "ce_", "cloudEvents:", "cloudEvents_"])
def test_an_event_is_a_message(prefix: str) -> None:
    with declared(place) as stage:
        for _ in range(2):
            if prefix:
                put(stage.destination, DATA.encode(), binary(prefix))
            else:
                put(stage.destination, structured(), {"content-type": STRUCTURED})
        step(stage, times=2)

    ((order, message),) = got  # the copy is dropped: its source and id are known
    assert order == ORDER
    assert InboxMessage.objects.get().deliveries == 2
    assert (message.service, message.key) == ("/shop", "k")
    assert message.created_at is not None
    assert message.created_at.isoformat() == "2026-02-01T10:00:00+00:00"


def test_another_source_is_another_event() -> None:
    with declared(place) as stage:
        for source in ("/shop", "/other"):
            body = structured(source=source)
            put(stage.destination, body, {"content-type": STRUCTURED})
        step(stage, times=2)

    assert len(got) == 2


def test_source_and_id_of_an_event_are_not_joined() -> None:
    with declared(place) as stage:
        for source, name in (("/shop", "2026/1"), ("/shop/2026", "1")):
            body = structured(source=source, id=name)
            put(stage.destination, body, {"content-type": STRUCTURED})
        step(stage, times=2)

    assert len(got) == 2


@pytest.mark.parametrize("prefix", ["", "ce-"])
def test_event_from_broker_dead_letters_is_unchanged(prefix: str) -> None:
    headers = binary(prefix) if prefix else {"content-type": STRUCTURED}
    body = DATA.encode() if prefix else structured()
    with declared(place, "tests.events") as stage:
        put("tests.dead", body, {**headers, "originalDestination": stage.destination})
        with txmsg(DEAD_LETTER_DESTINATIONS=["tests.dead"]):
            Consumer([]).run(once=True)
        call_command("dead_letters", "redeliver", "--all", stdout=StringIO())
        ship()
        put(stage.destination, body, headers)
        step(stage, times=2)

    ((order, message),) = got  # and what comes late is a copy
    assert (order, message.key) == (ORDER, "k")


def test_a_media_type_is_the_same_in_capitals() -> None:
    with declared(anything) as stage:
        put(
            stage.destination,
            structured(),
            {"content-type": " Application/CloudEvents+JSON; charset=UTF-8"},
        )
        step(stage)

    ((body, message),) = got
    assert (body, message.service) == (json.loads(DATA), EVENT["source"])


@pytest.mark.parametrize(
    ("event", "body"),
    [
        ({"data": {"a": 1}}, {"a": 1}),
        ({"data": "text", "datacontenttype": "text/plain"}, "text"),
        ({"data": "text"}, "text"),
        ({"data_base64": "AAE=", "datacontenttype": "image/png"}, b"\x00\x01"),
        ({}, None),
    ],
)
def test_a_handler_of_messages_gets_the_data(
    event: dict[str, Any], body: object
) -> None:
    with declared(anything) as stage:
        put(
            stage.destination,
            json.dumps({**EVENT, **event}).encode(),
            {"content-type": STRUCTURED},
        )
        step(stage)

    assert [found for found, _ in got] == [body]


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"{", STRUCTURED, "undecodable_body"),
        (b"[]", "application/cloudevents-batch+json", "undecodable_body"),
        (b"{}", STRUCTURED, "undecodable_body"),
        (structured(specversion="0.3"), STRUCTURED, "undecodable_body"),
        (structured(type="com.example.other"), STRUCTURED, "invalid_body"),
        (structured(id="\ud800"), STRUCTURED, "undecodable_body"),
        (structured(source="\ud800"), STRUCTURED, "undecodable_body"),
        (structured(partitionkey="\x00"), STRUCTURED, "undecodable_body"),
        (json.dumps({**EVENT, "data": "\ud800"}).encode(), STRUCTURED,
         "undecodable_body"),
        (b"+2AA-", "text/plain; charset=utf-7", "undecodable_body"),
        (json.dumps({**EVENT, "data_base64": "?"}).encode(), STRUCTURED,
         "undecodable_body"),
    ],
)  # fmt: skip
def test_malformed_event_is_buried(body: bytes, content_type: str, reason: str) -> None:
    with declared(place) as stage:
        put(stage.destination, body, {"content-type": content_type})
        step(stage)

    letter = DeadLetter.objects.get()
    assert (letter.reason, bytes(letter.body)) == (reason, body)
