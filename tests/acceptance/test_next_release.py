"""This release works beside the next one: on tables that the next release has extended,
and with messages that have headers of the next release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection

from django_txmsg import Message, send_message
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from tests.app.models import Effect
from tests.running import committing, declared, put, send, ship, step, txmsg

pytestmark = committing

#: What the next release may add: docs/versions.md.
COLUMN = "of_the_next_release"
#: Messages as earlier releases wrote them. They are never edited; each release adds a
#: file.
SAMPLES = [
    {**sample, "name": f"{file.stem} {sample['name']}"}
    for file in sorted((Path(__file__).parent / "messages_of").glob("*.json"))
    for sample in json.loads(file.read_text())
]


@pytest.fixture
def grown() -> Iterator[None]:
    """Add a column with a default to each table while the block runs."""
    tables = sorted(
        {
            model._meta.db_table
            for model in apps.get_app_config("django_txmsg").get_models()
            if model._meta.managed
        }
    )
    assert len(tables) > 5
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(
                f"ALTER TABLE {table} ADD COLUMN {COLUMN} integer NOT NULL DEFAULT 7"
            )
    yield
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(f"ALTER TABLE {table} DROP COLUMN {COLUMN}")


@pytest.mark.usefixtures("grown")
def test_this_release_works_on_the_tables_of_the_next(destination: str) -> None:
    """On the tables of the next release, this release stores, dispatches, receives,
    fails, buries, redelivers and prunes messages. The new columns keep their
    defaults."""
    broken = [True]

    def handler(message: Message) -> None:
        if message.body == "fails" and broken:
            raise LookupError("not yet")
        Effect.objects.create(name=str(message.body), message_id=str(message.id))
        send_message(f"{destination}.next", message.body)

    once = {"MAX_REDELIVERIES": 0}
    with (
        txmsg(REDELIVERY=once),
        declared(handler, destination, ordered="block") as stage,
    ):
        send(destination, "well", key="a")
        send(destination, "fails", key="b")
        step(stage, times=2)
        letter = DeadLetter.objects.get()
        broken.clear()
        call_command("dead_letters", "redeliver", str(letter.pk), verbosity=0)
        step(stage, times=2)
        ship()
        call_command("message_status", verbosity=0)
        call_command("prune_messages", verbosity=0)

    assert sorted(Effect.objects.values_list("name", flat=True)) == ["fails", "well"]
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    with connection.cursor() as cursor:
        for model in (OutboxMessage, InboxMessage, DeadLetter):
            table = model._meta.db_table
            cursor.execute(f"SELECT DISTINCT {COLUMN} FROM {table}")
            assert cursor.fetchall() == [(7,)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: str(sample["name"]))
def test_a_message_of_the_release_before_is_read(sample: dict[str, Any]) -> None:
    """A message in the previous wire format is read with the same id, body and
    headers."""
    seen: list[Message] = []
    with txmsg(), declared(seen.append) as stage:
        put(stage.destination, sample["body"].encode("latin-1"), sample["wire"])
        step(stage)

    (message,) = seen
    body = message.body.hex() if isinstance(message.body, bytes) else message.body
    assert {
        "id": str(message.id),
        "body": body,
        "headers": message.headers,
        "key": message.key,
        "service": message.service,
        "created_at": message.created_at and message.created_at.isoformat(),
        "correlation_id": message.correlation_id,
    } == sample["read"]


def test_headers_of_the_next_release_are_left_out(destination: str) -> None:
    seen: list[Message] = []
    headers = {
        "content-type": "application/json",
        "txmsg-of-the-next-release": "1",
        "txmsg-created": "2026-11-25T04:33:46.538427+00:00",
        "tenant": "acme",
    }
    with txmsg(), declared(seen.append, destination) as stage:
        put(destination, b'{"order": 1}', headers)
        step(stage)

    (message,) = seen
    assert (message.body, message.headers) == ({"order": 1}, {"tenant": "acme"})
