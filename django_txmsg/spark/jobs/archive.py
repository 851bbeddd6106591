"""`archive`: settled rows go to the lake, and then, proven, out of the database.

A row is deleted only in a transaction that has proved that the bytes of this very row
are in a committed lake file. One Spark task writes one batch: plan → write and read
back → one log entry → ledger → delete and compare in one transaction. Killed anywhere,
the next run finishes what is unfinished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from pyspark.sql import Row, SparkSession

from ..errors import EnvironmentFault, VerificationRefused
from ..lake import Lake
from ..laketable import CommitFailedError, LakeTable, app_name
from ..ledger import Batch, Ledger
from ..progress import Progress
from ..schemas import Table
from ..spec import LakeSpec, SourceSpec
from .batch_task import MANIFEST, BatchTask, file_of, kept_columns
from .withdrawal import differences, withdraw

Step = Callable[[str], None]


def no_step(step: str) -> None:
    """Do nothing between the steps of the protocol."""


@dataclass(frozen=True)
class ArchiveOptions:
    """How an archive works. What works side by side has a server process beside it,
    and takes the processors from whoever sends a message meanwhile."""

    older_than: timedelta
    batch_rows: int = 100_000
    batches: int = 0
    """Batches that one Spark job writes; 0 is four for each core."""
    tasks: int = 0
    """Tasks that write side by side; 0 leaves it to `tasks_on()`."""
    purges: int = 1
    """Transactions that delete side by side, on PostgreSQL."""
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
        self.spark, self.source, self.table = spark, source, table
        self.options = options
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
        return self.options.batches or 4 * self.spark.sparkContext.defaultParallelism

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
        parts = min(len(work), self.options.tasks or tasks_on(self.spark))
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
            files = [file_of(row, self.source.service) for row in manifest]
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
                    self.result.refused.append(f"{error} {self._differ(batch)}")
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

    def _differ(self, batch: Batch) -> str:
        here = self.ledger.hashes(batch, self.columns)
        return differences(self.place, batch, self.columns, here)

    def _withdraw(self, batch: Batch) -> None:
        """Take a refused batch out of the log, whole: nothing of it was deleted."""
        self.on_step("abandoning")
        withdraw(self.place, self.undo, batch)
        self.on_step("withdrawn")
        self.ledger.abandoned(batch)


def tasks_on(spark: SparkSession) -> int:
    """Return how many tasks write side by side, or wait for a core: two for each. On
    one machine it is half its cores, since the database that is read needs the others.
    """
    cores = spark.sparkContext.defaultParallelism
    if (spark.sparkContext.master or "").startswith("local"):
        return max(1, cores // 2)
    return 2 * cores


def waiting(source: SourceSpec, table: Table, older_than: timedelta) -> int:
    """Return how many rows an archive would take: the dry run."""
    ledger = Ledger(source, table, "", "")
    try:
        now, horizon = ledger.clock()
        return ledger.waiting(now - older_than, horizon)
    finally:
        ledger.close()
