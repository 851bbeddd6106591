"""A database role with exactly the privileges that the manual names runs a project."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import Client, override_settings

from django_txmsg.django_internals import raw
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, IdempotencyKey, InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message, send_messages
from tests import factories
from tests.app.models import Effect
from tests.faults import wait_until
from tests.integration.test_doctor import doctor, of
from tests.running import committing, declared, txmsg

pytestmark = pytest.mark.postgresql

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "production.md"


def documented() -> list[str]:
    """Return the statements that the page gives for existing tables."""
    section = PAGE.read_text().split("### Privileges on PostgreSQL")[1]
    found = re.findall(r"^GRANT .*;$", section, re.MULTILINE)
    assert len(found) == 2
    return found


@pytest.fixture
def shop() -> Iterator[None]:
    """Make new connections use a role with the documented privileges."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE shop")
        for statement in documented():
            cursor.execute(statement)
        cursor.execute("ALTER ROLE SESSION_USER SET role = shop")
    connections.close_all()
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SET ROLE NONE")
            cursor.execute("ALTER ROLE SESSION_USER RESET role")
            cursor.execute("DROP OWNED BY shop")
            cursor.execute("DROP ROLE shop")
        connections.close_all()


def handler(message: Message) -> None:
    if message.body == 7:
        raise ValueError("not this one")
    Effect.objects.create(name="done", message_id=str(message.id))
    send_messages({"destination": "tests.next", "body": one} for one in range(20))


@committing
def test_documented_privileges_suffice_for_every_process(shop: None) -> None:
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
def test_a_role_that_may_not_use_the_sequences_is_bad(shop: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET ROLE NONE")
        cursor.execute("REVOKE USAGE ON ALL SEQUENCES IN SCHEMA public FROM shop")
    connections.close_all()
    with txmsg():
        code, examined = doctor()

    (bad,) = of(examined, "sequences of database 'default'")
    assert (code, bad["state"]) == (1, "bad")
    assert "django_txmsg_" in bad["text"]
    assert "USAGE on their sequences" in bad["cure"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("may_see", [True, False])
def test_archive_knows_how_old_a_transaction_of_another_role_is(
    shop: None, tmp_path: Path, may_see: bool
) -> None:
    """To a role without `pg_read_all_stats`, the transaction counts as open for too
    long. To other roles it is young."""
    factories.OutboxMessageFactory(dispatched=True, created_at=factories.ago(days=99))
    info = raw(connection).info
    other = psycopg.connect(
        **info.get_parameters(), password=info.password, autocommit=True
    )
    with txmsg(LAKE=f"file://{tmp_path}/lake"), other:
        other.execute("SET ROLE NONE")
        if may_see:
            other.execute("GRANT pg_read_all_stats TO shop")
        with other.transaction():
            other.execute("SELECT pg_current_xact_id()")
            factories.OutboxMessageFactory(
                dispatched=True, created_at=factories.ago(days=99)
            )
            assert archive() == (0 if may_see else 1)
        assert archive() == 0
    assert not OutboxMessage.objects.exists()


def archive() -> int:
    """Return the exit code of `pipeline archive`."""
    try:
        call_command("pipeline", "archive", "--engine", "local", "--json")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
