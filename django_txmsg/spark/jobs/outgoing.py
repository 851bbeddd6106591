"""`replay` and `send`: messages stored into an outbox from data, each once.

Tasks stage; one transaction of the driver merges what the successful tasks brought.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyspark.sql.functions as sf
from pyspark import TaskContext
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from ..errors import UsageError
from ..lake import Lake
from ..runs import Run
from ..schemas import DEAD_LETTERS, OUTBOX, Table, arrow_schema
from ..spec import JobSpec, SourceSpec
from ..staging import Merged, Staging
from ..transforms.normalise import whole_log
from ..transforms.outgoing import from_dataset, parse_template, to_outbox_rows
from .reading import WholeLog

_STAGED_TASK = t.StructType(
    [
        t.StructField("task", t.StringType(), False),
        t.StructField("n", t.LongType(), False),
    ]
)


@dataclass(frozen=True)
class ReplayOptions:
    """Which messages go out again, as what, and how fast."""

    where: str
    table: Literal["outbox", "dead_letters"] = "outbox"
    mode: Literal["same", "copy"] = "same"
    rate: float = 0
    limit: int = 0
    name: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class SendOptions:
    """The dataset and what becomes of each of its rows."""

    path: str
    destination: str
    template: str
    format: str = ""
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    identity: str = ""
    rate: float = 0
    name: str = ""
    broker: str = "default"
    dry_run: bool = False


@dataclass
class Stored:
    """What was stored, or with a dry run would be."""

    name: str
    chosen: int
    merged: Merged | None = None
    destinations: dict[str, int] = field(default_factory=dict)
    sample: list[dict[str, Any]] = field(default_factory=list)


def run_replay(
    spark: SparkSession, spec: JobSpec, options: ReplayOptions, run: Run
) -> Stored:
    """Choose by the filter, and store what is chosen under the replay's name.

    The name is a digest of the choice unless given: the same replay again is the same
    name, and stores nothing.
    """
    source = spec.service()
    described = (
        source.service,
        options.where,
        options.table,
        options.mode,
        options.limit,
    )
    name = options.name or "replay-" + _digest(described)
    table = DEAD_LETTERS if options.table == "dead_letters" else OUTBOX
    alone = dataclasses.replace(spec, services=(source,))
    with WholeLog(spark, alone) as log:
        chosen = _chosen(log, spec, source, table, options)
        rows = to_outbox_rows(chosen, run=name, mode=options.mode)
        return _store(
            rows, source, name, options.rate, options.dry_run, run,
            letters=table is DEAD_LETTERS,
        )  # fmt: skip


def run_send(
    spark: SparkSession, spec: JobSpec, options: SendOptions, run: Run
) -> Stored:
    """Store one message for each row of a dataset."""
    source = spec.service()
    template = parse_template(options.template)
    kind = options.format or options.path.rstrip("/").rpartition(".")[2].lower()
    readers: dict[str, Callable[[], DataFrame]] = {
        "parquet": lambda: spark.read.parquet(options.path),
        "csv": lambda: spark.read.option("header", "true").csv(options.path),
        "json": lambda: spark.read.json(options.path),
        "jsonl": lambda: spark.read.json(options.path),
    }
    if kind not in readers:
        raise UsageError(
            f"The format of {options.path} is not known: say --format parquet, csv or "
            "json."
        )
    try:
        dataset = readers[kind]()
    except AnalysisException as error:
        raise UsageError(f"{options.path} cannot be read: {_short(error)}") from error
    described = (
        source.service, options.path, options.destination, template, options.key,
        options.headers, options.identity,
    )  # fmt: skip
    name = options.name or "send-" + _digest(described)
    rows = from_dataset(
        dataset, run=name, destination=options.destination, template=template,
        key=options.key, headers=options.headers, identity=options.identity,
        broker=options.broker,
    )  # fmt: skip
    if options.identity:
        _insist_on_one_row_each(rows, options.identity)
    return _store(rows, source, name, options.rate, options.dry_run, run)


def _chosen(
    log: WholeLog,
    spec: JobSpec,
    source: SourceSpec,
    table: Table,
    options: ReplayOptions,
) -> DataFrame:
    frames = []
    struct = t.StructType(
        [f for f in table.lake_struct().fields if f.name != "batch_id"]
    )
    if table is DEAD_LETTERS:
        # Open ones are in the database only.
        frame = (
            log.read_live(table, table.struct())
            .where("resolution = 'open'")
            .withColumns({"outcome": sf.lit("open"), "day": sf.to_date("created_at")})
        )
        frames.append(frame)
    else:
        kept = Lake(spec.lake_spec()).table(table.name, table.lake_struct())
        frames.append(kept.read(log.spark, services=[source.service]))
    whole = whole_log(frames, struct)
    try:
        chosen = whole.where(options.where)
        chosen.schema  # noqa: B018 - resolves the names
    except (ParseException, AnalysisException) as error:
        raise UsageError(
            f"The filter {options.where!r} does not parse: {_short(error)} Columns: "
            f"{', '.join(struct.fieldNames())}."
        ) from error
    if options.limit:
        chosen = chosen.orderBy("created_at", "id").limit(options.limit)
    return chosen


def _insist_on_one_row_each(rows: DataFrame, identity: str) -> None:
    doubled = rows.groupBy("message_id").count().where("count > 1").count()
    if doubled:
        raise UsageError(
            f"{doubled} values of {identity} stand in several rows each: they would "
            "become one message. Name columns that make a row itself, or none."
        )


def _store(
    rows: DataFrame,
    source: SourceSpec,
    name: str,
    rate: float,
    dry_run: bool,
    run: Run,
    *,
    letters: bool = False,
) -> Stored:
    if not 0 < len(name) <= 64:
        raise UsageError("The name of a replay has at most 64 characters.")
    if dry_run:
        return _shown(rows, name, run)
    staging = Staging(source.resolved(), name)
    task = StageTask(staging)
    staged = rows.mapInArrow(task, _STAGED_TASK).collect()
    tasks = [(row.task, row.n) for row in staged]
    merged = staging.merge(tasks, rate=rate, letters=letters)
    run.rows = merged.stored
    run.counts = {
        "name": name, "chosen": merged.staged, "stored": merged.stored,
        "known": merged.known, "skipped": merged.skipped,
    }  # fmt: skip
    return Stored(name, merged.staged, merged)


def _shown(rows: DataFrame, name: str, run: Run) -> Stored:
    per_destination = rows.groupBy("destination").count().collect()
    counts = {row["destination"]: row["count"] for row in per_destination}
    sample = rows.limit(5).select(
        "message_id", "destination", "key", "headers",
        sf.left(sf.decode("body", "UTF-8"), sf.lit(200)).alias("body"),
    )  # fmt: skip
    stored = Stored(name, sum(counts.values()), destinations=counts)
    stored.sample = [row.asDict() for row in sample.collect()]
    run.counts = {"name": name, "chosen": stored.chosen, "dry_run": True}
    return stored


@dataclass
class StageTask:
    """What an executor does: stage its rows under a key of this attempt."""

    staging: Staging

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage what comes in; send out under which key, and how much."""
        context = TaskContext.get()
        place = f"{context.partitionId()}-{context.taskAttemptId()}" if context else "0"
        task = f"{place}-{uuid.uuid4().hex[:12]}"
        rows = self.staging.stage(task, batches)
        yield pa.RecordBatch.from_pylist(
            [{"task": task, "n": rows}], schema=arrow_schema(_STAGED_TASK)
        )


def _digest(described: Any) -> str:
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _short(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(";")[0].rstrip(".") + "."
