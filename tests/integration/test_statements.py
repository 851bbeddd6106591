"""The outbox's INSERT is prepared where PostgreSQL is reached directly, and nowhere
else; what is stored is the same."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import Error, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_txmsg import outbox_session
from django_txmsg.models import OutboxMessage, statements
from django_txmsg.sending.outbox import send_message
from tests import services
from tests.running import committing

pytestmark = [
    committing,
    pytest.mark.postgresql,
    pytest.mark.usefixtures("impatient", "afresh"),
]
TIMES = 2 * statements.THRESHOLD


@pytest.fixture
def afresh(settings: Any) -> Iterator[None]:
    """With a connection of which nothing is known."""
    settings.TXMSG = {**settings.TXMSG, "DISPATCH_ON_COMMIT": "off"}
    connection.close()
    yield
    statements._given_up.clear()
    connection.close()


def store(using: str = "default", **more: Any) -> None:
    with transaction.atomic(using=using):
        send_message("orders", {"n": 1}, using=using, **more)


def prepared(using: str = "default", what: str = "statement") -> list[str]:
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {what} FROM pg_prepared_statements")
        return [told for (told,) in cursor.fetchall()]


def test_it_is_planned_once_for_a_connection() -> None:
    for _ in range(TIMES):
        store()
    (one,) = prepared()
    assert one.startswith("INSERT INTO django_txmsg_outboxmessage")
    assert OutboxMessage.objects.count() == TIMES


def test_other_statements_are_none_of_its_affair() -> None:
    store()
    driver: Any = connection.connection
    usual = driver.cursor_factory, driver.prepare_threshold
    for _ in range(TIMES):
        store()
        assert (driver.cursor_factory, driver.prepare_threshold) == usual
    with CaptureQueriesContext(connection) as queries:
        store()
    assert [one for one in queries if "orders" in one["sql"]]


def test_all_that_a_message_may_have() -> None:
    hour = dt.timedelta(hours=1)
    for number in range(TIMES):
        store(
            key="k",
            headers={"a": "ü", "correlation-id": "c"},
            delay=hour,
            expires=2 * hour,
            unique=f"u{number}",
        )
        with outbox_session():
            send_message("orders", b"\x00\xff", headers={"b": "'"})
            send_message("orders", "%s")
    assert len(prepared()) == 2
    rich = OutboxMessage.objects.filter(key="k")
    for row in rich:
        assert row.headers == {"a": "ü"}
        assert row.correlation_id == "c"
        assert bytes(row.body) == b'{"n":1}'
        assert abs(row.due_at - row.created_at - hour) < dt.timedelta(minutes=1)
        assert row.expires_at is not None
        assert abs(row.expires_at - row.due_at - hour) < dt.timedelta(minutes=1)
    assert rich.count() == rich.values("unique_key").distinct().count() == TIMES
    bodies = {bytes(row.body) for row in OutboxMessage.objects.filter(key="")}
    assert bodies == {b"\x00\xff", b'"%s"'}


def test_a_rollback_loses_what_was_prepared_and_nothing_else() -> None:
    for _ in range(TIMES):
        with transaction.atomic():
            send_message("orders", "lost")
            transaction.set_rollback(True)
        for _ in range(TIMES):
            store()
    assert OutboxMessage.objects.count() == TIMES * TIMES


def test_behind_a_pooler_nothing_is_prepared(
    pgbouncer: services.PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**connections.databases["default"], "PORT": pgbouncer.port}
    monkeypatch.setitem(connections.databases, "other", given)

    def work() -> list[str]:
        for _ in range(TIMES):
            store("other")
        return prepared("other")

    assert _in_threads(work) == [[]] * 4
    assert OutboxMessage.objects.count() == 4 * TIMES


def test_no_two_connections_have_a_name_in_common() -> None:
    """A pooler that is not known as one could execute another's by its name."""

    def work() -> list[str]:
        for _ in range(TIMES):
            store()
        return prepared("default", "name")

    (one,), (two,), (three,), (four,) = _in_threads(work)
    assert len({one, two, three, four}) == 4


def test_django_s_own_setting_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = connection.settings_dict["OPTIONS"]
    monkeypatch.setitem(options, "prepare_threshold", None)
    for _ in range(TIMES):
        store()
    assert prepared() == []


def test_the_cursors_of_others_are_left_alone() -> None:
    store()
    driver: Any = connection.connection

    class Tracing(driver.cursor_factory):  # type: ignore[misc]  # known at run time
        executed = 0

        def execute(self, *arguments: Any, **options: Any) -> Any:
            Tracing.executed += "INSERT" in str(arguments[0])
            return super().execute(*arguments, **options)

    driver.cursor_factory = Tracing
    for _ in range(TIMES):
        store()
    assert Tracing.executed == TIMES
    assert prepared() == []


def test_who_discards_what_was_prepared_is_told_so_once(caplog: Any) -> None:
    failed = 0
    for _ in range(4):
        for _ in range(TIMES):
            try:
                store()
            except Error:
                failed += 1
        with connection.cursor() as cursor:
            cursor.execute("DISCARD ALL")
    assert failed == 1
    assert OutboxMessage.objects.count() == 4 * TIMES - 1
    assert caplog.text.count("as DISCARD ALL does") == 1


def _in_threads(work: Callable[[], Any]) -> list[Any]:
    """Return what four threads at a time make of it, each with its own connection."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
