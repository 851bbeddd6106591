"""send_message() stores or refuses a message. A message is sent only after the
commit."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import TextChoices

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.errors import DuplicateMessage, InvalidMessage, TransactionRequired
from django_txmsg.http_outbox import database_identity
from django_txmsg.models import (
    DatabaseIdentity,
    InboxMessage,
    OutboxMessage,
    Schedule,
)
from django_txmsg.sending.outbox import send_message, send_messages, send_part
from tests.app.models import Order
from tests.running import committing, declared, send, set_sequence, step, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def test_outside_a_transaction_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TransactionRequired, match=r"atomic\(using='default'\)"):
        send_message("orders", 1)
    with transaction.atomic(using="other"), pytest.raises(TransactionRequired):
        send_message("orders", 1)
    assert not OutboxMessage.objects.exists()


def test_a_transaction_with_autocommit_off_needs_an_atomic_block_too() -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionRequired, match="also with autocommit off"):
            send_message("orders", 1)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_the_message_commits_or_rolls_back_with_the_data() -> None:
    with transaction.atomic():
        Order.objects.create(number="1")
        send_message("orders", 1)
        transaction.set_rollback(True)
    assert not Order.objects.exists()
    assert not OutboxMessage.objects.exists()
    with transaction.atomic():
        Order.objects.create(number="1")
        send_message("orders", 1)
    assert Order.objects.count() == OutboxMessage.objects.count() == 1


def test_a_message_is_stored_in_the_database_named_by_using() -> None:
    with transaction.atomic(using="other"):
        sent = send_message("orders", 1, using="other")
    assert OutboxMessage.objects.using("other").get().message_id == sent.id
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize(
    ("body", "stored", "content_type"),
    [
        ({"a": [1, None, "ü"]}, '{"a":[1,null,"ü"]}'.encode(), "application/json"),
        (None, b"null", "application/json"),
        ("text", b'"text"', "application/json"),
        (decimal.Decimal("1.10"), b'"1.10"', "application/json"),
        (
            dt.datetime(2024, 2, 29, 12, tzinfo=dt.timezone.utc),
            b'"2024-02-29T12:00:00+00:00"',
            "application/json",
        ),
        (
            uuid.UUID(int=1),
            b'"00000000-0000-0000-0000-000000000001"',
            "application/json",
        ),
        (b"\x00\xff", b"\x00\xff", "application/octet-stream"),
    ],
)
def test_a_body_is_stored_with_its_content_type(
    body: Any, stored: bytes, content_type: str
) -> None:
    with transaction.atomic():
        send_message("orders", body)
    row = OutboxMessage.objects.get()
    assert (bytes(row.body), row.content_type) == (stored, content_type)


def test_due_and_expiry_are_counted_by_the_databases_clock() -> None:
    hour, day = dt.timedelta(hours=1), dt.timedelta(days=1)
    with transaction.atomic():
        send_message("orders", 1, delay=hour, expires=day, key="k")
    row = OutboxMessage.objects.get()
    assert row.expires_at is not None
    assert abs(row.due_at - row.created_at - hour) < dt.timedelta(seconds=1)
    assert abs(row.expires_at - row.created_at - day) < dt.timedelta(seconds=1)
    assert row.key == "k"


def test_the_second_store_of_an_id_is_refused_and_the_transaction_goes_on() -> None:
    message_id = uuid.uuid4()
    with transaction.atomic():
        send_message("orders", 1, message_id=message_id)
        with pytest.raises(DuplicateMessage, match=str(message_id)):
            send_message("orders", 2, message_id=message_id)
        Order.objects.create(number="1")
    with transaction.atomic(), pytest.raises(DuplicateMessage, match=str(message_id)):
        send_message("orders", 3, message_id=message_id)
    assert bytes(OutboxMessage.objects.get().body) == b"1"
    assert Order.objects.exists()


#: The most parameters of a statement of SQLite.
MOST_PARAMETERS = 32_766

# Few are an INSERT of values; many are a COPY where the database has one.
FEW_AND_MANY = pytest.mark.parametrize("count", [3, 20])


@FEW_AND_MANY
def test_duplicate_in_send_messages_stores_none(count: int) -> None:
    ids = [uuid.uuid4() for _ in range(count)]
    with transaction.atomic():
        send_message("orders", 0, message_id=ids[1])
        with pytest.raises(DuplicateMessage, match=str(ids[1])):
            send_messages(
                {"destination": "orders", "body": n, "message_id": one}
                for n, one in enumerate(ids)
            )
        with pytest.raises(DuplicateMessage, match=str(ids[0])):
            send_messages(
                {"destination": "orders", "body": n, "message_id": ids[0]}
                for n in range(count)
            )
        with pytest.raises(DuplicateMessage, match=f"^Message {ids[1]} is stored"):
            send_messages(
                {"destination": "orders", "body": n, "message_id": ids[1]}
                for n in range(count)
            )
        Order.objects.create(number="1")
    assert OutboxMessage.objects.count() == Order.objects.count() == 1


@pytest.fixture
def default_limit() -> Iterator[None]:
    """Let SQLite take as many parameters as by default: Debian's takes more."""
    connection.ensure_connection()
    raw: Any = connection.connection
    if not hasattr(raw, "setlimit"):  # another database, or Python 3.10
        yield
        return
    kind = sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER
    before = raw.setlimit(kind, MOST_PARAMETERS)
    yield
    raw.setlimit(kind, before)


