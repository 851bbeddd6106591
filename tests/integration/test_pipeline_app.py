"""The pipeline's app can be added and removed without losing messages. Migrations that
would break live workers are refused."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import environ
import psycopg
import pytest
from django.conf import settings
from django.db import connections, migrations, transaction
from django.db.migrations.executor import MigrationExecutor
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_txmsg.errors import ConfigurationError
from django_txmsg.migrations._workers import refuse_beside_workers
from django_txmsg.models import OutboxMessage, Worker
from django_txmsg.models.outbox_store import NewMessage
from django_txmsg.models.worker import silent_after
from tests.factories import ago

ALIAS = "upgraded"
APP = "txmsg_spark"
WITHOUT = [one for one in settings.INSTALLED_APPS if one != "django_txmsg.spark"]
OURS = {
    f"django_txmsg_{name}"
    for name in (
        "archivemark",
        "finding",
        "pipelinealert",
        "pipelinerun",
        "stagedmessage",
        "storedrun",
    )
}


@pytest.fixture(params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Any]:
    """A connection to an empty database."""
    if request.param == "sqlite":
        given = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "upgraded.sqlite3"),
        }
    else:
        server = request.getfixturevalue("postgres")
        url = server.create_database(f"upgraded_{uuid.uuid4().hex[:8]}")
        given = environ.Env.db_url_config(url)
    known = connections.settings
    known[ALIAS] = connections.configure_settings({"default": given})["default"]
    with django_db_blocker.unblock():
        yield connections[ALIAS]
        connections[ALIAS].close()
        del connections[ALIAS]
    del known[ALIAS]
    if request.param != "sqlite":
        server.drop_database(given["NAME"])


def migrate(*targets: tuple[str, str | None]) -> Any:
    """Migrate to the given migrations, by default to the latest. Return the app
    registry after these migrations."""
    executor = MigrationExecutor(connections[ALIAS])
    if not targets:
        targets = tuple(
            key
            for key in executor.loader.graph.leaf_nodes()
            if key[0] in ("contenttypes", "django_txmsg", APP)
        )
    return executor.migrate(targets).apps


def ask(connection: Any, sql: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [row[0] for row in cursor.fetchall()]


def columns_of_pipeline(connection: Any) -> int:
    """Return how many of the pipeline's columns the tables of outbox and inbox have."""
    names = [
        column.name
        for table in ("outboxmessage", "inboxmessage")
        for column in connection.introspection.get_table_description(
            connection.cursor(), f"django_txmsg_{table}"
        )
    ]
    return sum(name in ("created_xid", "changed_xid") for name in names)


def triggers(connection: Any) -> list[str]:
    if connection.vendor != "postgresql":
        return []
    return ask(connection, "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal")


def store_and_change(body: bytes) -> None:
    """Store a message, and change it in a second transaction."""
    rows = [NewMessage(uuid.uuid4(), "orders.place", "text/plain", body)]
    with transaction.atomic(using=ALIAS):
        OutboxMessage.objects.db_manager(ALIAS).store(rows, tell_transaction=True)
    OutboxMessage.objects.using(ALIAS).filter(body=body).update(attempts=1)


def marks(connection: Any, body: str) -> tuple[Any, Any]:
    """Return the ids of two transactions: the one that stored a message, and the one
    that last changed it."""
    sql = (
        "SELECT unnest(ARRAY[created_xid, changed_xid]) FROM"
        f" django_txmsg_outboxmessage WHERE body = '{body}'"
    )
    created, changed = ask(connection, sql)
    return created, changed


def test_the_pipelines_app_is_added_removed_and_added_again(database) -> None:
    migrate(("django_txmsg", "0001_initial"))
    store_and_change(b"before")

    migrate()
    store_and_change(b"with")
    if database.vendor == "postgresql":
        created, changed = marks(database, "with")
        assert int(changed) > int(created)
        # Who came before the columns is older than every transaction from here on.
        assert marks(database, "before") == (None, None)

    migrate((APP, None))
    assert not OURS & set(database.introspection.table_names())
    assert columns_of_pipeline(database) == 0
    assert triggers(database) == []
    store_and_change(b"without")

    migrate()
    with_app = 4 if database.vendor == "postgresql" else 0
    assert columns_of_pipeline(database) == with_app
    assert len(triggers(database)) == with_app / 2
    if database.vendor == "postgresql":
        assert marks(database, "with") == (None, None)
    rows = OutboxMessage.objects.using(ALIAS).order_by("id")
    assert [bytes(one.body) for one in rows] == [b"before", b"with", b"without"]


def test_without_the_pipelines_app_there_are_no_columns_or_triggers(database) -> None:
    with override_settings(INSTALLED_APPS=WITHOUT):
        migrate()

        assert columns_of_pipeline(database) == 0
        assert triggers(database) == []
        assert not OURS & set(database.introspection.table_names())
        store_and_change(b"1")


