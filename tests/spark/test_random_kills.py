"""Jobs are killed with SIGKILL at random instants. After each kill, the job is repeated
until it finishes, and everything is checked."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql.types import StructType

from django_txmsg import wire
from django_txmsg.spark.jobs import erase
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.faults import wait_until
from tests.spark.archives import archive, hashes_in, hashes_of_lake
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import run, start

LOGGER = logging.getLogger(__name__)
#: Few kills show that the tests work, and many that the jobs do.
MANY = int(os.environ.get("TXMSG_TEST_KILLS", "100"))
SOME = pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.matrix),
        pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(14_400)]),
    ],
)


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that only the jobs of a test use."""
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    for name in ("TMPDIR", "SPARK_LOCAL_DIRS"):
        monkeypatch.setenv(name, str(temp))
    return temp


def kill(
    process: subprocess.Popen[bytes], begun: Callable[[], bool], within: float
) -> bool:
    """Wait until a job has begun. If the job is still running `within` seconds later,
    kill the job and its children. Return whether the job was killed."""
    wait_until(lambda: begun() or process.poll() is not None, deadline=250)
    try:
        process.wait(timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@SOME
def test_killed_archive_and_sweep_leave_each_row_once(
    make_log, lake: LakeSpec, kills: int
) -> None:
    log: Log = make_log("sqlite")
    spec, dice, killed = JobSpec((log.spec,), lake), random.Random(35), Counter[str]()
    known: dict[int, int] = {}
    lock = Path(f"{log.spec.path}.outbox-archive.lock")
    jobs = (
        ("archive", "--table", "outbox", "--older-than", "1d", "--engine", "local",
         "--batch-rows", "40"),
        ("sweep", "--orphans-older-than", "0s", "--replaced-older-than", "0s"),
    )  # fmt: skip
    while min(killed[job] for job, *_ in jobs) < kills:
        log.send_many(120, every=900.0)
        known |= hashes_in(log)
        for words in jobs:
            lock.unlink(missing_ok=True)
            process = start(spec, *words)
            killed[words[0]] += kill(process, lock.exists, dice.uniform(0, 1.0))
            archive(None, log, lake)
            run(spec, *jobs[1])
            there = hashes_of_lake(lake)
            assert len(there) == len(known)
            assert dict(there) == known
            assert hashes_in(log) == {}
            assert_no_unnamed_files(lake, OUTBOX.name)
            LOGGER.info("killed: %s", dict(killed))


@SOME
def test_killed_erase_removes_all_of_a_person_and_nothing_else(
    spark: Any, make_log, lake: LakeSpec, temp: Path, kills: int
) -> None:
    shop: Log = make_log("sqlite")
    billing: Log = make_log("sqlite", "billing")
    spec = JobSpec((shop.spec, billing.spec), lake)
    dice, killed, number = random.Random(36), 0, 0
    shop.send_many(20, key="other")
    billing.receive([{"message_id": uuid.uuid4()} for _ in range(20)])
    shop.bury([{"message_id": uuid.uuid4(), "headers": {wire.KEY: "other"}}])
    for log, table in ((shop, OUTBOX), (billing, INBOX)):
        archive(None, log, lake, table=table)
    others = contents(spec, lake)
    lock = Path(f"{shop.spec.path}.erase.lock")
    while killed < kills:
        number += 1
        key = f"person-{number}"
        store_a_person(shop, billing, lake, key)
        assert contents(spec, lake) != others
        lock.unlink(missing_ok=True)
        process = start(spec, "erase", "--key", key)
        killed += kill(process, lock.exists, dice.uniform(0, 8.0))
        run(spec, "erase", "--key", key)
        assert contents(spec, lake) == others
        for name in erase.RELATIONS:
            assert_no_unnamed_files(lake, name)
        runs = [str(log.rows("SELECT * FROM django_txmsg_pipelinerun"))
                for log in (shop, billing)]  # fmt: skip
        assert not re.search("message_ids|person-", "".join(runs))
        assert list(temp.glob("txmsg-snapshot-*/*")) == []
        LOGGER.info("erase was killed %s times in %s runs", killed, number)


def store_a_person(shop: Log, billing: Log, lake: LakeSpec, key: str) -> None:
    """Store two messages with a person's data in both databases and in the lake. Both
    messages were sent with `key`, the person's key. `shop` has sent one of them, so the
    key is in the outbox row of that message. The other message has no outbox row. Only
    a copy of this other message in a queue shows that the message has the key."""
    sent, foreign = uuid.uuid4(), uuid.uuid4()
    shop.send([{"message_id": sent, "key": key, "body": key.encode()}])
    billing.receive([{"message_id": one, "last_error": key} for one in (sent, foreign)])
    for log, table in ((shop, OUTBOX), (billing, INBOX)):
        archive(None, log, lake, table=table)
    shop.bury([{"message_id": sent, "headers": {wire.KEY: key}, "body": key.encode()}])
    attempt = {
        "stage": "s", "number": 1, "worker": "", "duration": 1.0, "exception": key,
        "failed_at": LONG_AGO, "traceback": key, "fingerprint": "",
    }  # fmt: skip
    result = {"workers": "[]", "result": json.dumps(key), "created_at": LONG_AGO}
    finding = {
        "service": "billing", "verdict": "dead", "destination": "d", "sender": "",
        "consumer": key, "found_at": LONG_AGO, "seen_at": LONG_AGO,
        "acknowledged_by": "", "note": key,
    }  # fmt: skip
    for one in (sent, foreign):
        row = {"message_id": one}
        billing.insert("django_txmsg_attempt", [attempt | row])
        billing.insert("django_txmsg_taskrun", [result | row])
        billing.insert("django_txmsg_finding", [finding | row | {"id": uuid.uuid4()}])
    shop.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "headers": {wire.MESSAGE_ID: str(foreign), wire.KEY: key},
          "deliveries": 0, "body": key.encode(), "enqueued_at": LONG_AGO,
          "available_at": LONG_AGO}],
    )  # fmt: skip


