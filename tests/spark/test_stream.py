"""`readStream.format("txmsg")` reads every row once, even if it is committed late."""

from __future__ import annotations

import json
import re
import threading
import uuid
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.types import LongType, StructField, StructType

from django_txmsg.spark.connection import Held, held
from django_txmsg.spark.engine import installed
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.source import stream as stream_module
from django_txmsg.spark.source.datasource import TxmsgDataSource
from django_txmsg.spark.spec import SourceSpec
from tests.faults import wait_until
from tests.spark.conftest import since_pyspark
from tests.spark.log import Log


def follow(
    spark: Any, log: Log, directory: Path, *, restarts: int = 5, **options: str
) -> list[int]:
    """Read all available rows, with a checkpoint. Return the ids of all rows that were
    read so far, also by earlier calls."""
    stream = (
        spark.readStream.format("txmsg")
        .options(service=log.spec.service, url=log.spec.url, **options)
        .schema("id long")
        .load()
    )
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "out"))
    )
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        # Spark gives a worker ten seconds to start, and no setting for it. On a machine
        # under heavy load that may not do; a stream goes on from its checkpoint.
        if "failed to connect back" not in str(error) or not restarts:
            raise
        return follow(spark, log, directory, restarts=restarts - 1, **options)
    rows = spark.read.schema("id long").parquet(str(directory / "out")).collect()
    return sorted(row.id for row in rows)


ADD = (
    "INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,"
    ' destination, "key", '
    "correlation_id, headers, content_type, body, created_at, due_at, attempts,"
    " last_error) VALUES (%s, '', '', 'd', '', '', '{}', '', '', '2026-03-01',"
    " '2026-03-01', 0, '')"
)


def add(connection: Any) -> None:
    connection.execute(ADD, uuid.uuid4())


def test_a_row_with_a_low_id_that_commits_late_is_not_missed(
    spark, pg_log: Log, tmp_path: Path
) -> None:
    with pg_log.connected() as slow:
        slow.raw.autocommit = False
        add(slow)
        with pg_log.connected() as quick:
            for _ in range(10):
                add(quick)
        # A gap as well: an id that no transaction ever commits.
        with pg_log.connected() as undone:
            undone.raw.autocommit = False
            add(undone)
            undone.raw.rollback()

        early = follow(spark, pg_log, tmp_path)
        slow.raw.commit()

    later = follow(spark, pg_log, tmp_path)

    assert early == []
    assert later == list(range(1, 12))
    assert follow(spark, pg_log, tmp_path) == later


@pytest.mark.matrix
def test_concurrent_writers_are_read_completely_and_once(
    spark, log: Log, tmp_path: Path
) -> None:
    done = threading.Event()

    def write(spec: SourceSpec, seed: int) -> None:
        own = Log(spec)
        for number in range(25):
            with own.connected() as connection:
                try:
                    with connection.transaction():
                        for _ in range(seed):
                            add_to(own, connection)
                        if number % 5 == 0:
                            raise KeyError
                except KeyError:
                    continue

    writers = [threading.Thread(target=write, args=(log.spec, n)) for n in (1, 2, 3)]
    for one in writers:
        one.start()
    watcher = threading.Thread(
        target=lambda: [w.join() for w in writers] and done.set()
    )
    watcher.start()
    read: list[int] = []
    while not done.is_set():
        read = follow(spark, log, tmp_path)
    watcher.join()
    read = follow(spark, log, tmp_path)

    ids = [row[0] for row in log.rows("SELECT id FROM django_txmsg_outboxmessage")]
    assert read == sorted(ids)
    assert len(ids) == 20 * (1 + 2 + 3)


def add_to(log: Log, connection: Any) -> None:
    message_id = uuid.uuid4()
    connection.execute(ADD, message_id.hex if log.vendor == "sqlite" else message_id)


@since_pyspark(4, 2)
@pytest.mark.matrix
def test_a_cap_on_rows_never_splits_a_transaction(
    spark, pg_log: Log, tmp_path: Path
) -> None:
    for _ in range(6):
        pg_log.send_many(10)

    read = follow(spark, pg_log, tmp_path, maxRowsPerBatch="25")

    assert len(read) == len(set(read)) == 60
    batches = list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    assert len(batches) == 3


