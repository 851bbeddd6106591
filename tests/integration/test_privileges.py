"""A database role with exactly the privileges that the manual names runs a project."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import Client, override_settings

from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, IdempotencyKey, InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect
from tests.faults import wait_until
from tests.integration.test_doctor import doctor, of
from tests.privileges import acting
from tests.running import committing, declared, txmsg

pytestmark = pytest.mark.postgresql


@pytest.fixture
def shop() -> Iterator[str]:
    """The role of all connections to the default database."""

    def execute(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET ROLE NONE")
            cursor.execute(statement)

    with acting(execute, connection.settings_dict["NAME"]) as role:
        connections.close_all()
        yield role
    connections.close_all()


def handler(message: Message) -> None:
    if message.body == 7:
        raise ValueError("not this one")
    Effect.objects.create(name="done", message_id=str(message.id))
    send_messages({"destination": "tests.next", "body": one} for one in range(20))


@committing
def test_documented_privileges_suffice_for_every_process(shop: str) -> None:
    web = override_settings(
        ROOT_URLCONF="tests.integration.http.urls",
        MIDDLEWARE=["django_txmsg.middleware.OutboxMiddleware"],
    )
    keep = {"OUTBOX": 0, "INBOX": 0, "DEAD_LETTERS": 0, "IDEMPOTENCY": 0}
    quiet = {"stdout": io.StringIO(), "verbosity": 0}
    with txmsg(HTTP={"IDEMPOTENCY": True}, RETENTION=keep), declared(handler) as stage:
        with web:
            key = {"Idempotency-Key": "one", "Authorization": "Bearer mine"}
            answer = Client(headers=key).post("/order?then=", {"number": "1"})
        assert answer.status_code == 201
        assert IdempotencyKey.objects.exists()
        with transaction.atomic():
            send_message(stage.destination, 7)
            send_messages(
                {"destination": stage.destination, "body": n} for n in range(20)
            )
        call_command("relay", "--once", **quiet)
        call_command("consume", "--once", **quiet)
        wait_until(lambda: Effect.objects.count() == 19)
        call_command("dead_letters", "discard", "--all", **quiet)
        call_command("relay", "--once", **quiet)
        call_command("message_status", **quiet)
        call_command("prune_messages", **quiet)
        code, examined = doctor()

    left = (OutboxMessage, InboxMessage, DeadLetter, IdempotencyKey)
    assert not any(model.objects.exists() for model in left)
    assert code == 0, examined


@committing
def test_a_role_that_may_not_use_the_sequences_is_bad(shop: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET ROLE NONE")
        cursor.execute(f"REVOKE USAGE ON ALL SEQUENCES IN SCHEMA public FROM {shop}")
    connections.close_all()
    with txmsg():
        code, examined = doctor()

    (bad,) = of(examined, "sequences of database 'default'")
    assert (code, bad["state"]) == (1, "bad")
    assert "django_txmsg_" in bad["text"]
    assert "USAGE on their sequences" in bad["cure"]