def contents(spec: JobSpec, lake: LakeSpec) -> dict[str, list[str]]:
    """Return all rows of all tables in the databases and in the lake, except the
    records of runs and the marks of the archive."""
    found: dict[str, list[str]] = {}
    for source in spec.services:
        log = Log(source)
        names = log.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (name,) in names:
            if not re.search("pipelinerun|archivemark|sqlite_", name):
                rows = log.rows(f"SELECT * FROM {name}")
                found[f"{source.service} {name}"] = sorted(map(str, rows))
    for name in erase.RELATIONS:
        place = Lake(lake).table(name, StructType([]))
        if place.load() is not None:
            # Batches have other numbers after each run; what they contain is the same.
            rows = DeltaTable(place.uri).to_pyarrow_table().to_pylist()
            found[f"lake {name}"] = sorted(map(str, rows))
    return {name: rows for name, rows in found.items() if rows}


def assert_no_unnamed_files(lake: LakeSpec, name: str) -> None:
    """Check that the log of a table names all of its files."""
    place = Lake(lake).table(name, StructType([]))
    root = Path(place.root)
    named = {root / one.path for one in place.named()}
    assert set(root.glob("service=*/*/*.parquet")) == named


@SOME
def test_killed_replay_stores_each_message_once(
    spark: Any, make_log, lake: LakeSpec, temp: Path, kills: int
) -> None:
    log: Log = make_log("sqlite")
    spec, dice, killed = JobSpec((log.spec,), lake), random.Random(37), 0
    runs, messages = 0, 400
    log.send_many(messages)
    archive(None, log, lake)
    lock = Path(f"{log.spec.path}.erase.lock")
    while killed < kills:
        runs += 1
        name = f"again-{runs}"
        words = ("replay", "--where", "key = ''", "--as", "copy", "--name", name)
        lock.unlink(missing_ok=True)
        process = start(spec, *words)
        killed += kill(process, lock.exists, dice.uniform(0, 8.0))
        run(spec, *words)
        stored = log.rows("SELECT message_id FROM django_txmsg_outboxmessage")
        assert len(stored) == len(set(stored)) == messages
        assert log.count("django_txmsg_stagedmessage") == 0
        assert list(temp.glob("txmsg-snapshot-*/*")) == []
        log.execute("DELETE FROM django_txmsg_outboxmessage")
        LOGGER.info("replay was killed %s times in %s runs", killed, runs)
