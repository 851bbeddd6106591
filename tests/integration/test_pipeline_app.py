"""The pipeline's app comes and goes, and an installation from before loses nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environ
import psycopg
import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_txmsg.errors import ConfigurationError
from django_txmsg.models import OutboxMessage, Worker
from django_txmsg.models.outbox_store import NewMessage
from tests.factories import ago

ALIAS = "upgraded"
BEFORE = ("django_txmsg", "0003_worker_service")
APP = "txmsg_spark"
WITHOUT = [one for one in settings.INSTALLED_APPS if one != "django_txmsg.spark"]
MESSAGES = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")
OURS = {
    f"django_txmsg_{name}"
    for name in ("archivemark", "pipelinerun", "stagedmessage", "storedrun")
}


@pytest.fixture(params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Any]:
    """An empty database, and a connection to it."""
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
    """Migrate to some migrations, by default to the last ones; return the models."""
    executor = MigrationExecutor(connections[ALIAS])
    if not targets:
        targets = tuple(
            key
            for key in executor.loader.graph.leaf_nodes()
            if key[0] in ("contenttypes", "django_txmsg", APP)
        )
    return executor.migrate(targets).apps


def fill(apps: Any) -> None:
    """Write rows as the release before did, some of them in one transaction."""
    tables = {one._meta.model_name: one for one in apps.get_models()}
    with transaction.atomic(using=ALIAS):
        for body in (b"1", b"2"):
            tables["outboxmessage"].objects.using(ALIAS).create(
                message_id=uuid.uuid4(), destination="orders.place", body=body
            )
        tables["inboxmessage"].objects.using(ALIAS).create(
            message_id=uuid.uuid4(), stage="orders.place", destination="orders.place"
        )
    tables["outboxmessage"].objects.using(ALIAS).filter(body=b"2").update(attempts=1)
    tables["archivemark"].objects.using(ALIAS).create(
        source="outbox", lake_id=uuid.uuid4(), lake="/lake", purged_through=7
    )
    tables["pipelinerun"].objects.using(ALIAS).create(id=uuid.uuid4(), job="archive")
    tables["storedrun"].objects.using(ALIAS).create(name="news", messages=3, ids="6")
    types = tables["contenttype"].objects.using(ALIAS)
    types.create(app_label="django_txmsg", model="pipelinerun")


Content = dict[str, list[dict[str, Any]]]


def as_before(before: Content, now: Content) -> bool:
    """Whether all rows are there as they were. Later migrations may add columns."""
    return now.keys() == before.keys() and all(
        len(now[table]) == len(rows)
        and all(
            old.items() <= new.items()
            for old, new in zip(rows, now[table], strict=True)
        )
        for table, rows in before.items()
    )


def content(connection: Any, *tables: str) -> Content:
    """Return all rows, or those of some tables."""
    found = {}
    with connection.cursor() as cursor:
        for table in tables or (*MESSAGES, *sorted(OURS)):
            cursor.execute(f"SELECT * FROM {table} ORDER BY 1")
            names = [one[0] for one in cursor.description]
            found[table] = [
                {n: v for n, v in zip(names, row, strict=True) if v is not None}
                for row in cursor.fetchall()
            ]
    return found


def ask(connection: Any, sql: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [row[0] for row in cursor.fetchall()]


def columns_of_pipeline(connection: Any) -> int:
    """Return how many columns outbox and inbox have for the pipeline."""
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


def labels(connection: Any) -> list[str]:
    return ask(connection, "SELECT app_label FROM django_content_type")


def store_and_change() -> None:
    """Store a message and change it in a later transaction, as this release does."""
    rows = [NewMessage(uuid.uuid4(), "orders.place", "text/plain", b"3")]
    with transaction.atomic(using=ALIAS):
        OutboxMessage.objects.db_manager(ALIAS).store(rows, tell_transaction=True)
    OutboxMessage.objects.using(ALIAS).filter(body=b"3").update(attempts=1)


def test_an_installation_that_runs_the_pipeline_keeps_all_of_it(database) -> None:
    fill(migrate(BEFORE, ("contenttypes", "0002_remove_content_type_name")))
    before = content(database)

    migrate()
    assert as_before(before, content(database))
    assert labels(database) == [APP]
    # And back, with the app where it is, and here again.
    migrate(BEFORE)
    assert as_before(before, content(database))
    assert labels(database) == ["django_txmsg"]
    migrate()
    assert as_before(before, content(database))

    store_and_change()
    if database.vendor == "postgresql":
        [created, changed] = ask(
            database,
            "SELECT unnest(ARRAY[created_xid, changed_xid]) FROM"
            " django_txmsg_outboxmessage WHERE body = '3'",
        )
        assert int(changed) > int(created)


def test_the_app_is_removed_with_all_that_came_with_it_and_comes_back(
    database,
) -> None:
    fill(migrate(BEFORE, ("contenttypes", "0002_remove_content_type_name")))
    migrate()
    messages = content(database, "django_txmsg_outboxmessage")

    migrate((APP, None))

    assert not OURS & set(database.introspection.table_names())
    assert columns_of_pipeline(database) == 0
    assert triggers(database) == []
    store_and_change()

    migrate()
    with_app = 4 if database.vendor == "postgresql" else 0
    assert columns_of_pipeline(database) == with_app
    assert len(triggers(database)) == with_app / 2
    [stored] = messages.values()
    # Who came before the columns is older than every transaction from here on.
    now = content(database, "django_txmsg_outboxmessage").popitem()[1][:2]
    assert all("created_xid" not in one for one in now)
    assert [one["message_id"] for one in now] == [one["message_id"] for one in stored]


def test_an_installation_without_the_app_pays_for_nothing_and_loses_nothing(
    database,
) -> None:
    with override_settings(INSTALLED_APPS=WITHOUT):
        fill(migrate(BEFORE, ("contenttypes", "0002_remove_content_type_name")))
        [messages] = content(database, "django_txmsg_outboxmessage").values()
        used = content(database, *OURS - {"django_txmsg_stagedmessage"})
        migrate()

        assert columns_of_pipeline(database) == 0
        assert triggers(database) == []
        # A table with rows waits for the app; one without is dropped.
        there = OURS & set(database.introspection.table_names())
        assert there == used.keys()
        store_and_change()
        # Back in the release before, which expects all of it.
        migrate(BEFORE)
        assert columns_of_pipeline(database) == 4
        assert content(database, *used) == used
        migrate()

    migrate()
    assert content(database, *used) == used
    assert set(database.introspection.table_names()) >= OURS
    [left] = content(database, "django_txmsg_outboxmessage").values()
    assert [one["message_id"] for one in left][:2] == [
        one["message_id"] for one in messages
    ]


def test_columns_are_not_dropped_under_a_running_process(database) -> None:
    """Neither on the way here nor on the way back."""
    with override_settings(INSTALLED_APPS=WITHOUT):
        apps = migrate(BEFORE)
        workers = apps.get_model("django_txmsg", "Worker").objects.using(ALIAS)
        old = workers.create(name="w", kind="consumer", host="web-1", pid=4711)
        with pytest.raises(ConfigurationError, match="consumer 4711 on web-1"):
            migrate()
        assert columns_of_pipeline(database) == 4
        # Killed, and not seen since.
        workers.filter(pk=old.pk).update(heartbeat_at=ago(seconds=31))
        migrate()
        assert columns_of_pipeline(database) == 0

        new = Worker.objects.using(ALIAS).create(
            name="n", kind="relay", host="web-2", pid=4712
        )
        with pytest.raises(ConfigurationError, match="relay 4712 on web-2"):
            migrate(BEFORE)
        store_and_change()  # it lives on
        new.delete(using=ALIAS)
        migrate(BEFORE)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_columns_that_stay_are_migrated_beside_a_running_process(database) -> None:
    apps = migrate(BEFORE, ("contenttypes", "0002_remove_content_type_name"))
    workers = apps.get_model("django_txmsg", "Worker").objects.using(ALIAS)
    workers.create(name="w", kind="consumer", host="web-1", pid=4711)
    migrate()
    assert columns_of_pipeline(database) == 4


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_an_index_that_a_stopped_attempt_has_left_is_made_anew(
    postgres, database
) -> None:
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


def test_a_message_that_was_cancelled_before_there_was_a_column_has_it(
    database: Any,
) -> None:
    before = migrate(("django_txmsg", "0012_idempotency_session"))
    rows = before.get_model("django_txmsg", "OutboxMessage").objects.using(ALIAS)
    errors = ("cancelled: paid", "rejected: cancelled: by the broker", "expired: noon")
    for error in errors:
        rows.create(message_id=uuid.uuid4(), dead_at=Now(), last_error=error, body=b"")
    rows.create(message_id=uuid.uuid4(), last_error="cancelled: once", body=b"")

    after = migrate().get_model("django_txmsg", "OutboxMessage").objects.using(ALIAS)

    [row] = after.filter(cancelled_at__isnull=False)
    assert (row.last_error, row.cancelled_at) == ("cancelled: paid", row.dead_at)
