"""The errors that mean a database outage, and how threads wait for its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
    transaction,
)

from django_txmsg import health
from django_txmsg.monitoring import alarms, status
from django_txmsg.runtime import database_health
from tests import services
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing

pytestmark = committing


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the outages of other tests."""
    yield
    database_health.breaker("default").worked()
    connections.close_all()


def error_of(question: Callable[[], object]) -> BaseException:
    """Run a query that fails, and return its error."""
    with pytest.raises((DatabaseError, InterfaceError)) as caught:
        question()
    return caught.value


def ask(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def ended_backend() -> None:
    """Make the server end the connection, as a restart would."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    other: Any = connections["default"].copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    other.close()
    ask("SELECT 1")


@pytest.mark.postgresql
def test_a_connection_that_the_server_ended_is_an_outage_and_so_is_its_next_use() -> (
    None
):
    assert database_health.is_away(error_of(ended_backend))
    assert database_health.is_away(error_of(lambda: ask("SELECT 1")))


@pytest.mark.postgresql
def test_a_server_that_takes_no_writes_is_an_outage() -> None:
    ask("SET default_transaction_read_only = on")
    assert database_health.is_away(error_of(lambda: Effect.objects.create(name="no")))


@pytest.mark.postgresql
def test_a_server_that_is_not_there_is_an_outage(postgres: services.PostgreSQL) -> None:
    connections.close_all()
    postgres.stop()
    try:
        assert database_health.is_away(error_of(lambda: ask("SELECT 1")))
    finally:
        postgres.start()


@pytest.mark.parametrize("name", ["sqlstate", "pgcode"])
def test_psycopg_2_and_3_report_the_servers_code(name: str) -> None:
    """psycopg and psycopg2 have the server's error code in different attributes. The
    package finds it in both."""

    def told(code: str) -> OperationalError:
        error, cause = OperationalError(), Exception()
        setattr(cause, name, code)
        error.__cause__ = cause
        return error

    assert database_health.is_away(told("57P01"))
    assert database_health.gave_up_waiting(told("55P03"))
    assert database_health.lost_conflict(told("40001"))
    assert database_health.lost_conflict(told("40P01"))
    assert not database_health.lost_conflict(told("57014"))
    assert database_health.sqlstate(OperationalError()) == ""


@pytest.mark.postgresql
def test_a_time_out_or_a_lost_race_is_no_outage() -> None:
    ask("SET statement_timeout = '20ms'")
    assert not database_health.is_away(error_of(lambda: ask("SELECT pg_sleep(5)")))
    ask("SET statement_timeout = 0")
    other: Any = connections["default"].copy()
    with transaction.atomic():
        Effect.objects.create(name="held")
        ask("LOCK TABLE app_effect")
        with other.cursor() as cursor:
            cursor.execute("SET lock_timeout = '20ms'")
            with pytest.raises(OperationalError) as caught:
                cursor.execute("SELECT 1 FROM app_effect")
    other.close()
    assert not database_health.is_away(caught.value)
    assert not database_health.is_away(error_of(lambda: ask("SELECT 1 FROM nowhere")))
    assert not database_health.is_away(ProgrammingError("of Django's own"))
    assert not database_health.is_away(OperationalError("of our own"))
    assert not database_health.is_away(ValueError("of a handler"))


@pytest.mark.sqlite
def test_an_unusable_sqlite_file_is_an_outage_and_a_lock_is_not(
    tmp_path: Path,
) -> None:
    other: Any = connections["other"].copy()
    other.settings_dict = {**other.settings_dict, "NAME": str(tmp_path / "no" / "file")}

    def ask_other(sql: str) -> None:
        with other.cursor() as cursor:
            cursor.execute(sql)

    assert database_health.is_away(error_of(lambda: ask_other("SELECT 1")))
    other.close()
    other.settings_dict["NAME"] = f"file:{connections['other'].settings_dict['NAME']}"
    other.settings_dict["NAME"] += "?mode=ro"
    other.settings_dict["OPTIONS"] = {"uri": True, "timeout": 0.01}
    write = "INSERT INTO app_effect (name, message_id) VALUES ('', '')"
    assert database_health.is_away(error_of(lambda: ask_other(write)))
    other.close()
    other.settings_dict["NAME"] = connections["other"].settings_dict["NAME"]
    with transaction.atomic(using="other"):
        Effect.objects.using("other").create(name="held")
        assert not database_health.is_away(error_of(lambda: ask_other(write)))
    other.close()


@pytest.mark.postgresql
def test_single_broken_connection_is_no_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = error_of(ended_backend)
    assert database_health.Retry("default", "it waits").after(error, threading.Event())
    assert Effect.objects.count() == 0
    assert database_health.error("default") is None
    assert "cannot be used" not in caplog.text


@pytest.mark.postgresql
def test_all_threads_wait_for_one_probe_and_go_on_when_the_server_is_back(
    postgres: services.PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg")
    stop = threading.Event()
    met, back = [], []
    go_on = threading.Barrier(9)

    def work() -> None:
        ask("SELECT 1")
        go_on.wait(30)
        go_on.wait(60)
        error = error_of(lambda: ask("SELECT 1"))
        met.append(error)
        back.append(database_health.Retry("default", "it waits").after(error, stop))
        ask("SELECT 1")
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    go_on.wait(30)
    connections.close_all()
    postgres.stop()
    go_on.wait(60)
    wait_until(lambda: len(met) == 8 and database_health.error("default"))
    postgres.start()
    for thread in threads:
        thread.join(60)
    assert back == [True] * 8
    said = [one.getMessage() for one in caplog.records if "breaker" in one.name]
    assert len(said) == 2
    assert said[0].startswith(
        "database 'default' cannot be used; threads that need it wait"
    )
    assert said[1].startswith("database 'default' works again")


@pytest.mark.postgresql
def test_a_read_only_server_is_waited_for_until_it_takes_writes(
    postgres: services.PostgreSQL,
) -> None:
    ask("ALTER SYSTEM SET default_transaction_read_only = on")
    ask("SELECT pg_reload_conf()")
    try:
        error = wait_until(lambda: read_only_error())
        done = threading.Event()

        def work() -> None:
            database_health.Retry("default", "it waits").after(error, threading.Event())
            Effect.objects.create(name="written")
            connections.close_all()
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: database_health.error("default"))
        assert not done.is_set()
        first, *_ = alarms.of(status.read())
        assert str(first).startswith("Database default is read-only")
        found = health.look()
        assert (found["status"], found["read_only"]) == ("degraded", ["default"])
    finally:
        ask("ALTER SYSTEM RESET default_transaction_read_only")
        ask("SELECT pg_reload_conf()")
    thread.join(60)
    assert Effect.objects.get().name == "written"
    assert not status.read().read_only
    assert "read_only" not in health.look()


def read_only_error() -> DatabaseError | None:
    try:
        with transaction.atomic():
            Effect.objects.create(name="too early")
            transaction.set_rollback(True)
    except DatabaseError as error:
        return error
    return None


@pytest.mark.postgresql
def test_a_stop_ends_the_wait_at_once(postgres: services.PostgreSQL) -> None:
    connections.close_all()
    postgres.stop()
    try:
        error = error_of(lambda: ask("SELECT 1"))
        stop = threading.Event()
        back: list[bool] = []
        waits = database_health.Retry("default", "it waits")
        thread = threading.Thread(target=lambda: back.append(waits.after(error, stop)))
        thread.start()
        wait_until(lambda: database_health.error("default"))
        stop.set()
        thread.join(30)
        assert back == [False]
    finally:
        postgres.start()


def test_error_of_the_driver_itself_ends_no_thread() -> None:
    """The database server is killed while a server-side cursor is closed. Django does
    not convert the driver's error then."""

    def work() -> None:
        raise connection.Database.OperationalError("the connection was closed")

    assert database_health.Retry("default", "it waits").run(work) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_inherit_an_outage() -> None:
    database_health.breaker("default").failed(OperationalError("away"))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if database_health.error("default") is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