def test_unfinished_micro_batch_is_repeated_unchanged(
    spark, log: Log, tmp_path: Path
) -> None:
    log.send_many(10)
    assert follow(spark, log, tmp_path) == list(range(1, 11))
    log.send_many(5)
    follow(spark, log, tmp_path)
    # What a kill leaves: the second batch's end is written down, its commit is not.
    # Its files are forgotten as well, so that it has to be read once more.
    commits = tmp_path / "checkpoint" / "commits"
    newest = max(int(one.name) for one in commits.glob("[0-9]*"))
    assert newest == 1
    for place in (commits, tmp_path / "out" / "_spark_metadata"):
        for path in (place / "1", place / ".1.crc"):
            path.unlink()
    log.send_many(3)

    if installed() < (4, 2):
        # One micro-batch is all that `availableNow` does there.
        assert follow(spark, log, tmp_path) == list(range(1, 16))
    assert follow(spark, log, tmp_path) == list(range(1, 19))


@pytest.mark.matrix
def test_a_checkpoint_of_another_cluster_is_refused(
    spark, pg_log: Log, tmp_path: Path
) -> None:
    pg_log.send_many(2)
    follow(spark, pg_log, tmp_path)
    for offsets in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*"):
        text = offsets.read_text()
        cluster = json.loads(text.splitlines()[-1])["cluster"]
        offsets.write_text(text.replace(cluster, "1"))
        (offsets.parent / f".{offsets.name}.crc").unlink()

    with pytest.raises(StreamingQueryException, match="Start with a new checkpoint"):
        follow(spark, pg_log, tmp_path)


@pytest.mark.matrix
def test_a_checkpoint_that_the_database_has_not_reached_is_refused(
    spark, log: Log, tmp_path: Path
) -> None:
    """The database was restored to an earlier state, and new rows get the ids of
    transactions, or of rows, that were lost."""
    log.send_many(2)
    assert follow(spark, log, tmp_path) == [1, 2]
    for offsets in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*"):
        *heads, text = offsets.read_text().splitlines()
        offset = json.loads(text)
        offset["position"] = str(int(offset["position"]) + 1_000_000)
        offsets.write_text("\n".join([*heads, json.dumps(offset)]))
        (offsets.parent / f".{offsets.name}.crc").unlink()

    with pytest.raises(StreamingQueryException, match="Start with a new checkpoint"):
        follow(spark, log, tmp_path)


@pytest.mark.usefixtures("asking")
def test_running_stream_ends_if_its_database_is_restored(log: Log) -> None:
    stream = Reading(log)
    log.send_many(2)
    start = stream.end(stream.reader.initialOffset())
    if log.vendor == "postgresql":
        later = start | {"position": str(int(start["position"]) + 1_000_000)}
        if installed() < (4, 2):
            stream.reader._reached = later
    else:
        later = start
        log.execute("DELETE FROM django_txmsg_outboxmessage")
        assert stream.end(later)  # pruned, and no id is given again
        log.execute("DELETE FROM sqlite_sequence")

    with pytest.raises(EnvironmentFault, match="restored to an earlier state"):
        stream.end(later)


def test_changes_can_be_followed(spark, pg_log: Log, tmp_path: Path) -> None:
    pg_log.send_many(3)
    assert follow(spark, pg_log, tmp_path, follow="changed") == [1, 2, 3]

    pg_log.execute("UPDATE django_txmsg_outboxmessage SET attempts = 1 WHERE id = 2")

    assert follow(spark, pg_log, tmp_path, follow="changed") == [1, 2, 2, 3]


@pytest.mark.matrix
def test_rows_that_are_older_than_the_pipelines_columns_come_first(
    spark, pg_log: Log, tmp_path: Path
) -> None:
    with pg_log.connected() as connection:
        add(connection)
        connection.execute("UPDATE django_txmsg_outboxmessage SET created_xid = NULL")
        add(connection)

    assert follow(spark, pg_log, tmp_path) == [1, 2]
    with pg_log.connected() as connection:
        add(connection)
    assert follow(spark, pg_log, tmp_path) == [1, 2, 3]


