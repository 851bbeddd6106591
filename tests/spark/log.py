"""A message log for the tests: outbox and inbox rows that are inserted with plain
SQL."""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django_txmsg.spark.connection import Connection, connect_plain, instant_text
from django_txmsg.spark.spec import SourceSpec

UTC = dt.timezone.utc
LONG_AGO = dt.datetime(2026, 3, 1, 12, tzinfo=UTC)

OUTBOX: dict[str, Any] = {
    "replay_id": "", "broker": "default", "destination": "orders.place", "key": "",
    "correlation_id": "", "headers": {"trace": "1"}, "content_type": "application/json",
    "body": b'{"a": 1}', "attempts": 0, "last_error": "",
}  # fmt: skip
INBOX: dict[str, Any] = {
    "stage": "orders.place", "destination": "orders.place", "correlation_id": "",
    "service": "shop", "deliveries": 1, "attempts": 1, "last_error": "",
}  # fmt: skip
LETTER: dict[str, Any] = {
    "stage": "orders.place", "broker": "default", "destination": "orders.place",
    "correlation_id": "", "headers": {}, "content_type": "application/json",
    "body": b"{}", "reason": "redeliveries_exhausted", "exception": "ValueError: no",
    "traceback": "", "fingerprint": "f" * 16, "attempts": 7, "deaths": 1,
    "resolution": "open", "resolved_by": "",
}  # fmt: skip


class Log:
    """The tables of one service, in its database."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec

    @property
    def vendor(self) -> str:
        return self.spec.vendor

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        connection = connect_plain(self.spec)
        try:
            yield connection
        finally:
            connection.close()

    def drop(self) -> None:
        if self.vendor == "postgresql":
            address, _, name = self.spec.url.rpartition("/")
            server = SourceSpec("", f"{address}/postgres")
            with Log(server).connected() as connection:
                connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with self.connected() as connection:
            return connection.rows(sql, *values)

    def value(self, sql: str, *values: Any) -> Any:
        with self.connected() as connection:
            return connection.value(sql, *values)

    def execute(self, sql: str, *values: Any) -> int:
        with self.connected() as connection:
            return connection.execute(sql, *values)

    def send(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add outbox rows. Each is dispatched a second after it was stored."""
        complete = []
        for row in rows:
            created = row.get("created_at", LONG_AGO)
            ended: dict[str, Any] = {}
            if "dead_at" in row:
                ended["last_error"] = "refused"
            elif "dispatched_at" not in row:
                ended["dispatched_at"] = created + dt.timedelta(seconds=1)
            defaults = {"message_id": uuid.uuid4(), "created_at": created,
                        "due_at": created}  # fmt: skip
            complete.append({**OUTBOX, **defaults, **ended, **row})
        self.insert("django_txmsg_outboxmessage", complete)

    def send_many(self, count: int, *, every: float = 1.0, **values: Any) -> None:
        """Add `count` outbox rows with different bodies. Each is stored `every` seconds
        after the previous one."""
        self.send(
            [
                {"created_at": LONG_AGO + dt.timedelta(seconds=every * number),
                 "body": json.dumps({"number": number}).encode(), **values}
                for number in range(count)
            ]
        )  # fmt: skip

    def receive(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add inbox rows. Each is processed a second after it was received."""
        complete = []
        for row in rows:
            received = row.get("first_received_at", LONG_AGO)
            ended = received + dt.timedelta(seconds=1)
            defaults = {
                "created_at": received, "first_received_at": received,
                "last_received_at": received, "started_at": received,
            }  # fmt: skip
            if "dead_at" not in row:
                defaults["processed_at"] = ended
            complete.append({**INBOX, **defaults, **row})
        self.insert("django_txmsg_inboxmessage", complete)

    def bury(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add dead letters."""
        self.insert(
            "django_txmsg_deadletter",
            [{**LETTER, "created_at": LONG_AGO, **row} for row in rows],
        )

    def insert(self, relation: str, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        names = sorted({name for row in rows for name in row})
        quoted = ", ".join(f'"{name}"' for name in names)
        sqlite = self.vendor == "sqlite"
        lines = [[_value(row.get(name), sqlite) for name in names] for row in rows]
        with self.connected() as connection:
            if sqlite:
                marks = ", ".join("?" * len(names))
                raw: sqlite3.Connection = connection.raw
                raw.execute("BEGIN IMMEDIATE")
                raw.executemany(
                    f"INSERT INTO {relation} ({quoted}) VALUES ({marks})", lines
                )
                raw.execute("COMMIT")
                return
            with (
                connection.raw.cursor() as cursor,
                cursor.copy(f"COPY {relation} ({quoted}) FROM STDIN") as copy,
            ):
                for line in lines:
                    copy.write_row(line)

    def count(self, relation: str = "django_txmsg_outboxmessage") -> int:
        return int(self.value(f"SELECT count(*) FROM {relation}"))


def _value(value: Any, sqlite: bool) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if sqlite and isinstance(value, uuid.UUID):
        return value.hex
    if sqlite and isinstance(value, dt.datetime):
        return instant_text(value, upper=bool(value.microsecond))
    return value
