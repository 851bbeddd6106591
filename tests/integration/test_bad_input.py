"""An unreadable message becomes a dead letter immediately. The dead letter has the
reason and the message's bytes."""

from __future__ import annotations

import random
import string
import uuid

import pytest
from django.db import connection

from django_txmsg import wire
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.consuming.decoding import MAX_HEADERS
from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage
from django_txmsg.models.queue import QueueMessage
from tests.running import (
    Script,
    committing,
    copies_dropped,
    declared,
    put,
    record_lost_at,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

JSON = {"content-type": "application/json"}

BAD: dict[str, tuple[bytes, dict[str, str]]] = {
    "cut off": (b'{"a": ', JSON),
    "not UTF-8": (b'"\xff\xfe"', JSON),
    "NaN": (b"NaN", JSON),
    "empty": (b"", JSON),
    "unknown charset": (b"x", {"content-type": "text/plain; charset=klingon"}),
    "half a character": (b"+2AA-", {"content-type": "text/plain; charset=utf-7"}),
    "no media type": (b"x", {"content-type": "nonsense"}),
    "no UUID": (b"1", {**JSON, "txmsg-id": "seven"}),
    "too many headers": (b"1", {**JSON, **{f"h{n}": "" for n in range(MAX_HEADERS)}}),
    "headers too large": (b"1", {**JSON, "big": "x" * 200_000}),
    "key too large": (b"1", {**JSON, wire.KEY: "x" * 1_000_000}),
    "nested too deep": (b"[" * 100_000 + b"]" * 100_000, JSON),
}


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc", "broker_only"])
@pytest.mark.parametrize("case", BAD)
def test_bad_message_is_buried_and_others_are_processed(
    case: str, transaction: str
) -> None:
    got: list[Message] = []
    body, headers = BAD[case]
    with declared(got.append, transaction=transaction) as stage:
        put(stage.destination, body, headers)
        good = put(stage.destination)
        step(stage, times=2)
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    assert [one.id for one in got] == [good]
    letter = DeadLetter.objects.get()
    assert bytes(letter.body) == body
    assert letter.reason not in ("", "attempts_exhausted")
    assert letter.stage == stage.name
    assert letter.exception
    for name in headers:
        assert letter.headers[name] == headers[name]


def no_words(length: int) -> str:
    """Return a text that PostgreSQL cannot compress much."""
    chosen = random.Random(1)
    return "".join(chosen.choices(string.ascii_letters + string.digits, k=length))


@pytest.mark.parametrize("name", [wire.KEY, wire.CORRELATION_ID, wire.TICKET])
@pytest.mark.parametrize("options", [{}, {"ordered": "skip"}, {"rate": "100/s"}])
def test_header_longer_than_an_index_row_stops_no_stage(
    name: str, options: dict[str, str]
) -> None:
    """A header is longer than 2,704 bytes, the maximum size of an index row in
    PostgreSQL. The dead letter contains the complete header, and the stage
    continues."""
    headers = {**JSON, name: no_words(12_000)}
    with declared(Script(*[ValueError("no")] * 3), **options) as stage:
        put(stage.destination, b"1", headers)
        step(stage, times=6)
    letter = DeadLetter.objects.get()
    assert letter.headers[name] == headers[name]
    assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    with txmsg(), declared(Script(), name=stage.name, **options) as mended:
        bulk.finish(bulk.start("redeliver", {"ids": [letter.pk]}))
        step(mended, times=2)
    letter.refresh_from_db()
    row = InboxMessage.objects.filter(processed_at__isnull=False)
    # What is no flow's, nor a place in an order, is the same garbage again.
    assert row.exists() or DeadLetter.objects.filter(resolution="open").exists()


@pytest.mark.parametrize(
    "created", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"]
)
def test_impossible_instant_does_not_block_the_stage(created: str) -> None:
    got: list[Message] = []
    with declared(got.append) as stage:
        headers = {**JSON, "txmsg-created": created, "txmsg-expires": created}
        put(stage.destination, b"1", headers)
        step(stage)
    assert [one.created_at for one in got] == [None]


@pytest.mark.parametrize("offset", ["+23:59", "-16:00", "+00:00:30.5"])
@pytest.mark.parametrize("body", [b"1", b"cut off"])
def test_offset_that_postgresql_refuses_does_not_block_the_stage(
    body: bytes, offset: str
) -> None:
    """The row of a processed message and the dead letter of an unreadable message are
    stored."""
    headers = {**JSON, "txmsg-created": f"2024-03-01T00:00:00{offset}"}
    with declared(lambda message: None) as stage:
        put(stage.destination, body, headers)
        step(stage)
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    processed = InboxMessage.objects.filter(processed_at__isnull=False).exists()
    assert processed or DeadLetter.objects.exists()


def test_the_same_bad_message_again_is_the_same_dead_letter() -> None:
    with declared(lambda message: None) as stage:
        message_id = uuid.uuid4()
        for _ in range(2):
            headers = {**JSON, "txmsg-id": str(message_id)}
            put(stage.destination, b"{", headers)
        step(stage, times=2)
    assert DeadLetter.objects.get().deaths == 2
    assert not InboxMessage.objects.filter(processed_at__isnull=False).exists()


#: What somebody may write by hand into the embedded broker's column of headers.
NO_TEXT = {
    "a list": "[]",
    "nothing": "null",
    "a text": '"txmsg-id"',
    "a number": "7",
    "a number in it": '{"content-type": "application/json", "n": 7}',
    "an id that is a number": '{"txmsg-id": 7, "content-type": "application/json"}',
    "null in it": '{"content-type": null, "txmsg-expires": null}',
    "an object in it": '{"txmsg-created": {"a": []}, "correlation-id": [1]}',
    "true in it": '{"redelivered": true, "txmsg-failed-attempt": false}',
    "nested": '{"a": %s}' % ("[" * 900 + "]" * 900),
    "a number of many digits": '{"a": %s}' % ("9" * 5000),
}
#: PostgreSQL takes none of these.
NO_TEXT_ON_SQLITE = {
    "half a pair": r'{"correlation-id": "\ud800", "txmsg-key": "\udfff"}',
    "NUL": r'{"correlation-id": "a\u0000b", "content-type": "application/json"}',
}


def write_by_hand(queue: str, headers: str, body: bytes) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_txmsg_queuemessage (queue, headers, body, deliveries,"
            " enqueued_at, available_at)"
            " VALUES (%s, %s, %s, 0, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)",
            [queue, headers, body],
        )


def no_text() -> dict[str, str]:
    more = NO_TEXT_ON_SQLITE if connection.vendor == "sqlite" else {}
    return {**NO_TEXT, **more}


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc", "broker_only"])
def test_headers_that_are_no_text_bury_their_message_and_no_other(
    transaction: str,
) -> None:
    got: list[Message] = []
    with declared(got.append, transaction=transaction) as stage:
        for name, headers in no_text().items():
            write_by_hand(stage.destination, headers, name.encode())
        good = put(stage.destination)
        step(stage, times=len(no_text()) + 1)
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    assert [one.id for one in got] == [good]
    letters = {bytes(one.body).decode(): one for one in DeadLetter.objects.all()}
    assert letters.keys() == no_text().keys()
    assert {one.reason for one in letters.values()} == {"malformed_headers"}
    kept = letters["an id that is a number"].headers
    assert (kept["txmsg-id"], kept["content-type"]) == ("7", "application/json")


def test_headers_that_are_no_text_in_the_other_queues_we_read() -> None:
    control = wire.control_destination("tests")
    for name, headers in no_text().items():
        write_by_hand(control, headers, name.encode())
        write_by_hand("tests.dead", headers, name.encode())
    with txmsg(DEAD_LETTER_DESTINATIONS=["tests.dead"]):
        Consumer([]).run(once=True)
    assert not QueueMessage.objects.exists()
    assert DeadLetter.objects.count() == len(no_text())


#: What nobody can read, also if its id is that of another message.
UNREADABLE = ["cut off", "no media type", "headers too large"]


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_message_with_the_id_of_a_parked_one_leaves_it_parked(
    case: str,
) -> None:
    """The parked message has no other copy. The unreadable message is a request, whose
    dead letter would revoke the message with its id."""
    body, headers = BAD[case]
    script = Script(ValueError("once"))
    with declared(script) as stage:
        parked = put(stage.destination)
        step(stage)
        asks = {wire.REPLY_TO: "tests.flow.steps", wire.TICKET: "1"}
        put(stage.destination, body, {**headers, **asks, "txmsg-id": str(parked)})
        step(stage, parked=False)
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
        assert not DeadLetter.objects.exists()
        step(stage)
    assert script.attempts == [1, 2]
    assert InboxMessage.objects.get().processed_at is not None


@pytest.mark.parametrize("transaction", ["outbox", "none"])
@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_copy_of_a_processed_message_is_a_duplicate(
    case: str, transaction: str
) -> None:
    """The relay has sent the message twice, and older code receives the second copy."""
    got: list[Message] = []
    body, headers = BAD[case]
    with declared(got.append, transaction=transaction) as stage:
        message_id = put(stage.destination)
        step(stage)
        put(stage.destination, body, {**headers, "txmsg-id": str(message_id)})
        with copies_dropped() as dropped:
            step(stage)
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    assert [one.id for one in got] == dropped == [message_id]
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize("options", [{}, {"ordered": "skip"}])
def test_unreadable_copy_of_an_open_message_is_buried_with_its_row(
    options: dict[str, str],
) -> None:
    """The worker of the first copy may be dead, and this copy may be the only one."""
    headers = {"content-type": "nonsense", wire.KEY: "k"}
    with declared(lambda message: None, **options) as stage:
        row = InboxMessage.objects.create(
            stage=stage.name, message_id=uuid.uuid4(), destination=stage.destination
        )
        put(stage.destination, b"x", {**headers, "txmsg-id": str(row.message_id)})
        step(stage)
    assert DeadLetter.objects.get().message_id == row.message_id
    row.refresh_from_db()
    assert row.dead_at is not None


def test_unreadable_copy_of_a_message_that_is_just_being_parked_leaves_it() -> None:
    """The worker of the first copy parks it after the worker of the unreadable copy has
    seen the open row."""
    with declared(lambda message: None) as stage:
        row = InboxMessage.objects.create(
            stage=stage.name, message_id=uuid.uuid4(), destination=stage.destination
        )
        headers = {"content-type": "nonsense", "txmsg-id": str(row.message_id)}
        put(stage.destination, b"x", headers)
        parks = "due_at = CURRENT_TIMESTAMP, headers = '{}', body = ''"
        with (
            copies_dropped() as dropped,
            record_lost_at(
                "UPDATE django_txmsg_inboxmessage SET dead_at",
                f"UPDATE django_txmsg_inboxmessage SET {parks}",
            ),
        ):
            step(stage, parked=False)
        assert dropped == [row.message_id]
        assert not QueueMessage.objects.filter(queue=stage.destination).exists()
    row.refresh_from_db()
    assert (row.dead_at, row.body is not None) == (None, True)
    assert not DeadLetter.objects.exists()
