"""Three services, faults planted: the jobs find exactly those, and mend them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_txmsg.spark import cli
from django_txmsg.spark.jobs.running import run_job
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import delta_rows
from tests.spark.flow import run_flow
from tests.spark.log import Log


def run(spec: JobSpec, *words: str) -> tuple[int, dict[str, Any]]:
    """Run a job as the command line does; return its exit code and its facts."""
    parser = ArgumentParser()
    cli.add_jobs(parser)
    given = parser.parse_args(words)
    outcome = run_job(cli.complete(spec, given), given)
    return outcome.exit_code, outcome.facts


def test_the_jobs_find_exactly_what_was_planted_and_mend_it(
    spark: object, make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    flow = run_flow(make_log, 10_000)
    sources = [log.spec for log in flow.logs.values()]
    spec = JobSpec(services=tuple(sources), lake=lake)
    planted = {kind: len(ids) for kind, ids in flow.planted.items()}

    # Every service archives what is older than a day; the newest stay in the database.
    moved = 0
    for source in sources:
        alone = JobSpec(services=(source,), lake=lake)
        code, facts = run(alone, "archive", "--older-than", "3d", "--no-vacuum")
        assert code == 0
        moved += facts["rows"]
    assert moved > 20_000
    assert all(flow.logs[name].count() for name in ("shop", "payments"))
    # Only now the redeliveries come, and the inbox remembers their messages no more.
    flow.logs["payments"].receive(flow.late_rows)  # type: ignore[attr-defined]

    code, facts = run(spec, "reconcile", "--late-after", "2h")

    ok = facts["counts"].pop("ok")
    assert facts["counts"] == planted
    assert code == 1
    assert ok > 25_000
    verdicts = delta_rows(lake, _Named("verdicts")).to_pylist()
    found: dict[str, set[str]] = {}
    for row in verdicts:
        found.setdefault(row["verdict"], set()).add(row["message_id"])
    for kind in ("never_received", "processed_twice", "late", "unknown_sender", "dead"):
        assert found[kind] == flow.planted[kind], kind

    report = tmp_path / "report.html"
    code, facts = run(spec, "analyze", "--since", "30d", "--html", str(report))
    assert code == 0
    assert sum(group["letters"] for group in facts["groups"]) == planted["dead"]
    assert len(facts["groups"]) == 2
    page = report.read_text()
    assert "orders.place" in page
    assert "http://" not in page
    assert "https://" not in page

    # The lost orders go out again, under their own ids, from where they are archived.
    lost = sorted(flow.planted["never_received"])
    shop, payments = sources[0], sources[1]
    where = "message_id IN (" + ", ".join(f"'{one}'" for one in lost) + ")"
    code, facts = run(
        JobSpec(services=(shop,), lake=lake),
        "replay",
        "--where",
        where,
        "--rate",
        "100",
    )
    stored = flow.logs["shop"].rows(
        "SELECT message_id, due_at FROM django_txmsg_outboxmessage"
        " WHERE replay_id <> '' ORDER BY due_at"
    )
    assert code == 0
    assert {str(row[0]) for row in stored} <= set(lost)
    assert len(stored) == facts["rows"] > 0
    assert (stored[-1][1] - stored[0][1]).total_seconds() == pytest.approx(
        (len(stored) - 1) / 100, abs=0.001
    )
    code, facts = run(
        JobSpec(services=(shop,), lake=lake),
        "replay",
        "--where",
        where,
        "--rate",
        "100",
    )
    assert (facts["rows"], facts["counts"]["known"]) == (0, len(stored))

    # So do the dead letters, from the database.
    code, facts = run(
        JobSpec(services=(payments,), lake=lake),
        "replay", "--from", "dead_letters", "--where", "exception LIKE '%declined%'",
    )  # fmt: skip
    log = flow.logs["payments"]
    assert facts["rows"] == log.value(
        "SELECT count(*) FROM django_txmsg_deadletter WHERE resolution = 'redelivered'"
    )
    assert 0 < facts["rows"] < planted["dead"]
    headers = log.value(
        "SELECT headers FROM django_txmsg_outboxmessage WHERE replay_id <> '' LIMIT 1"
    )
    assert json.loads(headers) == {"own": "1"}

    # Every run has left a record, in the database and in the lake.
    jobs = flow.logs["shop"].rows("SELECT job, state FROM django_txmsg_pipelinerun")
    assert sorted(tuple(row) for row in jobs) == [
        ("analyze", "clean"), ("archive", "clean"), ("reconcile", "findings"),
        ("replay", "clean"), ("replay", "clean"),
    ]  # fmt: skip
    assert delta_rows(lake, _Named("runs")).num_rows == 8


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name