@pytest.mark.usefixtures("default_limit")
def test_duplicate_among_more_than_the_parameters_of_a_query_stores_none() -> None:
    ids = [uuid.uuid4() for _ in range(MOST_PARAMETERS + 1)]
    with transaction.atomic():
        with pytest.raises(DuplicateMessage, match=f"Message {ids[-1]} is stored"):
            send_messages(
                {"destination": "orders", "body": 1, "message_id": one}
                for one in [*ids, ids[-1]]
            )
        Order.objects.create(number="1")
    assert Order.objects.exists()
    assert not OutboxMessage.objects.exists()


@FEW_AND_MANY
def test_few_and_many_are_stored_whole(count: int) -> None:
    hour, day = dt.timedelta(hours=1), dt.timedelta(days=1)
    full: dict[str, Any] = {
        "destination": "orders",
        "headers": {"tenant": 'ü "7"\n', "correlation-id": "c\\1"},
        "key": "%s ü",
        "delay": hour,
        "expires": day,
    }
    bodies = [b"\x00\\\xff", {"a": "%s\\ü"}]
    with transaction.atomic():
        sent = send_messages({**full, "body": bodies[n % 2]} for n in range(count))
        sent += send_messages({"destination": "o", "body": b""} for n in range(count))
    rows = list(OutboxMessage.objects.order_by("id"))
    assert [row.message_id for row in rows] == [one.id for one in sent]
    for number, row in enumerate(rows[:count]):
        assert bytes(row.body) == [bodies[0], r'{"a":"%s\\ü"}'.encode()][number % 2]
        assert row.headers == {"tenant": 'ü "7"\n'}
        assert (row.key, row.correlation_id) == ("%s ü", "c\\1")
        assert row.expires_at is not None
        assert abs(row.due_at - row.created_at - hour) < dt.timedelta(seconds=1)
        assert abs(row.expires_at - row.created_at - day) < dt.timedelta(seconds=1)
    for row in rows[count:]:
        assert (bytes(row.body), row.headers, row.key) == (b"", {}, "")
        assert (row.expires_at, row.session_id, row.attempts) == (None, None, 0)
        assert row.due_at - row.created_at < dt.timedelta(seconds=1)


