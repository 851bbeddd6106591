"""Other tools read the lake. docs/how-to/read-the-lake.md shows how."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace
from typing import Any

from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from django_txmsg.spark.transforms.journeys import KEPT
from django_txmsg.spark.transforms.reconcile import CHANGE, FOUND, SUMMARY
from tests.docs.pages import ROOT, blocks
from tests.spark.archives import archive
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import run

PAGE = ROOT / "docs/how-to/read-the-lake.md"


def reconciled(lake: LakeSpec, lost: str, processed: str) -> None:
    """Store the results of a run of `reconcile` in the lake, without Spark."""
    results = Run("reconcile", {}).results(lake, "shop")
    sent = {"destination": "orders.place", "sender": "shop", "sent_at": LONG_AGO}
    found = {"message_id": lost, "verdict": "never_received", "change": FOUND, **sent}
    results.save_rows("verdicts", CHANGE, [found])
    counts = {"destination": "orders.place", "sent_on": LONG_AGO.date()}
    results.save_rows(
        "reconciliation",
        SUMMARY,
        [{"verdict": one, "messages": 1, **counts} for one in ("ok", "never_received")],
    )
    journey = {"destination": "orders.place", "pair": "", "sent_us": 0,
               "begun_at": LONG_AGO, "stored_at": LONG_AGO, "stored": 1}  # fmt: skip
    done = {"processed_at": LONG_AGO + dt.timedelta(seconds=2), "deliveries": 1}
    replace(results, clock="begun_at").save_rows(
        "journeys",
        KEPT,
        [{"message_id": processed, **journey, **done}, {"message_id": lost, **journey}],
    )


def test_other_tools_read_the_lake_as_documented(make_log, lake: LakeSpec) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    lost, processed = (str(uuid.uuid4()) for _ in range(2))
    log.send([{"message_id": uuid.UUID(one)} for one in (lost, processed)])
    log.receive([{"message_id": uuid.UUID(processed)}])
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
    reconciled(lake, lost, processed)

    names: dict[str, Any] = {}
    path = lake.uri.removeprefix("file://")
    for block in blocks(PAGE):
        if block.language == "python" and "/var/lake" in block.code:
            exec(block.code.replace("/var/lake", path), names)

    assert names["journal"]["message_id"].to_pylist() == [lost]
    [row] = names["sent"].to_dicts()
    assert (row["day"], row["destination"]) == (LONG_AGO.date(), "orders.place")
    assert row["messages"] == 2
    database = names["database"]
    for statement in run(spec, "views", "--of", "duckdb")["statements"]:
        database.execute(statement)
    rows = database.execute("SELECT message_id, verdict, sender FROM txmsg_messages")
    assert sorted(rows.fetchall()) == sorted(
        [(lost, "never_received", "shop"), (processed, "ok", None)]
    )
    [query] = (one.code for one in blocks(PAGE) if "FROM txmsg_findings" in one.code)
    assert database.execute(query).fetchall()[0][0] == lost
    for view, expected in (("txmsg_findings", 1), ("txmsg_counts", 2)):
        [(count,)] = database.execute(f"SELECT count(*) FROM {view}").fetchall()
        assert count == expected
