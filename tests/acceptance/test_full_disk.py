"""Relays and consumers while the database's disk is full. They log little, connect
rarely, and resume when there is space again. No attempt is counted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections

from django_txmsg.models import InboxMessage
from django_txmsg.testing.profiles import RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests import services
from tests.acceptance.crash_play import Manage
from tests.acceptance.test_kill_servers import Stream
from tests.app.models import Effect
from tests.running import committing

pytestmark = [committing, pytest.mark.timeout(400)]

#: Seconds for which there is no room.
LONG = [12.0, pytest.param(40.0, marks=pytest.mark.matrix)]
EMBEDDED = "database://?poll=0.05&lease=10"


@pytest.fixture
def disk() -> Iterator[services.SmallDisk]:
    """A small disk with the tables of the test's database on it."""
    absent = services.SmallDisk.missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)
    small = services.SmallDisk(64)
    where = on_postgresql if connection.vendor == "postgresql" else on_sqlite
    try:
        yield from where(small)
    finally:
        small.remove()


def on_postgresql(disk: services.SmallDisk) -> Iterator[services.SmallDisk]:
    """Move the tables to the small disk. The write-ahead log stays on another disk:
    without space for the log the server would stop, and that is another fault."""
    place = disk.path / "tablespace"
    place.mkdir()
    if os.geteuid() == 0:
        services.PostgreSQL.root().give(place, "postgres")
    ask(f"CREATE TABLESPACE small LOCATION '{place}'")
    try:
        move_to("small")
        yield disk
    finally:
        if (disk.path / "ballast").exists():
            disk.make_room()
        move_to("pg_default")
        ask("DROP TABLESPACE small")


def move_to(tablespace: str) -> None:
    """Move all tables and their indexes to `tablespace`."""
    kinds = {"r": "TABLE", "i": "INDEX"}
    for name, kind in ask(
        "SELECT c.oid::regclass::text, relkind FROM pg_class c"
        " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i')"
    ):
        ask(f"ALTER {kinds[kind]} {name} SET TABLESPACE {tablespace}")


def ask(sql: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else []


def on_sqlite(disk: services.SmallDisk) -> Iterator[services.SmallDisk]:
    """Move the database file to the small disk, for this process and those that it
    starts."""
    settings = connections["default"].settings_dict
    usual = Path(str(settings["NAME"]))
    connections.close_all()
    shutil.copy(usual, disk.path / usual.name)
    settings["NAME"] = str(disk.path / usual.name)
    try:
        yield disk
    finally:
        connections.close_all()
        settings["NAME"] = str(usual)


def keep_full(disk: services.SmallDisk, seconds: float) -> None:
    """Keep the disk full for `seconds`. If a roll-back frees space by deleting a
    journal, fill that space again."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < end:
        disk.fill()
        assert disk.is_full
        pause.wait(0.2)


def sessions() -> int:
    """Return how many connections to the test's database have been made so far."""
    if connection.vendor != "postgresql":
        return 0
    ((count,),) = ask(
        "SELECT sessions FROM pg_stat_database WHERE datname = current_database()"
    )
    return int(count)


@pytest.fixture(params=["embedded", pytest.param("apart", marks=pytest.mark.matrix)])
def broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The broker's URL: the embedded broker on the full disk, or a broker that still
    works."""
    if request.param == "embedded":
        yield EMBEDDED
    else:
        with ScriptedBroker(RABBITMQ) as scripted:
            yield scripted.url


@pytest.mark.parametrize("seconds", LONG)
def test_a_full_disk_costs_no_attempt(
    disk: services.SmallDisk,
    broker: str,
    seconds: float,
    manage: Manage,
    destination: str,
) -> None:
    stream = Stream(manage, broker, destination, 1, concurrency=2)
    stream.env["TXMSG_TEST_DIR"] = str(disk.path)
    if connection.vendor == "postgresql":
        del stream.env["TXMSG_TEST_DIR"]
    workers = [stream.start("relay"), stream.start("consume")]
    stream.store(200)
    stream.reach(200)
    stream.store(2000)
    stream.reach(300)

    disk.fill()
    said = [len(worker.output.splitlines()) for worker in workers]
    connected = sessions()
    keep_full(disk, seconds)
    assert 200 < Effect.objects.count() < stream.total, (
        "nothing was left to be done meanwhile"
    )
    for worker, before in zip(workers, said, strict=True):
        lines = worker.output.splitlines()[before:]
        # Some lines for each thread at the beginning, and then less than one a second.
        assert len(lines) <= 2 * seconds, "\n".join(lines)
    assert sessions() - connected < 2 * seconds

    disk.make_room()
    stream.finish()
    assert set(InboxMessage.objects.values_list("attempts", flat=True)) == {1}
