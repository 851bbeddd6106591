"""`archive`: settled rows go to the lake, and then, proven, out of the database.

A row is deleted only in a transaction that has proved that the bytes of this very row
are in a committed lake file. One Spark task writes one batch: plan → write and read
back → one log entry → ledger → delete and compare in one transaction. Killed anywhere,
the next run finishes what is unfinished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Row, SparkSession
from pyspark.sql import types as t

from ..errors import EnvironmentFault, VerificationRefused
from ..lake import CommitFailedError, Lake, LakeTable, app_name, filesystem
from ..lakefile import DayFiles, LakeFile, hashes_of, prove
from ..ledger import Batch, Ledger
from ..progress import Progress
from ..schemas import Column, Table, arrow_schema
from ..source.database import Database, Reader, open_database
from ..spec import LakeSpec, SourceSpec

MANIFEST = t.StructType(
    [
        t.StructField("batch_id", t.LongType(), False),
        t.StructField("path", t.StringType(), False),
        t.StructField("day", t.DateType(), False),
        t.StructField("size", t.LongType(), False),
        t.StructField("rows", t.LongType(), False),
        t.StructField("modified_ms", t.LongType(), False),
        t.StructField("checksum", t.StringType(), False),
        t.StructField("write_seconds", t.DoubleType(), False),
        t.StructField("proof_seconds", t.DoubleType(), False),
    ]
)

Step = Callable[[str], None]


def no_step(step: str) -> None:
    """Do nothing between the steps of the protocol."""


@dataclass(frozen=True)
class ArchiveOptions:
    """How an archive works. `purges` transactions delete side by side on PostgreSQL."""

    older_than: timedelta
    batch_rows: int = 100_000
    batches: int = 0
    """Batches that one Spark job writes; 0 is two for each of its tasks, of which each
    core has two."""
    purges: int = 2
    vacuum: bool = True


@dataclass
class ArchiveResult:
    """What an archive did, and where its time went."""

    rows: int = 0
    batches: int = 0
    refused: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def spent(self, step: str, since: float) -> None:
        """Add the time since `since` to a step's."""
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - since


