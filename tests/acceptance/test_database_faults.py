"""Relays and consumers during faults of PostgreSQL: they resume without help, and each
message has its effect once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from tests.acceptance.crash_play import Manage
from tests.acceptance.test_kill_servers import Stream, through
from tests.faults import wait_until
from tests.running import committing

pytestmark = [committing, pytest.mark.postgresql, pytest.mark.timeout(300)]

EMBEDDED = "database://?poll=0.05&lease=5"


def ask(sql: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


def demoted() -> None:
    """Make the server read-only for some seconds. All connections stay open."""
    read_only("on")
    threading.Event().wait(3)
    read_only("off")


def read_only(on: str) -> None:
    ask(f"ALTER SYSTEM SET default_transaction_read_only = {on}")
    ask("SELECT pg_reload_conf()")
    wait_until(lambda: ask("SHOW default_transaction_read_only") == (on,))


def all_connections_ended() -> None:
    """End every connection to the database except the test's own."""
    ask(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def table_locked() -> None:
    """Lock the outbox and the inbox for longer than the processes' lock time-out and
    statement time-out."""
    ask("BEGIN")
    ask("LOCK TABLE django_txmsg_outboxmessage, django_txmsg_inboxmessage")
    threading.Event().wait(3)
    ask("COMMIT")


@pytest.mark.parametrize(
    "fault", [pytest.param(demoted, marks=pytest.mark.matrix), all_connections_ended]
)
def test_relay_and_consumer_continue_after_a_fault(
    fault: Callable[[], None], manage: Manage, destination: str
) -> None:
    through(Stream(manage, EMBEDDED, destination, 1, concurrency=2), fault)


def test_relay_and_consumer_continue_after_time_outs(
    manage: Manage, destination: str
) -> None:
    stream = Stream(manage, EMBEDDED, destination, 1, concurrency=2)
    stream.env["TXMSG_TEST_DATABASE_OPTIONS"] = json.dumps(
        {"options": "-c lock_timeout=200 -c statement_timeout=500"}
    )
    through(stream, table_locked)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(lambda: None, marks=pytest.mark.matrix), all_connections_ended],
)
def test_a_pool_of_four_connections_is_enough_for_eight_threads(
    fault: Callable[[], None], manage: Manage, destination: str
) -> None:
    """Eight threads share a pool of four connections. Each thread returns its
    connection to the pool, also after a fault. So no thread's wait for a connection
    times out."""
    stream = Stream(manage, EMBEDDED, destination, 1, concurrency=8)
    stream.env["TXMSG_TEST_DATABASE_OPTIONS"] = json.dumps({"pool": {"timeout": 10}})
    through(stream, fault)
    assert not any("couldn't get a connection" in one.output for one in stream.workers)
