"""Every job has a progress bar, a last line of output, a record of its run, and a dry
run."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from django_txmsg.spark.errors import VerificationRefused
from django_txmsg.spark.jobs.analyze import run_analyze
from django_txmsg.spark.runs import Run, recorded
from django_txmsg.spark.schemas import Table
from django_txmsg.spark.session import session
from django_txmsg.spark.spec import JobSpec, LakeSpec, Subscription
from tests.spark.archives import delta_rows, hashes_in
from tests.spark.conftest import ANALYZES, ROOT, analyzes
from tests.spark.log import Log
from tests.spark.running import outcome

VERDICTS = Table("verdicts", "", "", (), "", ("",))
RUNS = Table("runs", "", "", (), "", ("",))


@pytest.fixture
def words(tmp_path: Path) -> dict[str, list[str]]:
    """The options of each job. The jobs run in the order of this dictionary, so that
    each job has work to do."""
    people = tmp_path / "people.json"
    people.write_text('{"name": "Ann"}\n{"name": "Bob"}\n')
    jobs = {
        "archive": ["--older-than", "1d", "--no-vacuum"],
        "reconcile": ["--fail-on", "never"],
        "analyze": ["--since", "2026-01-01", "--html", str(tmp_path / "report.html")],
        "replay": ["--where", "id <= 3"],
        "send": ["--from", str(people), "--destination", "d", "--template",
                 '{"to": "{name}"}', "--name", "people"],
        "sweep": [],
    }  # fmt: skip
    if not ANALYZES:
        del jobs["analyze"]
    return jobs


def test_every_job_ends_with_a_line_of_rows_and_seconds_and_leaves_a_record(
    spark, log: Log, lake: LakeSpec, words: dict[str, list[str]], tmp_path: Path
) -> None:
    log.send_many(10)
    log.receive([{"message_id": uuid.uuid4()}])
    log.bury([{"message_id": uuid.uuid4()}])
    spec = JobSpec(services=(log.spec,), lake=lake)

    rows = {}
    for job, given in words.items():
        done = outcome(spec, job, *given)
        found = re.fullmatch(
            rf"{job}: (\d+) rows in \d+\.\d s, clean\.", done.lines[-1]
        )
        assert found, done.lines
        rows[job] = int(found[1])

    expected = {"archive": 11, "reconcile": 11, "analyze": 11, "replay": 3, "send": 2}
    assert rows == {job: expected.get(job, 0) for job in words}
    recorded = log.rows(
        "SELECT job, state, rows, run_by, options FROM django_txmsg_pipelinerun"
        " ORDER BY started_at"
    )
    assert [(row[0], row[1], row[2]) for row in recorded] == [
        (job, "clean", count) for job, count in rows.items()
    ]
    assert all("@" in row[3] for row in recorded)
    assert "id <= 3" in str(recorded[list(words).index("replay")][4])
    kept = {row["job"]: row["rows"] for row in delta_rows(lake, RUNS).to_pylist()}
    assert kept == rows
    names = {path.name for path in (tmp_path / "lake").iterdir() if path.is_dir()}
    assert names >= {"outbox", "runs", "verdicts", "reconciliation"}
    assert not ANALYZES or names >= {
        "latency", "throughput", "backlog", "redeliveries", "senders",
        "dead_letter_groups",
    }  # fmt: skip


@pytest.mark.matrix
def test_a_dry_run_changes_nothing_but_the_list_of_runs(
    spark, log: Log, lake: LakeSpec, words: dict[str, list[str]], tmp_path: Path
) -> None:
    log.send_many(10)
    before = hashes_in(log)
    spec = JobSpec(services=(log.spec,), lake=lake)
    dry = [job for job in words if job not in ("replay", "sweep")]
    for job in dry:
        assert outcome(spec, job, *words[job], "--dry-run").exit_code == 0
    assert not (tmp_path / "lake").exists()
    assert not (tmp_path / "report.html").exists()
    assert hashes_in(log) == before

    outcome(spec, "archive", *words["archive"])
    listed = sorted((tmp_path / "lake" / "outbox").rglob("*"))
    told = {}
    for job in ("replay", "sweep"):
        told[job] = outcome(spec, job, *words[job], "--dry-run")

    assert told["replay"].facts["chosen"] == 3
    assert len(told["replay"].facts["sample"]) == 3
    assert sorted((tmp_path / "lake" / "outbox").rglob("*")) == listed
    assert log.count() == 0
    assert log.count("django_txmsg_pipelinerun") == len(dry) + 3


def test_a_refused_run_is_on_record_in_the_lake_as_well(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(1)
    spec = JobSpec(services=(log.spec,), lake=lake)
    outcome(spec, "archive", "--older-than", "1d", "--no-vacuum")

    with pytest.raises(VerificationRefused), recorded(spec, "archive", {}):
        raise VerificationRefused("id 7 differs")

    rows = {row["state"]: row["error"] for row in delta_rows(lake, RUNS).to_pylist()}
    assert rows == {"clean": "", "refused": "id 7 differs"}


def read_to_end(terminal: int) -> Iterator[bytes]:
    """Yield the output that a terminal receives, until the program closes its end."""
    with suppress(OSError):
        while piece := os.read(terminal, 65_536):
            yield piece


def at_terminal(*words: str) -> tuple[str, str]:
    """Run Python with its error stream on a terminal. Return the standard output, and
    what the terminal has received."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    drawn: list[bytes] = []
    # A terminal is read all the time; one that is not would block its writer.
    reader = threading.Thread(target=lambda: drawn.extend(read_to_end(master)))
    reader.start()
    try:
        seen = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=slave, check=True,
        )  # fmt: skip
    finally:
        os.close(slave)
        reader.join()
        os.close(master)
    return seen.stdout.decode(), b"".join(drawn).decode()