@pytest.mark.postgresql
@FEW_AND_MANY
@pytest.mark.parametrize("own_ids", [False, True])
def test_few_and_many_are_stored_under_row_level_security(
    count: int, own_ids: bool
) -> None:
    table = OutboxMessage._meta.db_table
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;"
                f"CREATE POLICY anything ON {table} USING (true);"
                "CREATE ROLE txmsg_secured;"
                "GRANT ALL ON ALL TABLES IN SCHEMA public TO txmsg_secured;"
                "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO txmsg_secured;"
                "SET LOCAL ROLE txmsg_secured"
            )
        send_messages(
            {"destination": "orders", "body": number}
            | ({"message_id": uuid.uuid4()} if own_ids else {})
            for number in range(count)
        )
        bodies = [bytes(one.body) for one in OutboxMessage.objects.order_by("id")]
        transaction.set_rollback(True)
    assert bodies == [str(number).encode() for number in range(count)]


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("count", "behind", "unique"), [(3, 1, False), (20, 21, False), (3, 2, True)]
)
def test_no_message_of_a_stage_is_lost_if_the_sequence_is_behind(
    count: int, behind: int, unique: bool
) -> None:
    """Logical replication copies rows, but not the values of sequences. Here only the
    first attempt gets primary keys that exist."""

    def handler(_: Message) -> None:
        send_messages(
            {"destination": "orders", "body": number}
            | ({"unique": "u"} if unique and number == count - 1 else {})
            for number in range(count)
        )

    with declared(handler) as stage:
        send(stage.destination)
        with transaction.atomic():
            send_messages({"destination": "elsewhere", "body": 1} for _ in range(25))
        last = OutboxMessage.objects.latest("id").pk
        set_sequence(OutboxMessage, last + 1 - behind)
        step(stage)
        stored = OutboxMessage.objects.filter(destination="orders")
        assert not stored.exists()
        assert not InboxMessage.objects.get().processed_at
        step(stage, times=2)
        assert InboxMessage.objects.get().processed_at
    assert [int(bytes(one.body)) for one in stored.order_by("id")] == [*range(count)]


@pytest.mark.postgresql
@pytest.mark.parametrize("model", [Schedule, DatabaseIdentity])
def test_sequence_that_is_behind_is_an_error_for_other_rows_too(model: Any) -> None:
    def add(name: str) -> None:
        if model is Schedule:
            Schedule.objects.make("tests", name, {}, "* * * * *")
        else:
            database_identity._noted.clear()
            database_identity._note("default", name)

    add("first")
    set_sequence(model, model.objects.latest("id").pk)
    with pytest.raises(IntegrityError):
        add("second")
    add("second")
    add("second")
    assert model.objects.count() == 2


def test_a_thousand_are_a_few_inserts(
    django_assert_max_num_queries: Any,
) -> None:
    most = 2 if connection.vendor == "postgresql" else 60
    with transaction.atomic(), django_assert_max_num_queries(most):
        sent = send_messages({"destination": "orders", "body": n} for n in range(1000))
    rows = OutboxMessage.objects.order_by("id")
    assert [one.message_id for one in rows] == [one.id for one in sent]
    assert [int(bytes(one.body)) for one in rows] == list(range(1000))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"body": object()}, "object"),
        ({"body": float("nan")}, "body"),
        ({"body": {"a": "\ud800"}}, "body"),
        ({"headers": {"a": "nul\x00"}}, "control character"),
        ({"headers": {"txmsg-id": "x"}}, "txmsg-id"),
        ({"headers": {"a": 1}}, "str"),
        ({"headers": {"a": "x" * 9000}}, "bytes"),
        ({"destination": "/queue/orders"}, "destination"),
        ({"destination": ""}, "destination"),
        ({"key": ""}, "key"),
        ({"key": 7}, "key"),
        ({"key": "half \ud800"}, "surrogate"),
        ({"delay": 5}, "delay"),
        ({"expires": dt.timedelta(seconds=-1)}, "expires"),
        ({"expires": dt.timedelta.max}, "expires"),
        ({"delay": dt.timedelta(days=36_526)}, "delay"),
        ({"message_id": "not a uuid"}, "message_id"),
        ({"body": b"x" * 101}, "MAX_MESSAGE_BYTES"),
        ({"broker": "nowhere"}, "nowhere"),
        ({"on_conflict": "wait"}, "on_conflict"),
    ],
)
def test_uncarriable_message_is_refused_at_the_call(
    arguments: dict[str, Any], words: str
) -> None:
    arguments = {"destination": "orders", "body": 1, **arguments}
    with (
        txmsg(MAX_MESSAGE_BYTES=100),
        transaction.atomic(),
        pytest.raises(InvalidMessage, match=words),
    ):
        send_message(arguments.pop("destination"), arguments.pop("body"), **arguments)
    assert not OutboxMessage.objects.exists()


