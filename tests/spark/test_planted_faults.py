"""Verdicts, report and replays for three hand-written logs, on PostgreSQL and
SQLite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from django_txmsg.spark.schemas import Table
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import delta_rows
from tests.spark.conftest import analyzes
from tests.spark.flow import run_flow
from tests.spark.log import Log
from tests.spark.running import run

VERDICTS = Table("verdicts", "", "", (), "", ("",))


@analyzes
@pytest.mark.matrix
def test_logs_in_the_lake_and_in_databases_are_judged_as_one(
    spark: object, make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    flow = run_flow(make_log, 3_000)
    sources = [log.spec for log in flow.logs.values()]
    spec = JobSpec(services=tuple(sources), lake=lake)
    shop, payments = (JobSpec(services=(s,), lake=lake) for s in sources[:2])
    planted = {kind: len(ids) for kind, ids in flow.planted.items()}

    # Every service archives what is older than three days; the rest stays where it is.
    moved = 0
    for source in sources:
        alone = JobSpec(services=(source,), lake=lake)
        facts = run(alone, "archive", "--older-than", "3d", "--no-vacuum")
        assert facts["exit_code"] == 0
        moved += facts["rows"]
    assert moved > 6_000
    assert all(flow.logs[name].count() for name in ("shop", "payments"))
    # Only now the redeliveries come, and the inbox remembers their messages no more.
    flow.logs["payments"].receive(flow.late_rows)

    facts = run(spec, "reconcile", "--late-after", "2h")

    ok = facts["counts"].pop("ok")
    assert facts["counts"] == planted
    assert facts["exit_code"] == 1
    assert ok > 7_500
    found: dict[str, set[str]] = {}
    for row in delta_rows(lake, VERDICTS).to_pylist():
        found.setdefault(row["verdict"], set()).add(row["message_id"])
    for kind in ("never_received", "processed_twice", "late", "unknown_sender", "dead"):
        assert found[kind] == flow.planted[kind], kind

    report = tmp_path / "report.html"
    facts = run(spec, "analyze", "--since", "30d", "--html", str(report))
    assert sum(group["letters"] for group in facts["groups"]) == planted["dead"]
    assert len(facts["groups"]) == 2
    page = report.read_text()
    assert "orders.place" in page
    assert "http://" not in page
    assert "https://" not in page

    # Lost orders go out again, under their own ids, one each ten milliseconds.
    lost = sorted(flow.planted["never_received"])
    where = "message_id IN (" + ", ".join(f"'{one}'" for one in lost) + ")"
    facts = run(shop, "replay", "--where", where, "--rate", "100")
    stored = flow.logs["shop"].rows(
        "SELECT message_id, due_at FROM django_txmsg_outboxmessage"
        " WHERE replay_id <> '' ORDER BY due_at"
    )
    assert {str(row[0]) for row in stored} <= set(lost)
    assert len(stored) == facts["rows"] > 0
    assert (stored[-1][1] - stored[0][1]).total_seconds() == pytest.approx(
        (len(stored) - 1) / 100, abs=0.001
    )

    # The app is asked for some of the dead letters.
    facts = run(
        payments,
        "replay", "--from", "dead_letters", "--where", "exception LIKE '%declined%'",
    )  # fmt: skip
    log = flow.logs["payments"]
    asked = log.rows("SELECT kind, total, state FROM django_txmsg_bulkoperation")
    assert asked == [("redeliver", facts["rows"], "running")]
    assert 0 < facts["rows"] < planted["dead"]
