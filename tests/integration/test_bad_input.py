"""What cannot be read: a dead letter at once, with its reason and its very bytes."""

from __future__ import annotations

import uuid

import pytest

from django_txmsg.consuming.reading import MAX_HEADERS
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage
from django_txmsg.models.queue import QueueMessage
from tests.running import committing, declared, put, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

JSON = {"content-type": "application/json"}

BAD: dict[str, tuple[bytes, dict[str, str]]] = {
    "cut off": (b'{"a": ', JSON),
    "not UTF-8": (b'"\xff\xfe"', JSON),
    "NaN": (b"NaN", JSON),
    "empty": (b"", JSON),
    "unknown charset": (b"x", {"content-type": "text/plain; charset=klingon"}),
    "no media type": (b"x", {"content-type": "nonsense"}),
    "no UUID": (b"1", {**JSON, "txmsg-id": "seven"}),
    "too many headers": (b"1", {**JSON, **{f"h{n}": "" for n in range(MAX_HEADERS)}}),
    "headers too large": (b"1", {**JSON, "big": "x" * 200_000}),
    "nested too deep": (b"[" * 100_000 + b"]" * 100_000, JSON),
}


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc", "broker_only"])
@pytest.mark.parametrize("case", BAD)
def test_is_buried_at_once_and_harms_nobody(case: str, transaction: str) -> None:
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


def test_the_same_bad_message_again_is_the_same_dead_letter() -> None:
    with declared(lambda message: None) as stage:
        message_id = uuid.uuid4()
        for _ in range(2):
            headers = {**JSON, "txmsg-id": str(message_id)}
            put(stage.destination, b"{", headers)
        step(stage, times=2)
    assert DeadLetter.objects.get().deaths == 2
    assert not InboxMessage.objects.filter(processed_at__isnull=False).exists()
