"""Findings in the database: their age, how they are acknowledged, and the report."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace
from typing import Any

import pytest

from django_txmsg.spark.errors import EnvironmentFault, UsageError
from django_txmsg.spark.jobs.analyze import add_findings
from django_txmsg.spark.noted import Noted, Which
from django_txmsg.spark.report import Findings, render
from django_txmsg.spark.runs import recorded
from django_txmsg.spark.spec import JobSpec
from tests.spark.conftest import everywhere
from tests.spark.log import Log
from tests.spark.running import outcome, run

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)
LOST = "never_received"


def finding(number: int, **more: Any) -> dict[str, Any]:
    return {
        "message_id": str(uuid.UUID(int=number)), "destination": "d", "sender": "shop",
        "consumer": None, "verdict": LOST, "sent_at": NOW + dt.timedelta(days=number),
        "found_at": NOW, **more,
    }  # fmt: skip


def ids(findings: list[dict[str, Any]]) -> list[int]:
    return sorted(uuid.UUID(one["message_id"]).int for one in findings)


def test_resolved_findings_go_and_acknowledged_ones_stay(log: Log) -> None:
    noted, spec = Noted(log.spec), JobSpec((log.spec,))
    noted.keep([finding(number) for number in range(4)], NOW)
    some = [
        "--message-id",
        str(uuid.UUID(int=0)),
        "--message-id",
        str(uuid.UUID(int=1)),
    ]
    done = run(spec, "findings", *some, "--acknowledge", " known: 100% \n")
    assert done["rows"] == 2

    later = NOW + dt.timedelta(hours=2)
    # Two are found again, by the age that they have.
    noted.keep([finding(0), finding(3)], later)

    assert ids(noted.read(Which())) == [0, 1, 3]
    assert ids(noted.read(Which(acknowledged=True))) == [0, 1]
    [left] = noted.read(Which(acknowledged=False))
    assert (left["found_at"], left["seen_at"]) == (NOW, later)
    [one] = noted.read(Which(message_ids=(uuid.UUID(int=1),)))
    assert one["note"] == "known: 100%"
    assert "@" in one["acknowledged_by"]
    # The next run does not find this one any more.
    noted.keep([], later + dt.timedelta(hours=1))
    assert ids(noted.read(Which())) == [0, 1]
    assert run(spec, "findings", *some[:2], "--reopen")["rows"] == 1
    assert run(spec, "findings")["counts"] == {LOST: 1}


def test_a_renamed_service_keeps_only_acknowledged_findings_of_its_former_name(
    log: Log,
) -> None:
    former = Noted(replace(log.spec, service="before"))
    former.keep([finding(0), finding(1)], NOW)
    former.acknowledge(Which(message_ids=(uuid.UUID(int=1),)), "ann", "known")
    other = Noted(replace(log.spec, service="other"))
    other.keep([finding(2)], NOW)

    Noted(log.spec).keep([finding(0)], NOW + dt.timedelta(hours=2), ["before"])

    found = [ids(one.read(Which())) for one in (former, other, Noted(log.spec))]
    assert found == [[1], [2], [0]]


def test_acknowledging_needs_findings_and_a_reason_and_is_recorded(make_log) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,))
    Noted(log.spec).keep([finding(1), finding(2, verdict="late")], NOW)

    with pytest.raises(UsageError, match="Which findings"):
        run(spec, "findings", "--acknowledge", "so it is")
    with pytest.raises(UsageError, match="'lost' is not a finding; there are never_r"):
        run(spec, "findings", "--verdict", "lost")
    with pytest.raises(UsageError, match="Say why"):
        run(spec, "findings", "--all", "--acknowledge", " ")
    told = outcome(spec, "findings", "--all", "--acknowledge", "why", "--dry-run")
    assert told.lines[0] == "2 findings would be acknowledged."
    listed = outcome(spec, "findings", "--verdict", "late")

    assert listed.lines[0].startswith("late: 00000000-")
    assert listed.facts["counts"] == {"late": 1}
    # Who only looks leaves no record.
    states = log.rows("SELECT job, state FROM django_txmsg_pipelinerun")
    assert sorted(map(tuple, states)) == [
        ("findings", "clean"), ("findings", "failed"), ("findings", "failed"),
    ]  # fmt: skip


@everywhere
def test_findings_that_a_table_of_an_older_release_refuses_advise_to_migrate(
    log: Log,
) -> None:
    log.execute("ALTER TABLE django_txmsg_finding DROP COLUMN counted")

    with pytest.raises(EnvironmentFault, match=r"run `manage\.py migrate`"):
        Noted(log.spec).keep([finding(1)], NOW)


def test_the_report_begins_with_what_is_lost(log: Log) -> None:
    noted = Noted(log.spec)
    page = Findings([log.spec.service], NOW, NOW + dt.timedelta(days=3))
    add_findings(page, noted)
    assert "pipeline reconcile" in render(page)
    with recorded(JobSpec((log.spec,)), "reconcile", {}) as judged:
        judged.counts = {LOST: 2, "ok": 1200}
    noted.keep([finding(1, destination="<d>"), finding(2)], NOW)
    noted.acknowledge(Which(message_ids=(uuid.UUID(int=2),)), "ann", "by <hand>")

    add_findings(page, noted)
    written = render(page)

    assert "Messages were lost or doubled: <b>2</b> never received." in written
    assert written.index("Lost and doubled") < written.index("Throughput")
    assert "shop → &lt;d&gt;" in written
    assert "by &lt;hand&gt;<br><small>ann, " in written
    assert page.unseen == 1
    assert ids(list(page.lost[:1])) == [1]
    assert "3 d" in written


def test_the_report_names_who_gave_up_a_message() -> None:
    letters = [
        {"stage": stage, "reason": reason, "receiver": "shop", "exception": "",
         "letters": 1, "open": 1, "first_seen": NOW, "last_seen": NOW, "growth": [1]}
        for stage, reason in (("", "broker"), ("", "attempts"), ("s", "broker"))
    ]  # fmt: skip

    written = render(Findings(["shop"], NOW, NOW, groups=letters))

    named = [f"shop: {who} · {why}" for who, why in (
        ("broker", "broker"), ("relay", "attempts"), ("s", "broker"),
    )]  # fmt: skip
    assert [one for one in named if one in written] == named


def test_a_service_may_be_called_dry_run(log: Log) -> None:
    noted, spec = Noted(log.spec), JobSpec((log.spec,))
    with recorded(spec, "reconcile", {"dry_run": True}):
        pass
    assert noted.last_run() is None
    with recorded(spec, "reconcile", {"services": ["dry_run", "shop"]}):
        pass
    assert noted.last_run() is not None
