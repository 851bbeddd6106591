"""`archive`: copies settled rows to the lake and, with proof, deletes them from the
database.

A row is deleted only in a transaction that has proved that the bytes of this very row
are in a committed lake file. One Spark task writes one batch: plan → write and read
back → one log entry → delete, compare and advance the mark in one transaction. The next
run settles entries above the mark row by row, whatever the reason for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import datetime

from pyspark.sql import Row, SparkSession

from ..connection import Connection
from ..ledger import Batch, Different, Horizon, Ledger
from ..progress import Progress
from ..schemas import Table
from ..spec import LakeSpec, SourceSpec
from .agreement import Agreement
from .archive_options import ArchiveOptions, cores_of, tasks_on
from .archive_result import ArchiveResult, Written
from .batch_task import MANIFEST, BatchTask, file_of, kept_columns, run_here
from .settling import Settled, Settling
from .steps import Step, no_step

#: Most batches that are planned before the first of them is in the lake.
MAX_WAVE = 64


class Archiver:
    """One run over one table of one service, with Spark or, if `spark` is None, in this
    process. `on_step` is called between the steps of the protocol; the tests kill the
    process there."""

    def __init__(
        self,
        spark: SparkSession | None,
        source: SourceSpec,
        lake: LakeSpec,
        table: Table,
        options: ArchiveOptions,
        *,
        on_step: Step = no_step,
        progress: Progress | None = None,
    ) -> None:
        self.spark, self.source, self.table = spark, source, table
        self.options, self.lake = options, lake
        self.on_step = on_step
        self.progress = progress or Progress.silent()
        self.columns = kept_columns(table, lake)
        self.result = ArchiveResult()
        self.ledger = Ledger(source, table)

    def run(self) -> ArchiveResult:
        """Settle what an earlier run left, then archive all settled rows."""
        try:
            with self.ledger.lock():
                agreement = Agreement(
                    self.ledger, self.lake, accept_loss=self.options.accept_loss
                )
                self.log, self.mark = agreement.reach()
                self.settling = Settling(self.log, self.ledger, self.on_step)
                if self.mark.purged_through < self.log.last:
                    self._resume()
                now, horizon = self.ledger.clock()
                cutoff = now - self.options.older_than
                self.progress.start(self.ledger.waiting(cutoff, horizon))
                with ThreadPoolExecutor(max_workers=1) as beside:
                    self._work(cutoff, horizon, beside)
                if self.mark.purged_through < self.log.last:
                    self._advance(self.log.last)
                if self.result.rows and self.options.vacuum:
                    self.ledger.vacuum()
                self.result.held = self.ledger.held(cutoff, self.ledger.clock()[1])
        finally:
            self.ledger.close()
            self.progress.stop()
        return self.result

    def _work(
        self, cutoff: datetime, horizon: Horizon | None, beside: ThreadPoolExecutor
    ) -> None:
        """Complete wave after wave. With `overlap` the files of the next wave are
        written while this one's rows are deleted. They are not visible before their
        turn; if the run is killed, they are orphans like those of any killed run."""
        ahead: Future[list[Row]] | None = None
        wave = self._planned(-(2**62), cutoff, horizon)
        while wave:
            self.on_step("planned")
            manifest = self._write(wave) if ahead is None else ahead.result()
            written = self._commit(self._written(wave, manifest))
            after, last, ahead = wave[-1].last_id, self.log.last, None
            if self.options.overlap and self.source.vendor != "sqlite":
                wave = self._planned(after, cutoff, horizon)
                ahead = beside.submit(self._write_ahead, wave) if wave else None
            self._purge(written)
            if ahead is not None and self.log.last != last:
                # Differing rows have left the lake's batch of that number.
                wait([ahead])
                ahead = None
            if ahead is None:
                wave = self._planned(after, cutoff, horizon)

    def _resume(self) -> None:
        """Settle batches that a killed run has left, or that are missing in a database
        restored from a backup."""
        before, last = self.mark.purged_through, self.log.last
        # The run that left them may still be alive, without its lock: fence it off.
        self.log.enter(last + 1, resumed_after=before)
        started = time.monotonic()
        settled = self.settling.settle(before, last)
        self.result.notes.append(
            f"{self.table.name}: batches {before + 1} to {last} of the lake were not "
            f"settled here: {settled.rows:,} rows were removed here."
        )
        self._count(settled, last)
        self._advance(self.log.last, settled.rows)
        self.result.spent("purge", started)

    def _count(self, settled: Settled, batch: int) -> None:
        self.result.rows += settled.rows
        self.progress.advance(settled.rows)
        if settled.different:
            self.result.refused.append(
                f"{self.table.name}, batch {batch}: {settled.describe()}"
            )

    def _advance(
        self, number: int, rows: int = 0, connection: Connection | None = None
    ) -> None:
        self.ledger.marks.advance(
            self.mark.lake_id, self.mark.purged_through, number, rows, connection
        )
        if connection is None:
            self.mark = replace(self.mark, purged_through=number)

    def _wave(self) -> int:
        return self.options.batches or min(MAX_WAVE, 4 * cores_of(self.spark))

    def _planned(
        self, after: int, cutoff: datetime, horizon: Horizon | None
    ) -> list[Batch]:
        started = time.monotonic()
        wave: list[Batch] = []
        number = self.log.last
        while len(wave) < self._wave():
            number += 1
            batch = self.ledger.plan(
                number, after, self.options.batch_rows, cutoff, horizon
            )
            if batch is None:
                break
            wave.append(batch)
            after = batch.last_id
        self.result.spent("plan", started)
        return wave

    def _write(self, batches: Sequence[Batch]) -> list[Row]:
        """Write batches and prove their files, which are not visible yet."""
        started = time.monotonic()
        work = [(one, self.ledger.members(one)) for one in batches]
        task = BatchTask(
            self.ledger.database, self.lake, self.table, self.source.service, work
        )
        # Connecting takes as long as many rows: each task connects once.
        parts = min(len(work), self.options.tasks or tasks_on(self.spark))
        if self.spark is None:
            manifest = run_here(task, len(work), parts)
        else:
            places = self.spark.range(0, len(work), 1, parts)
            manifest = places.mapInArrow(task, MANIFEST).collect()
        self.result.spent("write", started)
        return manifest

    def _write_ahead(self, batches: Sequence[Batch]) -> list[Row]:
        manifest = self._write(batches)
        self.on_step("ahead")
        return manifest

    def _written(
        self, batches: Sequence[Batch], manifest: Sequence[Row]
    ) -> list[Written]:
        """Return the files of batches, from the tasks' manifests."""
        for one in {row.batch_id: row for row in manifest}.values():
            for step in ("write", "proof"):
                name = f"task {step}"
                spent = self.result.seconds.get(name, 0.0)
                self.result.seconds[name] = spent + one[f"{step}_seconds"]
        self.on_step("written")
        written = []
        for batch in batches:
            rows = [row for row in manifest if row.batch_id == batch.number]
            if rows:
                files = [file_of(row, self.source.service) for row in rows]
                total = sum(one.rows for one in files)
                written.append(Written(batch, files, total, int(rows[0].checksum)))
        return written

    def _commit(self, written: Sequence[Written]) -> list[Written]:
        """Name the files in the log, batch by batch."""
        if not written:
            return []
        started = time.monotonic()
        if not self.mark.lake_id:
            self.log.place.ensure()
            self.mark = self.ledger.marks.place(self.log.identity(), self.lake.uri, 0)
        self.ledger.marks.begin(self.mark.lake_id, written[-1].batch.number)
        for one in written:
            self.on_step("committing")
            self.log.enter(
                one.batch.number, one.files, rows=one.rows, checksum=str(one.checksum),
                ids=[one.batch.first_id, one.batch.last_id],
                cutoff=one.batch.cutoff.isoformat(),
            )  # fmt: skip
            self.on_step("committed")
            self.progress.say(f"batch {one.batch.number} is in the lake")
        self.result.spent("commit", started)
        return list(written)

    def _purge(self, written: Sequence[Written]) -> None:
        """Delete what is in the lake, in the order of the batches."""
        started = time.monotonic()
        side_by_side = max(1, self.options.purges)
        if self.source.vendor == "sqlite":
            side_by_side = 1
        for start in range(0, len(written), side_by_side):
            group = written[start : start + side_by_side]
            with ThreadPoolExecutor(max_workers=side_by_side) as pool:
                before: Future[bool] | None = None
                purges = []
                for place, one in enumerate(group):
                    through = group[place - 1].batch.number if place else None
                    before = pool.submit(self._purge_one, one, through, before)
                    purges.append(before)
                for one, purge in zip(group, purges, strict=True):
                    self._purged(one, purge.result())
        self.result.spent("purge", started)

    def _purge_one(
        self, one: Written, through: int | None, before: Future[bool] | None
    ) -> bool:
        """Delete a batch at once, if its rows are unchanged; return whether they
        were."""
        if self.source.vendor == "sqlite":
            return False  # in slices: every other writer waits for us
        mark = self.mark.purged_through if through is None else through

        def advance(connection: Connection) -> None:
            if before is not None and not before.result():
                raise Different
            self.ledger.marks.advance(
                self.mark.lake_id, mark, one.batch.number, one.rows, connection
            )
            self.on_step("purging")

        sums = one.rows, one.checksum
        return self.ledger.purge(one.batch, sums, self.columns, advance)

    def _purged(self, one: Written, whole: bool) -> None:
        number = one.batch.number
        self.result.batches += 1
        if whole:
            self.mark = replace(self.mark, purged_through=number)
            self.result.rows += one.rows
            self.progress.advance(one.rows)
        else:
            settled = self.settling.settle(self.mark.purged_through, number)
            self._count(settled, number)
            self._advance(number, settled.rows)
        self.on_step("purged")
