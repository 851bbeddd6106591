"""`archive`: copies settled rows into the lake, and deletes them from the database
after verification.

A row is deleted only if a committed file of the lake contains the same bytes. One Spark
task writes one batch. The steps are: plan the batch, write its files, read them back,
add a log entry. Then one transaction deletes the rows, compares the checksums and
advances the mark. After a killed run, the next run settles the entries above the mark
row by row.
"""

from __future__ import annotations

import argparse
import datetime as dt
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession

from ..batchlog import agreed, is_mounted
from ..connection import Connection, Held
from ..engine import gather, on_one_machine, parallelism
from ..errors import UsageError
from ..lakefile import LakeFile
from ..ledger import Batch, Different, Ledger
from ..lock import archiving
from ..progress import Step, no_step, progress_bar
from ..runs import Run
from ..schemas import TABLES, Table
from ..session import running, session
from ..spec import JobSpec, LakeSpec, SourceSpec
from .batch_task import BatchTask, Written, kept_columns, run_here
from .settling import settle

#: Most connections that tasks open to a database at the same time, by default.
MAX_TASKS = 16


@dataclass(frozen=True)
class ArchiveOptions:
    """The options of `archive`. Every parallel task keeps one process of the database
    server busy, at the expense of the application."""

    older_than: dt.timedelta
    batch_rows: int = 100_000
    #: Batches that are written before the first of them is deleted; 0 is four for each
    #: core or, with `overlap` on one machine, one for each writer.
    batches: int = 0
    #: Number of parallel writers; 0 leaves it to `tasks_on()`.
    tasks: int = 0
    #: Number of parallel deleting transactions, on PostgreSQL.
    purges: int = 1
    #: Delete one wave of batches while the next is written, on PostgreSQL.
    overlap: bool = False
    vacuum: bool = True
    #: Go on if the lake has lost batches that this database has deleted.
    accept_loss: bool = False


