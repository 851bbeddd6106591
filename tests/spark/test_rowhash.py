"""The database and the lake compute the same checksum of a row, whatever it
contains."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid

import pyarrow as pa
import pytest

from django_txmsg.spark.databases import open_database
from django_txmsg.spark.rowhash import postgres_sql, row_hashes
from django_txmsg.spark.schemas import (
    DEAD_LETTERS,
    FLOW_RUNS,
    FLOW_STEPS,
    FLOW_UNDOS,
    INBOX,
    OUTBOX,
)
from tests.spark.log import UTC, Log

HOSTILE = [
    "", " ", "\x1f", "\\N", "\\x", "NULL", '"', "'", "a\nb\r\tc", "ünïcödé ✉ 🚀",
    "%s %%",
    "\ufeffbom", "x" * 70_000,
]  # fmt: skip
INSTANTS = [
    dt.datetime(1, 1, 1, tzinfo=UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    dt.datetime(2000, 1, 1, tzinfo=UTC),
    dt.datetime(2026, 2, 28, 23, 59, 59, 999_999, tzinfo=UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
]


def hostile_log(log: Log) -> None:
    nothing = {"dispatched_at": None}
    log.send(
        [
            {"last_error": text, "headers": {"h": text}, "body": text.encode(),
             "correlation_id": text[:255], "key": text[:255]}
            for text in HOSTILE
        ]
        + [{"created_at": at, "due_at": at, "dispatched_at": at} for at in INSTANTS]
        + [{"body": bytes(range(256))}, {"body": b""}, nothing]
        + [{"session_id": uuid.uuid4(), "attempts": 2**31 - 1, **nothing}]
        + [{"expires_at": INSTANTS[2]}, {"message_id": uuid.UUID(int=0)}]
    )  # fmt: skip
    log.receive([{"message_id": uuid.uuid4(), "stage": text[:255]} for text in HOSTILE])
    log.receive([{"message_id": uuid.uuid4(), "created_at": None}])
    log.bury([{"message_id": uuid.uuid4(), "replaced_by": uuid.uuid4()},
              {"message_id": uuid.uuid4(), "traceback": HOSTILE[-1]}])  # fmt: skip


def hostile_flows(log: Log) -> None:
    """For each unusual text, add one run that contains the text. Each run has one step
    and one undo."""
    runs = [
        {
            "id": number, "run_id": uuid.uuid4(), "service": "shop", "flow": text[:200],
            "key": text[:255], "version": 1, "state": text, "step": "s", "reads": "",
            "otherwise": "", "turn": uuid.uuid4(), "waits_for": "", "asked": "",
            "failing": False, "undos": 1, "answer": text, "answer_type": "",
            "outcome": "", "caller": {"txmsg-reply-to": text},
            "first_run": uuid.uuid4(), "hop": 0, "baggage": {}, "correlation_id": "",
        }
        for number, text in enumerate(HOSTILE, 1)
    ]  # fmt: skip
    log.insert("django_txmsg_run", runs)
    log.insert(
        "django_txmsg_flowstep",
        [{"run_id": run["id"], "step": "s", "message_id": uuid.uuid4(), "version": 1,
          "state": run["state"], "then": "", "left": run["id"] % 2 == 0}
         for run in runs],
    )  # fmt: skip
    log.insert(
        "django_txmsg_flowundo",
        [{"run_id": run["id"], "number": 1, "destination": "d", "body_type": "",
          "body": run["state"].encode(), "cancels": False, "answered": True,
          "request_id": uuid.uuid4() if run["id"] % 2 else None} for run in runs],
    )  # fmt: skip


def test_postgresql_and_arrow_agree_on_every_row_of_a_hostile_corpus(
    pg_log: Log,
) -> None:
    hostile_log(pg_log)

    hostile_flows(pg_log)

    for table in (OUTBOX, INBOX, DEAD_LETTERS, FLOW_STEPS, FLOW_UNDOS, FLOW_RUNS):
        sql = f"SELECT {postgres_sql(table.columns)} FROM {table.relation} t ORDER BY 1"
        theirs = [row[0] for row in pg_log.rows(sql)]
        read = open_database(pg_log.spec).read(table, table.columns, "")
        ours = sorted(one for batch in read for one in row_hashes(batch, table.columns))

        assert ours == theirs
        assert len(set(ours)) == len(ours) > 1


def test_ids_that_come_as_bytes_are_read_as_postgresql_writes_them(
    pg_log: Log,
) -> None:
    hostile_log(pg_log)
    columns = [OUTBOX.column(n) for n in ("message_id", "session_id", "changed_xid")]
    pg_log.execute("UPDATE django_txmsg_outboxmessage SET session_id = message_id"
                   " WHERE id % 2 = 0")  # fmt: skip

    theirs = pg_log.rows(
        "SELECT message_id::text, session_id::text, changed_xid::text::bigint"
        " FROM django_txmsg_outboxmessage ORDER BY 1"
    )
    read = open_database(pg_log.spec).read(OUTBOX, columns, "")
    ours = sorted(tuple(row.values()) for part in read for row in part.to_pylist())

    assert ours == theirs
    assert {row[1] is None for row in ours} == {True, False}


def test_sqlite_rows_have_checksums_that_tell_all_of_them_apart(make_log) -> None:
    log = make_log("sqlite")
    hostile_log(log)

    for table in (OUTBOX, INBOX, DEAD_LETTERS):
        read = list(open_database(log.spec).read(table, table.columns, ""))
        hashes = [one for batch in read for one in row_hashes(batch, table.columns)]

        assert len(set(hashes)) == len(hashes) > 1


def test_the_same_row_has_the_same_checksum_on_both_databases(make_log) -> None:
    row = {
        "message_id": uuid.uuid4(),
        "headers": {},
        "key": "k",
        "session_id": uuid.uuid4(),
    }
    # What differs by nature: how JSON is spaced, and transaction ids.
    columns = [c for c in OUTBOX.columns if c.kind != "xid"]
    hashes = []
    for vendor in ("postgresql", "sqlite"):
        log = make_log(vendor)
        log.send([row])
        read = open_database(log.spec).read(OUTBOX, columns, "")
        hashes += [one for batch in read for one in row_hashes(batch, columns)]

    assert hashes[0] == hashes[1]


def test_a_batch_without_a_column_has_no_checksum() -> None:
    """The batch lacks a hashed column. A KeyError is raised, whereas Arrow would use
    the last column instead."""
    batch = pa.RecordBatch.from_pylist([{"body": b"x"}])

    with pytest.raises(KeyError, match="payload"):
        row_hashes(batch, [dataclasses.replace(OUTBOX.column("body"), name="payload")])


@pytest.mark.parametrize("column", [c.name for c in OUTBOX.columns])
def test_a_change_of_any_column_changes_the_checksum(column: str) -> None:
    changed = {
        "long": 2, "int": 2, "xid": 2, "text": "changed", "json": "{}", "bytes": b"x",
        "uuid": str(uuid.UUID(int=5)), "instant": INSTANTS[3],
    }  # fmt: skip
    row = {
        "long": 1, "int": 1, "xid": 1, "text": "", "json": "{ }", "bytes": b"",
        "uuid": str(uuid.UUID(int=4)), "instant": INSTANTS[2],
    }  # fmt: skip
    schema = pa.schema([one.arrow for one in OUTBOX.columns])
    before = {one.name: row[one.kind] for one in OUTBOX.columns}
    after = before | {column: changed[OUTBOX.column(column).kind]}

    batch = pa.RecordBatch.from_pylist([before, after], schema=schema)
    first, second = row_hashes(batch, OUTBOX.columns)

    assert first != second