def test_findings_that_were_counted_before_the_upgrade_are_not_new(database) -> None:
    apps = migrate((APP, "0003_sequence"))
    Finding = apps.get_model(APP, "Finding")
    now = ago()

    def at(seconds: int) -> Any:
        """Return an instant, in seconds after the last check."""
        return now + timedelta(seconds=seconds)

    def find(verdict: str, found_at: Any, service: str = "shop") -> None:
        Finding.objects.using(ALIAS).create(
            id=uuid.uuid4(), message_id=uuid.uuid4(), service=service,
            verdict=verdict, found_at=found_at, seen_at=found_at,
        )  # fmt: skip

    alerts = apps.get_model(APP, "PipelineAlert").objects.using(ALIAS)
    alerts.create(service="shop", name="lost", checked_at=at(0))
    alerts.create(service="new", name="lag", checked_at=at(0))
    runs = apps.get_model(APP, "PipelineRun").objects.using(ALIAS)
    for began, ended in ((-40, -30), (-20, 10)):
        runs.create(
            id=uuid.uuid4(), job="reconcile", service="shop",
            started_at=at(began), finished_at=at(ended),
        )  # fmt: skip
    find("counted", at(-40))
    find("in progress at the check", at(-20))
    find("after the check", at(20))
    find("never checked", at(-40), service="new")

    migrate()

    counted = "SELECT verdict FROM django_txmsg_finding WHERE counted"
    assert ask(database, counted) == ["counted"]
    migrate((APP, "0003_sequence"))
    migrate()
    assert ask(database, counted) == ["counted"]


class TakesAway(migrations.Migration):
    """A migration that drops a column which the previous release still needs."""

    operations = (
        migrations.RunPython(refuse_beside_workers, refuse_beside_workers),
        migrations.RemoveField("Worker", "in_flight"),
    )


def take_away(connection: Any, *, back: bool = False) -> None:
    """Apply the migration TakesAway, or reverse it, as `migrate` does."""
    state = MigrationExecutor(connection).loader.project_state()
    migration = TakesAway("next", "django_txmsg")
    with connection.schema_editor(atomic=True) as editor:
        (migration.unapply if back else migration.apply)(state, editor)


def columns_of_worker(connection: Any) -> set[str]:
    with connection.cursor() as cursor:
        described = connection.introspection.get_table_description(
            cursor, "django_txmsg_worker"
        )
    return {column.name for column in described}


def test_columns_are_not_dropped_under_a_running_process(database) -> None:
    """While a worker is live, the package refuses to apply the migration, and to
    reverse it."""
    migrate()
    old = Worker.objects.using(ALIAS).create(
        name="w", kind="consumer", host="web-1", pid=4711
    )
    with pytest.raises(ConfigurationError, match="consumer 4711 on web-1") as refused:
        take_away(database)
    assert "30 seconds after its last heartbeat" in str(refused.value)
    assert "in_flight" in columns_of_worker(database)
    # Killed, and not seen since.
    old.heartbeat_at = ago(seconds=31)
    old.save(using=ALIAS)
    take_away(database)
    assert "in_flight" not in columns_of_worker(database)

    workers = Worker.objects.using(ALIAS).defer("in_flight")
    workers.update(heartbeat_at=ago(seconds=5))
    with pytest.raises(ConfigurationError, match="consumer 4711 on web-1"):
        take_away(database, back=True)
    assert "in_flight" not in columns_of_worker(database)
    workers.update(heartbeat_at=ago(seconds=31))
    take_away(database, back=True)
    assert "in_flight" in columns_of_worker(database)


def test_a_worker_that_beats_seldom_is_waited_for_as_long_as_it_may_be_silent(
    database,
) -> None:
    migrate()
    Worker.objects.using(ALIAS).create(
        name="w", kind="relay", host="web-2", pid=4712,
        heartbeat_at=ago(seconds=60), silent_after=silent_after(30.0),
    )  # fmt: skip

    with pytest.raises(ConfigurationError, match="relay 4712 on web-2"):
        take_away(database)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_invalid_index_of_a_stopped_migration_is_recreated(postgres, database) -> None:
    migrate()
    broken = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{}'::regclass"
    index = "django_txmsg_outboxmessage_xid"
    migrate((APP, "0001_initial"))
    with psycopg.connect(
        postgres.url(database.settings_dict["NAME"]), autocommit=True
    ) as admin:
        admin.execute(broken.format(index))

    migrate()

    valid = f"SELECT indisvalid FROM pg_index WHERE indexrelid = '{index}'::regclass"
    assert ask(database, valid) == [True]