class Reading:
    """Contains the reader of a stream. `end` calls the reader's `latestOffset()` with
    the arguments that the installed version of Spark passes."""

    def __init__(self, log: Log, **options: str) -> None:
        schema = StructType([StructField("id", LongType())])
        given = {"service": log.spec.service, "url": log.spec.url, **options}
        self.reader = TxmsgDataSource(given).streamReader(schema)

    def end(self, start: dict[str, Any]) -> dict[str, Any]:
        if installed() < (4, 2):
            return self.reader.latestOffset()  # type: ignore[call-arg]  # as 4.1 asks
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return self.reader.latestOffset(start, ReadAllAvailable())


@pytest.fixture(params=["as here", "as 4.1"])
def asking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: with the version of the installed PySpark, and with 4.1.0 set
    as the version."""
    if request.param == "as 4.1":
        monkeypatch.setattr(pyspark, "__version__", "4.1.0")


@pytest.mark.usefixtures("asking")
def test_blocked_stream_reports_and_then_fails(pg_log: Log, monkeypatch, capfd) -> None:
    monkeypatch.setattr(stream_module, "LOOK", 0.0)
    patient, strict = Reading(pg_log, stuckAfter="0"), Reading(pg_log)
    with pg_log.connected() as forgotten:
        forgotten.raw.autocommit = False
        add(forgotten)
        start = patient.end(patient.reader.initialOffset())
        assert patient.end(start) == strict.end(start) == start
        pg_log.send_many(3)
        # Open for no time at all: that is how a busy database looks.
        assert patient.end(start) == start
        assert capfd.readouterr().err == ""

        monkeypatch.setattr(stream_module, "TELL_AFTER", 0.0)
        assert patient.end(start) == start
        said = capfd.readouterr().err
        strict.reader.stuck_after = 0.001
        with pytest.raises(EnvironmentFault, match=r"3 rows wait for process .* open"):
            strict.end(start)
        forgotten.raw.rollback()

    assert said.startswith("The stream of outbox stands still: 3 rows wait for process")
    assert int(strict.end(start)["position"]) > int(start["position"])


def test_rows_wait_for_an_open_transaction_also_of_a_role_with_more_rights(
    pg_log: Log,
) -> None:
    with pg_log.connected() as looking, pg_log.connected() as forgotten:
        # Whoever held the counted rows has ended.
        wait_until(lambda: held(looking, 3) == Held(0))

        looking.execute("CREATE ROLE without_rights")
        looking.execute("SET ROLE without_rights")
        forgotten.raw.autocommit = False
        add(forgotten)
        found = held(looking, 3)
        forgotten.raw.rollback()
        looking.execute("RESET ROLE")
        looking.execute("DROP ROLE without_rights")

    assert (found.rows, found.seconds) == (3, float("inf"))
    assert re.fullmatch(r"process \d+ \(database \w+, user \w+\)", found.whom)


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize("follow_by", ["stored", "changed"])
def test_rows_of_a_dump_are_refused_until_declared_old(
    pg_log: Log, follow_by: str
) -> None:
    pg_log.send_many(3)
    column = "created_xid" if follow_by == "stored" else "changed_xid"
    pg_log.execute("ALTER TABLE django_txmsg_outboxmessage DISABLE TRIGGER USER")
    pg_log.execute(
        f"UPDATE django_txmsg_outboxmessage SET {column} = '999999999' WHERE id < 3"
    )
    pg_log.execute("ALTER TABLE django_txmsg_outboxmessage ENABLE TRIGGER USER")
    pg_log.send_many(2)
    stream = Reading(pg_log, follow=follow_by)

    with pytest.raises(EnvironmentFault, match="2 rows of outbox carry") as refused:
        stream.reader.initialOffset()
    pg_log.execute(str(refused.value).partition("start again: ")[2])
    first = stream.reader.initialOffset()
    [part] = stream.reader.partitions(first, stream.end(first))
    read = stream.reader.read(part)
    ids = [row for batch in read for row in batch.column(0).to_pylist()]

    assert sorted(ids) == [1, 2, 3, 4, 5]