class Archiver:
    """One run over one table of one service. `on_step` is called between the steps of
    the protocol; the tests kill the process there."""

    def __init__(
        self,
        spark: SparkSession,
        source: SourceSpec,
        lake: LakeSpec,
        table: Table,
        options: ArchiveOptions,
        *,
        run_by: str = "",
        on_step: Step = no_step,
        progress: Progress | None = None,
    ) -> None:
        self.spark, self.source, self.table, self.options = (
            spark,
            source,
            table,
            options,
        )
        self.on_step = on_step
        self.progress = progress or Progress.silent()
        self.lake_spec = lake
        self.place: LakeTable = Lake(lake, create=True).table(
            table.name, table.lake_struct()
        )
        self.ledger = Ledger(source, table, lake.uri, run_by)
        self.columns = kept_columns(table, lake)
        self.app = app_name("archive", source.service, table.name)
        self.undo = app_name("withdraw", source.service, table.name)
        self.result = ArchiveResult()

    def run(self) -> ArchiveResult:
        """Finish what was left, then archive all that is settled."""
        try:
            with self.ledger.lock():
                self._check_history()
                now, horizon = self.ledger.clock()
                cutoff = now - self.options.older_than
                self.progress.start(self.ledger.waiting(cutoff, horizon))
                self._finish(self.ledger.unfinished())
                after, replanned = -(2**62), 0
                while True:
                    wave: list[Batch] = []
                    started = time.monotonic()
                    while len(wave) < self._wave():
                        batch = self.ledger.plan(
                            after, self.options.batch_rows, cutoff, horizon
                        )
                        if batch is None:
                            break
                        wave.append(batch)
                        after = batch.last_id
                    self.result.spent("plan", started)
                    if not wave:
                        break
                    self.on_step("planned")
                    refused = self._finish(wave)
                    if refused and replanned < 3:
                        # Their rows are settled no more, or differ: look once again.
                        replanned += 1
                        after = min(one.first_id for one in refused) - 1
                if self.result.rows and self.options.vacuum:
                    self.ledger.vacuum()
        finally:
            self.ledger.close()
            self.progress.stop()
        return self.result

    def _wave(self) -> int:
        return self.options.batches or 2 * tasks(self.spark)

    def _check_history(self) -> None:
        delta = self.place.load()
        if (
            delta is not None
            and self.place.last(delta, self.app) > self.ledger.last_id()
        ):
            raise EnvironmentFault(
                f"The lake has batches of {self.table.name} of {self.source.service!r} "
                "that this database does not know: it was restored from a backup, or "
                "replaced. Give it another service name or another lake. If it is the "
                "same service, advance the sequence of django_txmsg_archivebatch past "
                f"{self.place.last(delta, self.app)}."
            )

    def _finish(self, batches: Sequence[Batch]) -> list[Batch]:
        """Bring batches in whatever state to their end. Returns the refused ones."""
        for batch in batches:
            if batch.state == "abandoning":
                self._withdraw(batch)
        proven = [one for one in batches if one.state == "committed"]
        planned = []
        for batch in batches:
            if batch.state == "planned":
                adopted = self._adopt(batch)
                if adopted is None:
                    planned.append(self.ledger.begin(batch))
                else:
                    proven.append(adopted)
        size = self._wave()
        for start in range(0, len(planned), size):
            proven += self._archive(planned[start : start + size])
        return self._purge(proven)

    def _archive(self, batches: Sequence[Batch]) -> list[Batch]:
        """Write batches, prove their files, and name these in the log."""
        started = time.monotonic()
        manifest = self._write(batches)
        self.result.spent("write", started)
        for one in {row.batch_id: row for row in manifest}.values():
            for step in ("write", "proof"):
                name = f"task {step}"
                spent = self.result.seconds.get(name, 0.0)
                self.result.seconds[name] = spent + one[f"{step}_seconds"]
        self.on_step("written")
        started = time.monotonic()
        committed = []
        for batch in batches:
            rows = [row for row in manifest if row.batch_id == batch.id]
            committed.append(self._commit(batch, rows))
            self.progress.say(f"batch {batch.id} is in the lake")
        self.result.spent("commit", started)
        return committed

    def _write(self, batches: Sequence[Batch]) -> list[Row]:
        work = [(one, self.ledger.members(one)) for one in batches]
        task = BatchTask(
            self.ledger.database, self.lake_spec, self.table, self.source.service, work
        )
        # Connecting takes as long as many rows: a task does so once.
        parts = min(len(work), tasks(self.spark))
        places = self.spark.range(0, len(work), 1, parts)
        return places.mapInArrow(task, MANIFEST).collect()

    def _commit(self, batch: Batch, manifest: Sequence[Row]) -> Batch:
        rows = sum(row.rows for row in manifest)
        checksum = manifest[0].checksum if manifest else "0"
        delta = self.place.ensure()
        if not self.ledger.still_ours(batch):
            raise EnvironmentFault(
                f"Batch {batch.id} was taken over by another archiver: this one has "
                "lost its lock. Nothing was committed."
            )
        version = delta.version()
        self.on_step("committing")
        if manifest:
            files = [
                LakeFile(
                    row.path,
                    self.source.service,
                    row.day,
                    row.size,
                    row.rows,
                    row.modified_ms,
                )
                for row in manifest
            ]
            metadata = {
                "token": batch.token, "batch": batch.id, "rows": rows,
                "checksum": checksum, "table": self.table.name,
                "service": self.source.service, "cutoff": batch.cutoff.isoformat(),
            }  # fmt: skip
            try:
                version = self.place.commit(
                    delta, files, metadata=metadata, app=(self.app, batch.id)
                )
            except CommitFailedError as error:
                raise EnvironmentFault(
                    f"Batch {batch.id} was not committed, another archiver has "
                    f"committed meanwhile ({error}). Run again."
                ) from error
        self.on_step("named")
        done = self.ledger.committed(batch, version, rows, checksum)
        self.on_step("committed")
        return done

    def _adopt(self, batch: Batch) -> Batch | None:
        """Take a batch for committed that is in the log, but not so in the ledger."""
        delta = self.place.load()
        if delta is None or self.place.last(delta, self.app) < batch.id:
            return None
        metadata = self.place.metadata_of(delta, "token", batch.token)
        if metadata is None:
            raise EnvironmentFault(
                f"The lake has a batch {batch.id} of {self.table.name}, and it is not "
                "this database's: was it restored from a backup?"
            )
        return self.ledger.committed(
            batch, delta.version(), metadata["rows"], metadata["checksum"]
        )

    def _purge(self, batches: Sequence[Batch]) -> list[Batch]:
        started = time.monotonic()
        refused = []
        workers = self.options.purges if self.source.vendor == "postgresql" else 1
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            purges = [pool.submit(self._purge_one, batch) for batch in batches]
            for batch, purge in zip(batches, purges, strict=True):
                error = purge.result()
                if error is None:
                    self.result.rows += batch.rows
                    self.result.batches += 1
                    self.progress.advance(batch.rows)
                else:
                    refused.append(batch)
                    self.result.refused.append(f"{error} {self._differences(batch)}")
        messages = self.result.refused[len(self.result.refused) - len(refused) :]
        for batch, message in zip(refused, messages, strict=True):
            self._withdraw(self.ledger.refuse(batch, message))
        self.result.spent("purge", started)
        return refused

    def _purge_one(self, batch: Batch) -> VerificationRefused | None:
        try:
            self.ledger.purge(batch, self.columns, self.on_step)
        except VerificationRefused as error:
            return error
        self.on_step("purged")
        return None

    def _withdraw(self, batch: Batch) -> None:
        """Take a refused batch out of the log, whole: nothing of it was deleted."""
        self.on_step("abandoning")
        delta = self.place.load()
        files = [one for one in self.place.named(delta) if batch.token in one.path]
        if delta is not None and files:
            self.place.commit(
                delta,
                (),
                replaced=files,
                metadata={"withdrawn": batch.token, "batch": batch.id},
                app=(f"{self.undo}/{batch.token}", 1),
            )
        self.on_step("withdrawn")
        self.ledger.abandoned(batch)

    def _differences(self, batch: Batch) -> str:
        """Name the rows that are not as the lake has them."""
        files, root = filesystem(self.lake_spec.uri)
        there: dict[int, int] = {}
        for one in self.place.named():
            if batch.token in one.path:
                path = f"{root}/{self.table.name}/{one.path}"
                for part, hashes in hashes_of(files, path, self.columns):
                    ids = part.column(part.schema.get_field_index("id")).to_pylist()
                    there.update(zip(ids, hashes, strict=True))
        here = self.ledger.hashes(batch, self.columns)
        ids = sorted(
            one for one in there.keys() | here.keys() if there.get(one) != here.get(one)
        )
        listed = ", ".join(map(str, ids[:20])) + (", …" if len(ids) > 20 else "")
        return f"{len(ids)} rows differ: id {listed}."


