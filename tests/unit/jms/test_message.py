"""Messages, bodies and destinations, without a broker."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.jms import destination as destinations
from django_txmsg.jms.dialect import ACTIVEMQ, ARTEMIS, RABBITMQ, recognize
from django_txmsg.jms.frames import Frame
from django_txmsg.jms.message import encode_body, new_id


@pytest.mark.parametrize(
    ("body", "raw", "kind"),
    [
        ("tëxt", "tëxt".encode(), "text/plain;charset=utf-8"),
        (b"\0b", b"\0b", "application/octet-stream"),
        (bytearray(b"b"), b"b", "application/octet-stream"),
        ({"a": [1, None]}, b'{"a":[1,null]}', "application/json"),
        (7, b"7", "application/json"),
        (None, b"", None),
    ],
)
def test_a_body_is_text_bytes_or_json(body: Any, raw: bytes, kind: str | None) -> None:
    assert encode_body(body) == (raw, kind)


@pytest.mark.parametrize("body", [object(), {1, 2}, float("nan"), "\ud800"])
def test_any_other_body_is_a_format_error(body: Any) -> None:
    with pytest.raises(jms.MessageFormatError):
        encode_body(body)


@pytest.mark.parametrize(
    "kind", ["text/plain; charset=punycode", "text/plain;charset=klingon"]
)
def test_received_body_in_a_refused_charset_is_a_format_error(kind: str) -> None:
    frame = Frame("MESSAGE", {"content-type": kind}, b"abc")
    message = jms.Message.received(frame, "1", jms.Queue("orders"))
    with pytest.raises(jms.MessageFormatError):
        message.body  # noqa: B018 - the first access decodes the body
    assert message.raw_body == b"abc"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("orders.place", jms.Queue("orders.place")),
        ("/queue/orders.place", jms.Queue("orders.place")),
        ("topic:orders.placed", jms.Topic("orders.placed")),
        ("/topic/orders.placed", jms.Topic("orders.placed")),
    ],
)
def test_a_destination_is_a_name(text: str, found: jms.Destination) -> None:
    assert destinations.parse(text) == destinations.parse(found)
    assert destinations.parse(str(found)) == destinations.parse(found)


@pytest.mark.parametrize(
    "name", ["", " ", "topic:", "a\nb", " a", "/queue/", "/exchange/x"]
)
def test_a_malformed_destination_is_refused(name: str) -> None:
    with pytest.raises(jms.InvalidDestinationError):
        destinations.parse(name)


@pytest.mark.parametrize("name", ["a,b", "a?x=1", "a.*", "a.>"])
def test_activemq_refuses_names_it_would_read_otherwise(name: str) -> None:
    with pytest.raises(jms.InvalidDestinationError):
        ACTIVEMQ.address(jms.Queue(name))


def test_rabbitmq_refuses_a_slash_and_escapes_what_it_decodes() -> None:
    with pytest.raises(jms.InvalidDestinationError):
        RABBITMQ.address(jms.Queue("a/b"))

    assert RABBITMQ.address(jms.Queue("50% ü")) == "/queue/50%25%20%C3%BC"


def test_rabbitmq_is_asked_for_an_existing_queue_without_declaring_it() -> None:
    dialect = replace(RABBITMQ, existing="jobs.*")
    for name, address in (
        ("jobs.wait-30s", "/amq/queue/jobs.wait-30s"),
        ("jobs.delay-32s", "/queue/jobs.delay-32s"),
        ("mails", "/queue/mails"),
    ):
        assert dialect.address(jms.Queue(name)) == address


def test_artemis_is_asked_for_a_queue_by_name() -> None:
    assert ARTEMIS.send_headers(jms.Queue("a")) == {
        "destination": "a",
        "destination-type": "ANYCAST",
    }


@pytest.mark.parametrize(
    ("server", "dialect"),
    [
        ("ActiveMQ/5.17.2", ACTIVEMQ),
        ("ActiveMQ-Artemis/2.31.2 ActiveMQ Artemis Messaging Engine", ARTEMIS),
        ("RabbitMQ/3.10.8", RABBITMQ),
        ("", ACTIVEMQ),
    ],
)
def test_the_server_header_tells_the_dialect(server: str, dialect: object) -> None:
    assert recognize(server) is dialect


def test_a_message_can_be_read_and_changed_before_it_is_sent() -> None:
    message = jms.Message({"a": 1}, {"h": "v"})

    message.body = "other"
    message.headers["h"] = "w"

    assert (message.body, message.headers) == ("other", {"h": "w"})
    assert (message.message_id, message.destination, message.timestamp) == (None,) * 3
    assert repr(message) == "<Message not sent>"


def test_message_ids_are_version_4_and_differ_whatever_the_application_seeds() -> None:
    random.seed(1)
    first = [new_id() for _ in range(1000)]
    random.seed(1)
    second = [new_id() for _ in range(1000)]

    assert len({*first, *second}) == 2000
    assert {uuid.UUID(one).version for one in first} == {4}