class Choice(TextChoices):
    PLACE = "orders.place"


class Text(str, enum.Enum):
    PLACE = "orders.place"


class Plain(enum.Enum):
    PLACE = "orders.place"


@pytest.mark.parametrize("member", [Choice.PLACE, Text.PLACE])
def test_a_text_enums_member_is_sent_to_its_value(member: Any) -> None:
    """An enum's member has a `name`, as a typed destination has."""
    with transaction.atomic():
        send_message(member, 1)
        send_messages([{"destination": member, "body": 2}])
        send_part(member, 3, {})

    stored = OutboxMessage.objects.values_list("destination", flat=True)
    assert list(stored) == ["orders.place"] * 3


@pytest.mark.parametrize("member", [Choice.PLACE, Text.PLACE])
def test_stage_of_a_text_enums_members_is_named_by_their_values(member: Any) -> None:
    options: list[dict[str, Any]] = [{}, {"name": member}]
    for given in options:
        stages.stage(member, undoes=member, **given)(lambda message: None)
        try:
            (stage,) = stages.find(["orders.place"])
        finally:
            stages.unregister("orders.place")
        for text in (stage.name, stage.destination, stage.undoes):
            assert (text, type(text)) == ("orders.place", str)


@pytest.mark.parametrize("destination", [Plain.PLACE, Path("orders")])
def test_an_object_with_a_name_is_no_destination(destination: Any) -> None:
    with transaction.atomic():
        with pytest.raises(InvalidMessage, match="must be a non-empty string"):
            send_message(destination, 1)
        with pytest.raises(InvalidMessage, match="must be a non-empty string"):
            send_messages([{"destination": destination, "body": 1}])


def test_one_bad_message_of_many_stores_none() -> None:
    with transaction.atomic(), pytest.raises(InvalidMessage):
        send_messages([{"destination": "orders", "body": n} for n in (1, object())])
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"body": 1}, "destination"),
        ({"destination": "orders"}, "body"),
        ({"destination": "orders", "body": 1, "dealy": None}, "dealy"),
        ({"destination": "orders", "body": 1, "using": "default"}, "using"),
        ({"destination": "orders", "body": 1, "broker": "default"}, "broker"),
        ({"destination": "orders", "body": 1, 7: 8}, "strings"),
        ("orders", "mapping"),
        (None, "mapping"),
    ],
)
def test_send_messages_refuses_other_values_than_dicts(given: Any, words: str) -> None:
    good = {"destination": "orders", "body": 1}
    with transaction.atomic(), pytest.raises(InvalidMessage, match=words) as caught:
        send_messages([good, given])
    assert "a dict of send_message()'s arguments" in str(caught.value)
    assert not OutboxMessage.objects.exists()


def test_an_error_of_a_bodys_own_is_not_taken_for_a_wrong_argument() -> None:
    class Bad(dict[str, int]):
        def items(self) -> Any:
            raise TypeError("of its own")

    with transaction.atomic(), pytest.raises(TypeError, match="of its own"):
        send_messages([{"destination": "orders", "body": 1, "headers": Bad(a=1)}])


def test_without_a_transaction_when_that_is_allowed() -> None:
    """Without an open transaction, send_messages() stores all messages or none. If one
    is refused, a relay must not see the others."""
    twice = uuid.uuid4()
    with txmsg(REQUIRE_ATOMIC=False):
        send_message("orders", 1)
        assert OutboxMessage.objects.count() == 1
        blocks: list[bool] = []

        def watch(execute: Any, sql: str, *rest: Any) -> Any:
            if sql.startswith("INSERT"):
                blocks.append(connection.in_atomic_block)
            return execute(sql, *rest)

        with connection.execute_wrapper(watch), pytest.raises(DuplicateMessage):
            send_messages(
                {"destination": "orders", "body": n, "message_id": twice}
                for n in range(2)
            )
    assert OutboxMessage.objects.count() == 1
    assert blocks == [True]