@dataclass
class BatchTask:
    """What an executor does: read its batch, write it by day, read it back."""

    database: Database
    lake: LakeSpec
    table: Table
    service: str
    work: Sequence[tuple[Batch, str]]
    prove: bool = True

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work the batches whose numbers come in; send their manifests out."""
        with self.database.connected() as reader:
            for numbers in batches:
                for number in numbers.column(0).to_pylist():
                    yield from self._one(reader, *self.work[number])

    def _one(
        self, reader: Reader, batch: Batch, where: str
    ) -> Iterator[pa.RecordBatch]:
        columns = kept_columns(self.table, self.lake)
        files, root = filesystem(self.lake.uri)
        context = TaskContext.get()
        task = context.taskAttemptId() if context else 0
        started = time.monotonic()
        days = DayFiles(
            files, f"{root}/{self.table.name}", self.service, self.table.clock,
            f"{batch.token}-{batch.attempt[:8]}-{task}",
            lambda rows: _with_outcome(rows, self.table, batch.id),
        )  # fmt: skip
        for rows in reader.read(self.table, columns, where):
            days.write(rows)
        written = days.close()
        wrote = time.monotonic()
        checksum = 0
        if self.prove:
            proof = prove(files, f"{root}/{self.table.name}", written, columns)
            if proof.rows != days.rows:
                raise VerificationRefused(
                    f"Batch {batch.id}: {days.rows} rows read, {proof.rows} written."
                )
            checksum = proof.checksum
        if written:
            common = [str(checksum), wrote - started, time.monotonic() - wrote]
            lines = [
                [
                    batch.id,
                    one.path,
                    one.day,
                    one.size,
                    one.rows,
                    one.modified_ms,
                    *common,
                ]
                for one in written
            ]
            names = MANIFEST.fieldNames()
            yield pa.RecordBatch.from_pylist(
                [dict(zip(names, line, strict=True)) for line in lines],
                schema=arrow_schema(MANIFEST),
            )


def tasks(spark: SparkSession) -> int:
    """Return how many tasks write side by side, or wait for a core."""
    return 2 * spark.sparkContext.defaultParallelism


def kept_columns(table: Table, lake: LakeSpec) -> tuple[Column, ...]:
    """Return the columns of a table that the lake keeps."""
    if lake.keep_bodies:
        return table.columns
    return tuple(one for one in table.columns if one.kind != "bytes")


def _with_outcome(rows: pa.Table, table: Table, batch_id: int) -> pa.Table:
    first, *words = table.outcome
    ended = rows[first]
    if words:
        ended = pc.if_else(pc.is_valid(ended), *words)
    number = pa.repeat(pa.scalar(batch_id, pa.int64()), rows.num_rows)
    rows = rows.append_column("outcome", ended).append_column("batch_id", number)
    # Nullable in the file as in the log: a later version may add to the columns.
    return rows.cast(pa.schema([one.with_nullable(True) for one in rows.schema]))


def waiting(source: SourceSpec, table: Table, older_than: timedelta) -> int:
    """Return how many rows an archive would take: the dry run."""
    ledger = Ledger(source, table, "", "")
    try:
        now, horizon = ledger.clock()
        return ledger.waiting(now - older_than, horizon)
    finally:
        ledger.close()


__all__ = ["ArchiveOptions", "ArchiveResult", "Archiver", "open_database", "waiting"]
