"""After the lake or the database is restored from a backup, each row exists once, or an
error says what to do. The tests make and restore real backups."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs.archive import ArchiveOptions
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.ledger import Ledger
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from tests.sampling import sample
from tests.services import PostgreSQL
from tests.services.postgresql import PASSWORD
from tests.spark.archives import (
    SMALL,
    archive,
    assert_moved_once,
    delta_rows,
    hashes_in,
    path_of,
)
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run

LOSSY: ArchiveOptions = dataclasses.replace(SMALL, accept_loss=True)


class Stopped(Exception):
    pass


def stop_at(step: str, times: int = 1) -> Callable[[str], None]:
    reached: list[str] = []

    def stop(now: str) -> None:
        reached.append(now)
        if reached.count(step) == times:
            raise Stopped

    return stop


def messages_in(log: Log) -> set[str]:
    rows = log.rows("SELECT message_id FROM django_txmsg_outboxmessage")
    return {str(uuid.UUID(str(row[0]))) for row in rows}


def messages_of_lake(lake: LakeSpec) -> list[str]:
    return list(delta_rows(lake)["message_id"].to_pylist())


class Backup:
    """A backup of a database, made and restored with the database's own tools."""

    def __init__(self, log: Log, directory: Path) -> None:
        self.log, self.file = log, directory / f"backup-{uuid.uuid4().hex}"
        if log.vendor == "sqlite":
            shutil.copy(log.spec.path, self.file)
        else:
            _postgres("pg_dump", "-Fc", "-f", str(self.file), log.spec.url)

    def restore(self, into: Log | None = None) -> None:
        log = into or self.log
        if log.vendor == "sqlite":
            shutil.copy(self.file, log.spec.path)
            return
        server, _, name = log.spec.url.rpartition("/")
        with Log(SourceSpec("", f"{server}/postgres")).connected() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{name}"')
        _postgres("pg_restore", "-d", log.spec.url, str(self.file))


def _postgres(tool: str, *words: str) -> None:
    directory = Path(shutil.which("pg_config") or "/usr/bin/pg_config").parent
    found = shutil.which(tool) or str(directory / tool)
    subprocess.run(
        [found, *words], check=True, env=os.environ | {"PGPASSWORD": PASSWORD}
    )


def test_batch_lost_by_the_lake_before_deletion_is_archived_again(
    spark: Any, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250)
    before = hashes_in(log)
    with pytest.raises(Stopped):
        archive(spark, log, lake, on_step=stop_at("committed", 2))
    # The log goes on, and names nothing of what it had named.
    DeltaTable(path_of(lake)).restore(0)

    done = archive(spark, log, lake)

    assert (done.rows, done.refused) == (250, [])
    assert_moved_once(before, log, lake, set(before))


