"""SQL views of the messages with their verdicts from `reconcile`."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import archive
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run

TOPIC = "topic:orders.placed"
JUDGE = ("reconcile", "--grace", "0s", "--fail-on", "never")


def create(log: Log) -> None:
    """Create the views, like `manage.py pipeline views | manage.py dbshell`."""
    for line in "\n".join(outcome(JobSpec((log.spec,)), "views").lines).split(";"):
        if line.strip():
            log.execute(line.replace("%", "%%"))


def test_a_databases_view_shows_state_and_verdict_of_each_message(log: Log) -> None:
    processed, lost, told, open_ = (uuid.uuid4() for _ in range(4))
    log.send(
        [
            {"message_id": processed}, {"message_id": lost},
            {"message_id": told, "destination": TOPIC},
            {"message_id": open_, "dispatched_at": None},
        ]
    )  # fmt: skip
    log.receive(
        [
            {"message_id": processed},
            {"message_id": told, "destination": TOPIC, "stage": "mails"},
        ]
    )
    found = {
        "service": "shop", "sender": "shop", "found_at": LONG_AGO,
        "seen_at": LONG_AGO, "sent_at": LONG_AGO, "acknowledged_by": "", "note": "",
        "verdict": "never_received",
    }  # fmt: skip
    log.insert(
        "django_txmsg_finding",
        [
            {"id": uuid.uuid4(), "message_id": lost, "destination": "orders.place",
             "consumer": "", **found},
            {"id": uuid.uuid4(), "message_id": told, "destination": TOPIC,
             "consumer": "shop/ledger", **found},
        ],
    )  # fmt: skip

    create(log)
    create(log)  # again, as after an upgrade

    rows = log.rows(
        "SELECT message_id, state, coalesce(stage, ''), coalesce(consumer, ''),"
        " coalesce(verdict, '') FROM txmsg_messages"
    )
    assert {(uuid.UUID(str(row[0])), *row[1:]) for row in rows} == {
        (processed, "dispatched", "orders.place", "", ""),
        (lost, "dispatched", "", "", "never_received"),
        (told, "dispatched", "mails", "", ""),
        (told, "dispatched", "", "shop/ledger", "never_received"),
        (open_, "pending", "", "", ""),
    }


@pytest.mark.matrix
def test_the_lakes_views_agree_with_reconcile(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    lost, late, told = (uuid.uuid4() for _ in range(3))
    log.send_many(3, destination="mails")
    log.send([{"message_id": lost}, {"message_id": late}])
    log.send([{"message_id": told, "destination": TOPIC}, {"destination": TOPIC}])
    log.receive(
        [
            {"message_id": late, "created_at": LONG_AGO,
             "first_received_at": LONG_AGO + dt.timedelta(hours=5)},
            {"message_id": told, "destination": TOPIC, "deliveries": 2},
        ]
    )  # fmt: skip
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
    counts = run(spec, *JUDGE)["counts"]

    for statement in run(spec, "views", "--of", "lake")["statements"]:
        spark.sql(statement)

    rows = spark.sql("SELECT verdict, count(*) AS n FROM txmsg_messages GROUP BY 1")
    assert {row.verdict: row.n for row in rows.collect()} == counts
    [row] = spark.sql(
        f"SELECT * FROM txmsg_messages WHERE message_id = '{late}'"
    ).collect()
    assert (row.verdict, row.destination, row.sender) == (
        "late",
        "orders.place",
        "shop",
    )
    found = spark.sql("SELECT verdict, sum(1) AS n FROM txmsg_findings GROUP BY 1")
    assert {row.verdict: row.n for row in found.collect()} == {
        "never_received": 5, "late": 1,
    }  # fmt: skip
    told_by = spark.sql("SELECT sum(messages) AS n FROM txmsg_counts").collect()
    assert told_by[0].n == sum(counts.values())