def tasks_on(spark: SparkSession | None) -> int:
    """Return the default number of parallel writers. On a cluster, it is twice the
    number of cores, but at most MAX_TASKS: one writer works while another waits. On one
    machine, it is half the number of cores, because the database needs the other
    half."""
    cores = parallelism(spark)
    if spark is None or on_one_machine(spark):
        return max(1, cores // 2)
    return min(MAX_TASKS, 2 * cores)


@dataclass
class ArchiveResult:
    """The result of an archive, with the seconds that writing and deleting took."""

    rows: int = 0
    #: Those of the rows that are in batches of earlier runs.
    resumed: int = 0
    batches: int = 0
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: Held = field(default_factory=lambda: Held(0))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def spent(self, step: str, since: float) -> None:
        """Add the time since `since` to the seconds of a step."""
        self.seconds[step] += time.monotonic() - since


#: Most batches that are planned before the first of them is in the lake.
MAX_WAVE = 64


class Archiver:
    """Archives one table of one service. Pass None as `spark` to archive in this
    process. `on_step` is called between the steps, so that tests can kill the process
    there."""

    def __init__(
        self,
        spark: SparkSession | None,
        source: SourceSpec,
        lake: LakeSpec,
        table: Table,
        options: ArchiveOptions,
        *,
        on_step: Step = no_step,
        quiet: bool = True,
    ) -> None:
        self.spark, self.source, self.table = spark, source, table
        self.options, self.lake = options, lake
        self.on_step = on_step
        self.progress = progress_bar(f"archive {table.name}", quiet=quiet)
        self.columns = kept_columns(table, lake)
        self.result = ArchiveResult()
        self.ledger = Ledger(source, table)
        #: The tokens of the batches that have files, and no log entry yet.
        self.unnamed: list[str] = []

    def run(self) -> ArchiveResult:
        """Settle the batches of an earlier run, then archive all settled rows."""
        try:
            with archiving(self.ledger.connection, self.source, self.table.name):
                self.log, self.mark = agreed(
                    self.ledger, self.lake, accept_loss=self.options.accept_loss
                )
                if self.mark.purged_through < self.log.last:
                    self._resume()
                self.horizon = self.ledger.horizon(self.options.older_than)
                self.progress.reset(self.ledger.waiting(self.horizon))
                with (
                    self.log.place.discarding(self.source.service, self.unnamed),
                    ThreadPoolExecutor(max_workers=1) as beside,
                ):
                    self._work(beside)
                if self.mark.purged_through < self.log.last:
                    self._advance(self.log.last)
                if self.result.rows and self.options.vacuum:
                    self.ledger.vacuum()
                now = self.ledger.horizon(self.options.older_than)
                now = replace(now, cutoff=self.horizon.cutoff)
                self.result.held = self.ledger.held(now)
        finally:
            self.ledger.close()
            self.progress.clear()
        return self.result

    def _work(self, beside: ThreadPoolExecutor) -> None:
        """Archive the batches in waves. With `overlap`, the files of the next wave are
        written while the rows of the current wave are deleted. Log entries for the new
        files are added only after the current wave is complete. If the run is killed
        before that, `sweep` removes these files later."""
        ahead: Future[list[Written]] | None = None
        wave = self._planned(-(2**62))
        while wave:
            self.on_step("planned")
            written = self._write(wave) if ahead is None else ahead.result()
            self.on_step("written")
            self._commit(written)
            after, last, ahead = wave[-1].last_id, self.log.last, None
            if self.options.overlap and self.source.vendor != "sqlite":
                wave = self._planned(after)
                ahead = beside.submit(self._write_ahead, wave) if wave else None
            self._purge(written)
            if ahead is not None and self.log.last != last:
                # Differing rows have left the lake's batch of that number.
                wait([ahead])
                ahead = None
            if ahead is None:
                wave = self._planned(after)

    def _resume(self) -> None:
        """Settle the log's batches above the mark. There are three possible reasons for
        such batches: a killed run, a restored backup of the database, or an archive run
        on another database of the service."""
        before, last = self.mark.purged_through, self.log.last
        if not self.log.place.of_batches(self.source.service, before, last):
            # Entries without rows, such as ours: another database of the service has
            # made them, and would answer ours with one of its own in each run.
            return
        # The run that left them may still be alive, without its lock: fence it off.
        self.log.enter(last + 1, resumed_after=before)
        started = time.monotonic()
        rows = self._settle(last)
        self.result.resumed += rows
        self.result.notes.append(
            f"{self.table.name}: batches {before + 1} to {last} of the lake were not "
            f"settled here: {rows:,} rows were removed here."
        )
        self._advance(self.log.last, rows)
        self.result.spent("purge", started)

    def _settle(self, batch: int) -> int:
        """Settle the batches above the mark, up to and including `batch`. Return the
        number of rows that were deleted from the database."""
        rows, left = settle(
            self.log, self.ledger, self.mark.purged_through, batch, self.on_step
        )
        self.result.rows += rows
        self.progress.update(rows)
        if left:
            listed = ", ".join(map(str, left[:20])) + (", …" if len(left) > 20 else "")
            self.result.refused.append(
                f"{self.table.name}, batch {batch}: {len(left)} rows differ: id "
                f"{listed}. They stay in the database unchanged, and were removed from "
                "the lake."
            )
        return rows

    def _advance(self, number: int, rows: int = 0) -> None:
        self.ledger.advance(self.mark.lake_id, self.mark.purged_through, number, rows)
        self.mark = replace(self.mark, purged_through=number)

    def _wave(self) -> int:
        if self.options.batches:
            return self.options.batches
        if self.options.overlap and (self.spark is None or on_one_machine(self.spark)):
            # Small waves: most rows are deleted while others are written.
            return self._writers()
        return min(MAX_WAVE, 4 * parallelism(self.spark))

    def _writers(self) -> int:
        return self.options.tasks or tasks_on(self.spark)

    def _planned(self, after: int) -> list[Batch]:
        wave: list[Batch] = []
        number = self.log.last
        while len(wave) < self._wave():
            number += 1
            rows = self.options.batch_rows
            batch = self.ledger.plan(number, after, rows, self.horizon)
            if batch is None:
                break
            wave.append(batch)
            after = batch.last_id
        return wave

    def _write(self, batches: Sequence[Batch]) -> list[Written]:
        """Write the files of batches, and verify the files. Returns the batches that
        have rows, in their order."""
        started = time.monotonic()
        task = BatchTask(
            self.ledger.database, self.lake, self.table, self.source.service
        )
        # Connecting takes as long as many rows: each task connects once.
        parts = min(len(batches), self._writers())
        self.unnamed += [one.token for one in batches]
        if self.spark is None:
            found = run_here(task, batches, parts)
        else:
            found = gather(self.spark, task, batches, parts)
        self.result.spent("write", started)
        by_number = {one.number: one for one in batches}
        return [
            Written(by_number[number], list(map(LakeFile.of, files)), rows, checksum)
            for number, files, rows, checksum in sorted(found)
            if files
        ]

    def _write_ahead(self, batches: Sequence[Batch]) -> list[Written]:
        written = self._write(batches)
        self.on_step("ahead")
        return written

    def _commit(self, written: Sequence[Written]) -> None:
        """Add one log entry for each batch. From then on, its files belong to the
        lake."""
        if not written:
            return
        if not self.mark.lake_id:
            # Another archiver may have created it: its entries must refuse ours, and
            # its mark must stay.
            self.log.unchanged()
            self.mark = self.ledger.place(self.log.identity, self.lake.uri, 0)
        self.ledger.begin(self.mark.lake_id, written[-1].batch.number)
        for one in written:
            self.on_step("committing")
            self.unnamed.remove(one.batch.token)
            self.log.enter(
                one.batch.number, one.files, rows=one.rows, checksum=str(one.checksum),
                ids=[one.batch.first_id, one.batch.last_id],
                cutoff=one.batch.cutoff.isoformat(),
            )  # fmt: skip
            self.on_step("committed")

    def _purge(self, written: Sequence[Written]) -> None:
        """Delete from the database the rows of batches that the lake contains. The
        deletions commit in the order of the batches."""
        started = time.monotonic()
        side_by_side = self.options.purges
        for start in range(0, len(written), side_by_side):
            group = written[start : start + side_by_side]
            with ThreadPoolExecutor(max_workers=side_by_side) as pool:
                before: Future[bool] | None = None
                through, purges = self.mark.purged_through, []
                for one in group:
                    before = pool.submit(self._purge_one, one, through, before)
                    purges.append(before)
                    through = one.batch.number
                for one, purge in zip(group, purges, strict=True):
                    self._purged(one, purge.result())
        self.result.spent("purge", started)

    def _purge_one(
        self, one: Written, through: int, before: Future[bool] | None
    ) -> bool:
        """Delete a batch's rows in one transaction, and return True. Return False
        without deleting if a row has changed, or if the previous batch was not deleted.
        On SQLite, delete nothing and always return False, so that the caller deletes
        the rows in small slices instead."""
        if self.source.vendor == "sqlite":
            return False  # in slices: every other writer waits for us

        def advance(connection: Connection) -> None:
            if before is not None and not before.result():
                raise Different
            self.ledger.advance(
                self.mark.lake_id, through, one.batch.number, one.rows, connection
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
            self.progress.update(one.rows)
        else:
            self._advance(number, self._settle(number))
        self.on_step("purged")


#: Rows that one process archives in the time that Spark needs to start.
FEW_ROWS = 200_000


def archive_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Archive the chosen tables. In a dry run, only count the rows to archive. Raises
    LostBatches if the lake has lost batches."""
    source, lake = spec.service(), spec.lake_spec()
    chosen = ages(spec, given)
    if given.dry_run:
        if not given.accept_loss:
            is_mounted(replace(spec, services=(source,)))
        count_waiting(spec, given, run)
        return
    refused: list[str] = []
    seconds: dict[str, dict[str, float]] = {}
    engine: AbstractContextManager[SparkSession | None] = nullcontext()
    if _on_spark(source, chosen, given):
        engine = session("archive", dict(given.conf))
    with engine as spark:
        overlap = given.overlap
        if overlap is None:
            overlap = spark is not None and not on_one_machine(spark)
        for name, age in chosen.items():
            options = ArchiveOptions(
                age, given.batch_rows, tasks=given.tasks, purges=given.purges,
                overlap=overlap, vacuum=not given.no_vacuum,
                accept_loss=given.accept_loss,
            )  # fmt: skip
            table = TABLES[name]
            done = Archiver(spark, source, lake, table, options, quiet=given.json).run()
            run.rows += done.rows
            run.counts[name] = done.rows
            refused += done.refused
            seconds[name] = {k: round(v, 2) for k, v in done.seconds.items()}
            if done.batches:
                run.lines.append(
                    f"{name}: {done.rows - done.resumed:,} rows in {done.batches} "
                    "batches are in the lake and out of the database."
                )
            run.lines += done.notes
            _report_held(name, done.held, given.stuck_after, run)
    run.lines += refused
    run.facts |= {
        "engine": "local" if spark is None else "spark", "refused": refused,
        "steps": seconds,
    }  # fmt: skip
    if refused:
        run.refused, run.error = True, "\n".join(refused)


def _on_spark(
    source: SourceSpec, chosen: Mapping[str, dt.timedelta], given: argparse.Namespace
) -> bool:
    """Return whether the rows are archived on Spark. Few rows on one machine are not,
    because starting a JVM would take longer than archiving them."""
    if given.engine != "auto" or given.conf or running():
        return bool(given.engine != "local")
    rows = 0
    for name, age in chosen.items():
        with closing(Ledger(source, TABLES[name])) as ledger:
            rows += ledger.waiting(ledger.horizon(age))
    return rows > FEW_ROWS


def count_waiting(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Count the rows that an archive would move now."""
    for name, age in ages(spec, given).items():
        with closing(Ledger(spec.service(), TABLES[name])) as ledger:
            horizon = ledger.horizon(age)
            run.counts[name], held = ledger.waiting(horizon), ledger.held(horizon)
        if run.counts[name]:
            run.lines.append(f"{name}: {run.counts[name]:,} rows would move.")
        _report_held(name, held, given.stuck_after, run)
    run.rows = sum(run.counts.values())


def _report_held(name: str, held: Held, stuck_after: dt.timedelta, run: Run) -> None:
    """Report the settled rows that cannot be archived until an open transaction has
    ended. If that transaction has been open for longer than `stuck_after`, the run ends
    in the state "findings", because the transaction blocks the archive and vacuum."""
    if not held.rows:
        return
    run.lines.append(
        f"{name}: {held.rows:,} settled rows wait for {held.whom}: they changed after "
        "it had begun."
    )
    run.facts.setdefault("held", {})[name] = held.rows
    if held.seconds > stuck_after.total_seconds():
        run.findings = True


def ages(spec: JobSpec, given: argparse.Namespace) -> dict[str, dt.timedelta]:
    """Return the age from which each table's settled rows are archived. Raises
    UsageError if no table has an age."""
    known = {
        name: dt.timedelta(days=days)
        for name, days in spec.retention.items()
        if days is not None
    }
    if given.older_than is not None:
        known = dict.fromkeys(TABLES, given.older_than)
    chosen = {name: known[name] for name in given.table or TABLES if name in known}
    if not chosen:
        raise UsageError("No age is given: give --older-than, or a retention.")
    return chosen
