"""`verify`: checks that the lake matches its log, contains each row only once, and
contains no row that is also in the database.

It reads every file, those of results too. Each file must exist and have as many rows as
the log says. Each batch must have the checksum that was recorded when it was archived.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf
from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from ..engine import gather
from ..errors import SpoiltFile, from_spark
from ..lake import Lake, LakeTable
from ..lakefile import LakeFile, checksum, rows_of
from ..runs import Run
from ..schemas import TABLES
from ..spec import JobSpec, LakeSpec
from ..storage import place_of
from .reading import WholeLog
from .running import job_session

#: Most problems of a table that are listed individually.
SHOWN = 20
#: The columns that identify a row, as far as a table has them. A topic's message may
#: have the same id in two databases of a service.
_KEYS = ("service", "id", "message_id", "stage")
#: Each batch in a file: its number, the number of its rows and the sum of their
#: checksums.
_Sums = list[tuple[int, int, int]]


@dataclass
class Verified:
    """The result for one table: what was read, and the problems."""

    rows: int = 0
    batches: int = 0
    #: Batches that have changed since, or whose entry the log no longer has.
    unproven: int = 0
    problems: list[str] = field(default_factory=list)


def read_back(
    spark: SparkSession,
    lake: LakeSpec,
    name: str,
    named: Sequence[LakeFile],
    delta: DeltaTable,
    done: Verified,
    only: Collection[int] | None = None,
) -> list[LakeFile]:
    """Read a service's files of the table `name`, and compare the checksums of their
    batches with the log. With `only`, compare only these batches. Adds problems to
    `done`. Returns the files that could be read."""
    if not named:
        return []
    rows, sums = Counter[int](), Counter[int]()
    broken: dict[str, str] = {}
    for path, problem, found in gather(spark, partial(_verified, lake, name), named):
        if problem is not None:
            broken[path] = f"{path}: {problem}"
        for batch, count, total in found:
            rows[batch] += count
            sums[batch] += total
    done.rows += rows.total()
    done.problems += [f"{name}: {one}" for one in list(broken.values())[:SHOWN]]
    hurt = [one.batches for one in named if one.path in broken]
    entries, changed = _entries(delta, named[0].service, lake.former)
    wrong = []
    for batch in sorted(entries.keys() | sums.keys() if only is None else only):
        if batch not in entries or _within(batch, changed) or _within(batch, hurt):
            done.unproven += batch in sums
        elif (rows[batch], sums[batch]) != (proven := entries[batch]):
            wrong.append(
                f"{name}, batch {batch}: {rows[batch]:,} rows with the sum "
                f"{sums[batch]} are there, {proven[0]:,} with {proven[1]} were proven."
            )
        else:
            done.batches += 1
    done.problems += wrong[:SHOWN]
    return [one for one in named if one.path not in broken]


def _entries(
    delta: DeltaTable, service: str, former: Mapping[str, str]
) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int] | None]]:
    """Return the number of rows and the checksum of each batch of a service, from the
    log. Also return the ranges of batches from which rows were removed later."""
    entries: dict[int, tuple[int, int]] = {}
    changed: list[tuple[int, int] | None] = []
    for commit in delta.history():
        noted: dict[str, Any] = json.loads(commit.get("txmsg") or "{}")
        # Early entries of an erasure or a sweep do not name their service.
        name = noted.get("service", service)
        if former.get(name, name) != service:
            continue
        if {"amended", "erased", "dropped_before"} & noted.keys():
            changed += [(low, high) for low, high in noted.get("touched", [[0, 2**62]])]
        elif "checksum" in noted:
            entries[noted["batch"]] = noted["rows"], int(noted["checksum"])
    return entries, changed


def _within(batch: int, ranges: Sequence[tuple[int, int] | None]) -> bool:
    return any(one is None or one[0] <= batch <= one[1] for one in ranges)


def _look_for_doubles(
    log: WholeLog,
    place: LakeTable,
    delta: DeltaTable,
    named: Sequence[LakeFile],
    done: Verified,
) -> None:
    """Check that each row is in the lake only once, and that the database contains no
    row of a settled batch."""
    lake_id, service = str(delta.metadata().id), log.live[0].service
    settled = log.settled(service, place.name, lake_id)
    kept = place.read(log.spark, named=named)
    struct = TABLES[place.name].narrow(_KEYS)
    keys = struct.fieldNames()
    live = log.read_live(TABLES[place.name], struct).withColumn("live", sf.lit(1))
    both = kept.select(
        *keys, sf.when(sf.col("batch_id") <= settled, 0).alias("live")
    ).unionByName(live)
    seen = both.groupBy(*keys).agg(
        sf.count_if(sf.coalesce("live", sf.lit(0)) == 0).alias("archived"),
        (sf.min("live") != sf.max("live")).alias("alive"),
    )
    wrong = seen.where("archived > 1 OR alive").orderBy("id").limit(SHOWN)
    try:
        found = wrong.collect()
    except (PySparkException, Py4JError) as error:
        done.problems.append(f"{place.name}: {from_spark(error)}")
        return
    for row in found:
        what = "is there twice" if row.archived > 1 else "is in the database, too"
        done.problems.append(
            f"{place.name}: row {row.id} of message {row.message_id} {what}."
        )


def _verified(
    lake: LakeSpec, name: str, files: Iterator[LakeFile]
) -> Iterator[tuple[str, str | None, _Sums]]:
    """Read files. Yield the path of each, and its problem or the sums of its batches.
    Executors run this function."""
    for file in files:
        try:
            yield file.path, None, _sums(lake, name, file)
        except (SpoiltFile, pa.ArrowException, KeyError, ValueError) as error:
            yield file.path, str(error).partition("\n")[0], []


def _sums(lake: LakeSpec, name: str, file: LakeFile) -> _Sums:
    """Return the sums of a file's batches; a table of results has none. Raises
    ValueError if the file does not have as many rows as the log says."""
    place, table = place_of(lake), TABLES.get(name)
    counts, sums = Counter[int](), Counter[int]()
    for rows in rows_of(place.files, f"{place.root}/{name}/{file.path}"):
        numbers = rows.column("batch_id") if table else pa.repeat(0, rows.num_rows)
        for batch in pc.unique(numbers).to_pylist():
            part = rows.filter(pc.equal(numbers, batch))
            counts[batch] += part.num_rows
            sums[batch] += checksum(part, table)
    if counts.total() != file.rows:
        raise ValueError(f"{counts.total():,} rows, and the log says {file.rows:,}.")
    return [(batch, rows, sums[batch]) for batch, rows in counts.items() if table]


def verify_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Verify the first service's part of the lake. If there is a problem, the run ends
    as refused. Raises EnvironmentFault if there is no lake."""
    lake = Lake(spec.lake_spec())
    service = spec.service().service
    problems: list[str] = []
    alone = JobSpec((spec.service(),), spec.lake)
    with job_session(given) as spark, WholeLog(spark, alone) as log:
        for name in lake.names():
            table = TABLES.get(name)
            place = lake.table(name, table.lake_struct() if table else t.StructType())
            while (delta := place.load()) is not None:
                named, done = place.named(delta, service), Verified()
                intact = read_back(spark, lake.spec, name, named, delta, done)
                if table is not None:
                    _look_for_doubles(log, place, delta, intact, done)
                    run.counts[name] = done.rows
                # An erasure deletes the files that it has replaced: read the new ones.
                if not done.problems or {*named} <= {*place.named(service=service)}:
                    break
            else:
                continue
            run.rows += done.rows
            problems += done.problems
            if table and not done.problems:
                line = f"{name}: {len(named):,} files and {done.batches:,} batches are"
                line += " as the log says"
                if done.unproven:
                    line += f", {done.unproven:,} batches have no sum to compare with"
                run.lines.append(f"{line}.")
    if problems:
        run.refused, run.error = True, "\n".join(problems)
    run.lines += problems
    run.facts["problems"] = problems