def test_marks_of_a_table_that_only_newer_code_has_are_ignored(
    make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    log = make_log("sqlite")
    log.send_many(5)
    newer = dataclasses.replace(OUTBOX, name="newer")
    with closing(Ledger(log.spec, newer)) as ledger:
        ledger.place(str(uuid.uuid4()), lake.uri, 3)

    words = ("archive", "--older-than", "1d", "--dry-run")
    would = outcome(JobSpec((log.spec,), lake), *words)

    assert would.counts["outbox"] == 5


def test_unmounted_lake_is_not_created_again(
    spark: Any, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    log.send_many(150)
    before = hashes_in(log)
    archive(spark, log, lake)
    log.send_many(30)
    before |= hashes_in(log)
    (tmp_path / "lake").rename(tmp_path / "elsewhere")
    spec = JobSpec(services=(log.spec,), lake=lake)

    with pytest.raises(EnvironmentFault, match=r"lost batches.*no lake"):
        archive(spark, log, lake)
    assert_no_job_runs(spec, "there is no lake")
    assert not (tmp_path / "lake").exists()
    # Somebody else may have made a lake of the mount point.
    Lake(lake, create=True)
    with pytest.raises(EnvironmentFault, match=r"lost batches.*Mount it"):
        archive(spark, log, lake)
    assert log.count() == 30

    shutil.rmtree(tmp_path / "lake")
    (tmp_path / "elsewhere").rename(tmp_path / "lake")
    assert archive(spark, log, lake).rows == 30
    assert_moved_once(before, log, lake, set(before))


@pytest.mark.parametrize(
    "spelling",
    ["file://{}/", "{}", "{}/", "file:{}", "file://localhost{}", "/{}", "{}/."],
)
def test_unmounted_lake_is_missed_by_any_spelling_of_its_address(
    make_log, lake: LakeSpec, tmp_path: Path, spelling: str
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(5)
    archive(None, log, lake)
    log.send_many(5)
    place = tmp_path / "lake"
    place.rename(tmp_path / "elsewhere")

    with pytest.raises(EnvironmentFault, match=r"lost batches.*no lake"):
        archive(None, log, LakeSpec(spelling.format(place)))

    assert (place.exists(), log.count()) == (False, 5)


def assert_no_job_runs(spec: JobSpec, why: str) -> None:
    """Check that every job that needs the lake's rows fails while the rows are
    missing."""
    for words in (
        ["reconcile"],
        ["analyze", "--html", ""],
        ["replay", "--where", "id = 1"],
        ["erase", "--key", "k"],
        ["verify"],
        ["show", "k"],
        ["listeners"],
        ["sweep", "--orphans-older-than", "0s", "--replaced-older-than", "0s"],
        ["archive", "--older-than", "1d", "--dry-run"],
        ["follow", "--older-than", "1d", "--dry-run"],
    ):
        with pytest.raises(EnvironmentFault, match=rf"lost batches.*{why}.*Mount it"):
            run(spec, *words)


def test_lake_of_another_service_at_the_same_path_is_not_missed(
    make_log: Callable[..., Log], lake: LakeSpec, tmp_path: Path
) -> None:
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    both, here = JobSpec((shop.spec, payments.spec), lake), tmp_path / "lake"
    payments.send_many(10)
    archive(None, payments, lake)
    shutil.copytree(here, tmp_path / "older")
    payments.send_many(10)
    archive(None, payments, lake)
    shutil.rmtree(here)

    # The lake of `payments` is at this path of another host.
    assert run(both, "show", "k")["steps"] == []
    # It may also be that the lake of both is not mounted.
    with pytest.raises(EnvironmentFault, match="there is no lake"):
        run(both, "erase", "--key", "k")
    shop.send_many(10)
    archive(None, shop, lake)
    assert run(both, "show", "k")["steps"] == []
    with pytest.raises(EnvironmentFault, match="a different lake is there"):
        run(JobSpec((payments.spec, shop.spec), lake), "show", "k")

    # It is the lake of both, and an older backup.
    shutil.rmtree(here)
    (tmp_path / "older").rename(here)
    archive(None, shop, lake, options=LOSSY)
    with pytest.raises(EnvironmentFault, match=r"'payments': .* it ends with batch 1"):
        run(both, "show", "k")


@pytest.mark.parametrize(
    "step", list(sample(["committing", "planned", "written", "committed"]))
)
def test_a_lake_unmounted_during_an_archive_leaves_nothing_behind(
    log: Log, lake: LakeSpec, tmp_path: Path, step: str
) -> None:
    log.send_many(120)
    before = hashes_in(log)
    archive(None, log, lake)
    log.send_many(250)
    before |= hashes_in(log)
    here, elsewhere = tmp_path / "lake", tmp_path / "elsewhere"

    def unmount(now: str) -> None:
        if now == step and not elsewhere.exists():
            here.rename(elsewhere)
            here.mkdir()

    with pytest.raises(EnvironmentFault, match=r"The lake at .* has disappeared"):
        archive(None, log, lake, on_step=unmount)

    assert list(here.iterdir()) == []
    here.rmdir()
    elsewhere.rename(here)
    archive(None, log, lake)
    assert_moved_once(before, log, lake, set(before))


def test_lake_from_an_older_backup_is_reported(
    spark: Any, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    here, older, newest = (tmp_path / name for name in ("lake", "older", "newest"))
    log.send_many(150)
    before = hashes_in(log)
    archive(spark, log, lake)
    shutil.copytree(here, older)
    log.send_many(100)
    before |= hashes_in(log)
    archive(spark, log, lake)
    # Its log is older than its files.
    shutil.copytree(here, newest)
    shutil.rmtree(path_of(lake) / "_delta_log")
    shutil.copytree(older / "outbox" / "_delta_log", path_of(lake) / "_delta_log")
    files = sorted(path_of(lake).rglob("*.parquet"))
    log.send_many(20)
    before |= hashes_in(log)

    with pytest.raises(EnvironmentFault, match=r"it ends with batch 2.*--accept-loss"):
        archive(spark, log, lake)
    assert log.count() == 20
    assert_no_job_runs(JobSpec((log.spec,), lake), "it ends with batch 2")
    # Only the newer log names these files.
    assert sorted(path_of(lake).rglob("*.parquet")) == files

    # The newest one is found after all.
    shutil.rmtree(here)
    shutil.copytree(newest, here)
    assert archive(spark, log, lake).rows == 20
    assert_moved_once(before, log, lake, set(before))


def test_archiving_continues_after_a_loss_is_accepted(
    spark: Any, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    log.send_many(150)
    archive(spark, log, lake)
    shutil.copytree(tmp_path / "lake", tmp_path / "older")
    kept = messages_of_lake(lake)
    log.send_many(100)
    archive(spark, log, lake)
    for lost in ("an older backup", "nothing"):
        shutil.rmtree(tmp_path / "lake")
        if lost == "an older backup":
            shutil.copytree(tmp_path / "older", tmp_path / "lake")
        else:
            kept = []
        log.send_many(20)
        kept += messages_in(log)

        assert archive(spark, log, lake, options=LOSSY).rows == 20
        log.send_many(5)
        kept += messages_in(log)
        assert archive(spark, log, lake).rows == 5

        assert sorted(messages_of_lake(lake)) == sorted(kept)
        assert log.count() == 0


def test_a_database_restored_from_a_backup_ends_with_each_message_once(
    spark: Any, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    log.send_many(250)
    log.send([{"dispatched_at": None}])
    backup = Backup(log, tmp_path)
    pending = 251
    archive(spark, log, lake)
    # After the backup: the pending one leaves, and others come and go.
    log.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = due_at WHERE id = 251"
    )
    log.send_many(5)
    later = messages_in(log)
    archive(spark, log, lake)
    archived = set(messages_of_lake(lake))
    assert later <= archived

    backup.restore()
    # The restored database has no marks of any archive, still has the pending message,
    # and assigns the same ids again. An operator resends one message and deletes one.
    assert log.count("django_txmsg_archivemark") == 0
    log.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL WHERE id = 7"
    )
    log.execute("DELETE FROM django_txmsg_outboxmessage WHERE id = 9")
    log.send_many(3)
    fresh = messages_in(log) - archived
    assert len(fresh) == 3
    assert log.value("SELECT max(id) FROM django_txmsg_outboxmessage") == 254

    first = archive(spark, log, lake)
    assert f"2 rows differ: id 7, {pending}." in "".join(first.refused)
    again = archive(spark, log, lake)

    there, here = messages_of_lake(lake), messages_in(log)
    assert len(there) == len(set(there)), "a message is in the lake twice"
    assert here.isdisjoint(there)
    assert set(there) | here == archived | fresh
    assert log.count() == 2
    assert (again.rows, again.refused) == (0, [])
    # They leave, and are archived, as any other.
    log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = due_at")
    assert archive(spark, log, lake).rows == 2
    assert sorted(messages_of_lake(lake)) == sorted(archived | fresh)


@pytest.fixture
def another_cluster() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    server.start()
    yield server
    server.stop()


@pytest.mark.matrix
def test_a_dump_into_a_new_cluster_goes_on_where_it_was(
    spark: Any,
    pg_log: Log,
    lake: LakeSpec,
    tmp_path: Path,
    another_cluster: PostgreSQL,
) -> None:
    pg_log.execute(
        "DO $$ BEGIN FOR n IN 1..20000 LOOP"
        " PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    )
    pg_log.send_many(150)
    archive(spark, pg_log, lake)
    pg_log.send_many(50)
    with pytest.raises(Stopped):
        archive(spark, pg_log, lake, on_step=stop_at("committed"))
    pg_log.send_many(40)
    backup = Backup(pg_log, tmp_path)
    everything = set(messages_of_lake(lake)) | messages_in(pg_log)

    moved = Log(SourceSpec("shop", another_cluster.url("moved")))
    backup.restore(moved)
    ahead = "SELECT count(*) FROM django_txmsg_outboxmessage WHERE changed_xid >"
    assert moved.value(f"{ahead} pg_current_xact_id()") == 90
    done = archive(spark, moved, lake)

    assert (done.rows, done.refused, moved.count()) == (90, [], 0)
    there = messages_of_lake(lake)
    assert len(there) == len(set(there)) == 240
    assert set(there) == everything


def test_open_transaction_anywhere_in_the_cluster_is_reported(
    spark: Any, pg_log: Log, make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    elsewhere = make_log("postgresql", "elsewhere")
    spec = JobSpec(services=(pg_log.spec,), lake=lake)
    words = ("archive", "--table", "outbox", "--older-than", "1d", "--no-vacuum")
    with elsewhere.connected() as other, other.transaction():
        [[pid]] = other.rows("SELECT pg_backend_pid() FROM pg_current_xact_id()")
        pg_log.send_many(500)

        young = outcome(spec, *words)
        stuck = outcome(spec, *words, "--stuck-after", "0s")
        told = outcome(spec, *words, "--dry-run", "--stuck-after", "0s")

    assert (young.exit_code, stuck.exit_code, told.exit_code) == (0, 1, 1)
    for one in (young, stuck, told):
        said = "\n".join(one.lines)
        assert f"500 settled rows wait for process {pid} (idle in transaction" in said
        assert one.facts["held"] == {"outbox": 500}
    assert run(spec, *words)["counts"] == {"outbox": 500}


@pytest.mark.matrix
def test_time_outs_that_suit_the_application_end_no_archive(
    spark: Any, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(250)
    name = pg_log.spec.url.rpartition("/")[2]
    for setting in ("statement_timeout", "idle_in_transaction_session_timeout"):
        pg_log.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '1ms'")

    assert archive(spark, pg_log, lake).rows == 250
    facts = run(JobSpec((pg_log.spec,), lake), "reconcile", "--fail-on", "never")
    assert facts["counts"] == {"never_received": 250}


@pytest.mark.matrix
def test_a_dead_letter_resolved_meanwhile_refuses_nothing(
    spark: Any, log: Log, lake: LakeSpec
) -> None:
    buried = uuid.uuid4()
    log.send_many(50)
    log.send([{"message_id": buried, "dead_at": LONG_AGO}])
    log.send_many(20)
    log.bury([{"message_id": buried, "stage": ""}])
    before = hashes_in(log)

    def resolve(step: str) -> None:
        if step == "written":
            log.execute(
                "UPDATE django_txmsg_deadletter SET resolution = 'discarded',"
                " resolved_at = created_at"
            )

    first = archive(spark, log, lake, on_step=resolve)
    second = archive(spark, log, lake)

    assert (first.refused, second.refused) == ([], [])
    assert first.rows + second.rows == 71
    assert_moved_once(before, log, lake, set(before))
