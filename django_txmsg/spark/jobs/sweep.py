"""`sweep`: removes files of failed attempts, merges small files, and drops old days."""

from __future__ import annotations

import argparse
import datetime as dt
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as t

from ..connection import connect_plain
from ..errors import PipelineError, SpoiltFile, VerificationRefused, spoilt
from ..lake import Lake, LakeTable, Overtaken, touched
from ..lakefile import LakeFile
from ..lock import Archiving, Taken, archiving, keeping
from ..progress import progress_bar
from ..runs import Run
from ..schemas import TABLES
from ..spec import JobSpec, SourceSpec
from .settling import rewritten

#: Files below this size are merged into files of about this size.
SMALL = 64 << 20


def join(place: LakeTable, service: str) -> int:
    """Merge the small files of a service, with one log entry. Returns the number of
    merged files. Raises VerificationRefused if the small files do not have as many rows
    as the log says, or if the rows, when read back, differ from the written ones."""
    delta = place.load()
    if delta is None:
        return 0
    small = [one for one in place.named(delta, service) if one.size < SMALL]
    old: list[LakeFile] = []
    new: list[LakeFile] = []
    name = f"joined-{uuid.uuid4()}"
    with place.discarding(service, [name]):
        for number, group in enumerate(_groups(place, small)):
            old += group
            new += rewritten(place, group, f"{name}-{number}")
        if sum(one.rows for one in new) != sum(one.rows for one in old):
            raise VerificationRefused(
                f"The small files of {place.name} do not hold as many rows as the log "
                "says. `pipeline verify` names them."
            )
    if old:
        place.commit(
            delta, new, replaced=old, metadata={"joined": len(old)}, same_rows=True
        )
    return len(old)


def _groups(place: LakeTable, small: list[LakeFile]) -> Iterator[list[LakeFile]]:
    """Yield groups of small files to merge. The files of a group have the same day and
    the same columns: if an older row got a newer column, the row's checksum would
    change."""

    def kind(one: LakeFile) -> tuple[str, tuple[str, ...]]:
        path = f"{place.root}/{one.path}"
        try:
            schema = pq.read_schema(path, filesystem=place.files)
        except (OSError, pa.ArrowException) as error:
            raise spoilt(path, error) from error
        return one.day.isoformat(), tuple(schema.names)

    kinds = {one: kind(one) for one in small}
    for _, of_one_kind in groupby(sorted(small, key=kinds.__getitem__), kinds.get):
        group: list[LakeFile] = []
        size = 0
        for one in of_one_kind:
            group.append(one)
            size += one.size
            if size >= SMALL:
                yield group
                group, size = [], 0
        if len(group) > 1:
            yield group


#: Not history: the subscribers of a topic are valid until they change.
FOR_GOOD = frozenset(["subscriptions"])

#: The options of the command line by default, without a progress bar.
DEFAULTS = argparse.Namespace(
    orphans_older_than=dt.timedelta(days=1), replaced_older_than=dt.timedelta(days=7),
    keep=None, dry_run=False, json=True,
)  # fmt: skip
#: What is counted for each table: removed files, dropped days, and merged files.
_COUNTED = ("orphans", "replaced", "dropped_days", "compacted")


def sweep_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Sweep a service's part of each table in the lake, including the tables of
    results. The run gets the numbers of removed and merged files of each table. A dry
    run changes no file, and gets the numbers that a real run would get. If a table has
    a damaged file, or is being archived, raises the error after all other tables are
    swept."""
    lake = Lake(spec.lake_spec())
    service = spec.service()
    fault: PipelineError | None = None
    bar = progress_bar("sweep", quiet=given.json, unit="steps")
    names = lake.names()
    bar.reset(2 * len(names))
    # First in all tables what writes nothing: if the disk is full, this makes room.
    for step in (_remove_orphans, _tidy):
        for name in names:
            bar.set_postfix_str(name)
            bar.update()
            place = lake.table(name, t.StructType([]))
            if place.load() is None:
                continue
            try:
                with _alone(service, name):
                    done = run.counts.setdefault(name, dict.fromkeys(_COUNTED, 0))
                    step(place, service.service, given, done)
            except Taken:
                continue  # `reconcile` uses them: the next run sweeps
            except (Archiving, Overtaken, SpoiltFile, VerificationRefused) as error:
                if fault is None or isinstance(fault, Archiving | Overtaken):
                    fault = error  # a damaged file is more important
    bar.clear()
    run.rows = sum(one["orphans"] + one["replaced"] for one in run.counts.values())
    if fault:
        raise fault
    would = "would be " if given.dry_run else ""
    run.lines += [
        f"{name}: {one['orphans']} orphaned and {one['replaced']} replaced files "
        f"{would}removed, {one['compacted']} joined, {one['dropped_days']} days "
        "dropped."
        for name, one in run.counts.items()
    ]


@contextmanager
def _alone(service: SourceSpec, name: str) -> Iterator[None]:
    """Hold the lock of a table while the block runs, if the table has one."""
    if name not in (*TABLES, "journeys"):
        yield
        return
    with connect_plain(service) as connection:
        lock = keeping(connection, service)
        if name in TABLES:
            lock = archiving(connection, service, name)
        with lock:
            yield


def _remove_orphans(
    place: LakeTable, service: str, given: argparse.Namespace, done: dict[str, int]
) -> None:
    """Remove files that the log has never named. Their age must be longer than any job
    runs: the log names a job's files only at its end."""
    now = dt.datetime.now(dt.timezone.utc)
    orphans = place.orphans(service, now - given.orphans_older_than)
    done["orphans"] = len(orphans)
    if not given.dry_run:
        for path in orphans:
            place.files.delete_file(path)


def _tidy(
    place: LakeTable, service: str, given: argparse.Namespace, done: dict[str, int]
) -> None:
    """Drop old days, remove replaced files, and merge small files. Replaced files must
    stay for longer than any reader reads."""
    delta = place.existing()
    now = dt.datetime.now(dt.timezone.utc)
    if given.keep is not None and place.name not in FOR_GOOD:
        oldest = (now - given.keep).date()
        old = [one for one in place.named(delta, service) if one.day < oldest]
        done["dropped_days"] = len({one.day for one in old})
        if old and not given.dry_run:
            dropped = {
                "dropped_before": oldest.isoformat(), "service": service,
                "touched": touched(old),
            }  # fmt: skip
            place.commit(delta, (), replaced=old, metadata=dropped)
    hours = -(given.replaced_older_than // -dt.timedelta(hours=1))  # rounded up
    done["replaced"] = len(place.vacuum(hours, dry_run=given.dry_run))
    # Journeys are merged by the run that maintains them, into files with counts.
    if not given.dry_run and place.name != "journeys":
        done["compacted"] = join(place, service)