def test_the_start_of_spark_and_then_its_tasks_are_shown() -> None:
    program = (
        "from argparse import Namespace\n"
        "from django_txmsg.spark.jobs.running import job_session\n"
        "conf = {'spark.master': 'local[2]'}\n"
        "given = Namespace(job='verify', json=False, conf=conf)\n"
        "with job_session(given) as spark:\n"
        "    numbers = spark.range(0, 10**9, 1, 4)\n"
        "    print(len(numbers.selectExpr('sum(hash(id))').collect()))"
    )

    said, shown = at_terminal("-c", program)

    assert said == "1\n"
    start = re.search(r"^\rverify: .*starting Spark.*?\r +\r", shown, re.DOTALL)
    assert start
    assert start.end() <= shown.index("[Stage")
    assert re.search(r"\[Stage \d+:[=> ]+\(\d \+ \d\) / \d\]", shown)
    assert re.search(r"\r +\r", shown)  # removed


@pytest.mark.matrix
def test_a_person_at_a_terminal_sees_a_bar_and_a_tool_does_not(
    spark, make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec(services=(log.spec,), lake=lake)
    (tmp_path / "job.json").write_text(spec.to_json())
    outcome(spec, "archive", "--older-than", "1d", "--no-vacuum")
    words = ("-m", "django_txmsg.spark", "sweep", "--spec", f"{tmp_path}/job.json")

    said, shown = at_terminal(*words)
    plain = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, check=True
    )

    assert "sweep: " in shown
    assert "/2 [" in shown  # two steps of one table
    assert said.splitlines()[-1].startswith("sweep: 0 rows in ")
    assert plain.stderr == b""


@pytest.mark.matrix
def test_a_new_listener_need_not_have_earlier_messages(
    spark, log: Log, lake: LakeSpec
) -> None:
    topic = "topic:orders.placed"
    log.send_many(3, destination=topic)

    def lost(*stages: str) -> list[str]:
        subscriptions = tuple(Subscription(topic, "shop", one) for one in stages)
        spec = JobSpec((log.spec,), lake, subscriptions=subscriptions)
        outcome(spec, "reconcile", "--grace", "0s")
        # A finding is written once, when it is new.
        return sorted(row["consumer"] for row in delta_rows(lake, VERDICTS).to_pylist())

    # What is declared at first has always been there, and so has lost all three.
    assert lost("old") == ["shop/old"] * 3
    assert lost("old", "new") == ["shop/old"] * 3
    now = datetime.now(timezone.utc)
    log.send([{"destination": topic, "created_at": now, "dispatched_at": now}])
    assert lost("old", "new") == ["shop/new"] + ["shop/old"] * 4


@pytest.mark.parametrize(("declares", "expected"), [(True, 0), (False, 3)])
def test_the_first_listener_of_a_service_need_not_have_earlier_messages(
    spark, make_log, lake: LakeSpec, declares: bool, expected: int
) -> None:
    """An earlier run shows this, unless it was one without Django's settings."""
    log: Log = make_log("sqlite")
    topic = "topic:orders.placed"
    log.send_many(3, destination=topic)
    retention = {"attempts": 7} if declares else {}
    spec = JobSpec((log.spec,), lake, retention)
    outcome(spec, "reconcile")
    spec = replace(spec, subscriptions=(Subscription(topic, "shop", "first"),))

    def lost() -> int:
        counts = outcome(spec, "reconcile", "--grace", "0s").counts
        return int(counts.get("never_received", 0))

    assert lost() == expected
    now = datetime.now(timezone.utc)
    log.send([{"destination": topic, "created_at": now, "dispatched_at": now}])
    assert lost() == expected + 1


@analyzes
def test_the_report_reaches_to_now_and_counts_what_waits(
    spark, make_log, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    now = datetime.now(timezone.utc)
    waiting, lately = now - timedelta(days=10), now - timedelta(days=1)
    log.send([{"created_at": waiting, "dispatched_at": None} for _ in range(20)])
    # By a clock that is years ahead.
    log.send([{"created_at": now + timedelta(days=3_650)}])
    log.receive(
        [
            {"message_id": uuid.uuid4(), "first_received_at": lately, "deliveries": 2},
            {"message_id": uuid.uuid4(), "first_received_at": lately,
             "deliveries": 2, "dead_at": lately},
        ]
    )  # fmt: skip

    spec, run = JobSpec((log.spec,)), Run("analyze", {})
    found = run_analyze(spark, spec, now - timedelta(days=7), run, keep=False)

    assert found.totals["backlog"] == 20
    assert found.totals["stored"] == 0
    assert now - timedelta(hours=1) < found.hours[-1] < now + timedelta(hours=1)
    assert found.backlog[-1] == 20
    # One was processed, and two came again.
    [stage] = found.stages
    assert (stage["messages"], stage["redelivered"], stage["received"]) == (1, 2, 2)


def test_a_job_leaves_the_settings_of_a_session_as_they_were(spark) -> None:
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Europe/Berlin")
    try:
        with session("reconcile") as same:
            assert same.conf.get(zone) == "UTC"
        assert spark.conf.get(zone) == "Europe/Berlin"
    finally:
        spark.conf.set(zone, before)
