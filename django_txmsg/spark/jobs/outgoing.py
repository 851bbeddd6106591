"""`replay` and `send`: store messages in an outbox, each only once.

Spark tasks write rows to a staging table. Then one transaction moves the rows of
successful tasks into the outbox. Dead letters are not stored in this way: the app
redelivers them in a bulk operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyspark.sql.functions as sf
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from ...rules import dead_letters
from ..connection import connect_plain
from ..engine import attempt_key, gather_from
from ..errors import UsageError, VerificationRefused
from ..lock import storing
from ..runs import Run, requested_ids
from ..schemas import DEAD_LETTERS, OUTBOX, Table
from ..spec import JobSpec, SourceSpec, recordable
from ..staging import Brought, Staging, ask_to_redeliver
from ..transforms import whole_log, with_cancelled
from ..transforms.outgoing import from_dataset, parse_template, to_outbox_rows
from .findings import found_in, insist_on_a_finding, judged_by
from .outcome import Outcome, job_session, options_of
from .reading import WholeLog
from .verify import Verified, read_back


@dataclass(frozen=True)
class ReplayOptions:
    """The options of `replay`: which messages, in which form, and at which rate."""

    where: str = ""
    table: Literal["outbox", "dead_letters"] = "outbox"
    mode: Literal["same", "copy"] = "same"
    rate: float = 0
    limit: int = 0
    name: str = ""
    replayed: bool = False
    """Whether messages stored by a replay or a redelivery may be selected as well."""
    verdict: str = ""
    """Only messages for which a `reconcile` has found this, whether a replay stored
    them before or not."""
    found_by: str = ""
    """That run's id; empty: the last one that has stored its results."""
    request: uuid.UUID | None = None
    """Only the messages of this request of the admin, whether a replay stored them
    before or not."""
    dry_run: bool = False


def run_replay(
    spark: SparkSession, spec: JobSpec, options: ReplayOptions, run: Run
) -> Outcome:
    """Select messages, and store them again under the name of this replay. Returns a
    summary of the stored messages.

    The default name is a digest of the options. So repeating a replay with the same
    options stores nothing. A redelivery is named after its run: it chooses only open
    dead letters.
    """
    source = spec.service()
    table = DEAD_LETTERS if options.table == "dead_letters" else OUTBOX
    alone = dataclasses.replace(spec, services=(source,))
    with (
        closing(connect_plain(source)) as connection,
        storing(connection, source),
        WholeLog(spark, alone) as log,
    ):
        judged = judged_by(log, options.found_by) if options.verdict else ""
        described: list[Any] = [
            source.service, options.where, options.table, options.mode, options.limit,
            options.replayed,
        ]  # fmt: skip
        if judged:
            described += [options.verdict, judged]
        text = json.dumps(described, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        itself = run.id if table is DEAD_LETTERS else digest
        name = options.name or f"replay-{options.request or itself}"
        picked = [found_in(log, judged, options.verdict)] if judged else []
        wanted = requested_ids(source, options.request) if options.request else []
        if wanted:
            ids = [[one] for one in wanted]
            picked.append(spark.createDataFrame(ids, "message_id string"))
        chosen = choose(log, table, options, picked)
        if table is DEAD_LETTERS:
            return _redeliver(chosen, source, name, options, run)
        unproven = 0 if options.dry_run else _insist_on_proof(log, chosen)
        rows = to_outbox_rows(chosen, run=name, mode=options.mode)
        stored = _store(rows, source, name, options.rate, options.dry_run, run)
        if unproven:
            stored.lines.append(
                f"Archived batches that have no checksum to compare with: {unproven:,}."
            )
        left = len(wanted) - stored.facts["chosen"]
        if left > 0 and not options.dry_run:
            raise UsageError(
                f"{left:,} of {len(wanted):,} requested "
                "messages were not replayed: they have not been sent yet, were "
                "cancelled, or are neither in the database nor in the lake. The others "
                f"are stored as {name}. To replay the missing ones later, request them "
                "again."
            )
        return stored


def _insist_on_a_selection(options: ReplayOptions) -> None:
    """Raise UsageError if no messages are selected, or if the options contradict each
    other. Needs no Spark, which takes seconds to start."""
    if not (options.where or options.verdict or options.request):
        raise UsageError("Which messages? Give --where, --verdict or --request.")
    insist_on_a_finding(options.verdict)
    if options.table == "dead_letters" and options.mode == "copy":
        raise UsageError(
            "A dead letter is redelivered under its own id: --as copy is for the "
            "outbox. The admin can send an edited copy."
        )


def choose(
    log: WholeLog,
    table: Table,
    options: ReplayOptions,
    picked: Sequence[DataFrame] = (),
) -> DataFrame:
    """Select messages from the lake and from the database. An archive may run at the
    same time: the snapshot of the database is taken before the lake is read, so no
    message is missed. A message in both is selected only once. If `picked` has frames,
    a message is selected only if every frame contains its id.

    Only messages that have ended are selected from the outbox. Cancelled messages are
    left out, unless the filter names `cancelled`. By default, rows that an earlier
    replay stored are left out, because a replay of everything must not repeat its own
    messages. With a verdict, a request or `replayed`, such rows are selected, too, but
    only the newest row of each message.
    """
    struct = table.lake_struct()
    live = log.read_live(table, table.struct()).withColumns(
        {"day": sf.to_date(table.clock), "batch_id": sf.lit(None).cast("long")}
    )
    if table is DEAD_LETTERS:
        # Open ones are only in the database.
        letters = live.where(dead_letters.OPEN.sql())
        frames = [letters.withColumn("outcome", sf.lit("open"))]
    else:
        cancelled = sf.when(sf.col("cancelled_at").isNotNull(), "cancelled")
        ended = cancelled.when(sf.col("dispatched_at").isNotNull(), "dispatched").when(
            sf.col("dead_at").isNotNull(), "dead"
        )
        frames = [live.withColumn("outcome", ended)]
        if log.lake is not None:
            kept = log.lake.table(table.name, struct)
            services = [one.service for one in log.live]
            archived = with_cancelled(kept.read(log.spark, services=services))
            known = cancelled.otherwise(sf.col("outcome"))
            frames.append(archived.withColumn("outcome", known))
    try:
        frames = [
            frame.select(*struct.fieldNames()).where(options.where or "true")
            for frame in frames
        ]
        for frame in frames:
            frame.schema  # noqa: B018 - resolves the names
    except (ParseException, AnalysisException) as error:
        raise UsageError(
            f"The filter {recordable(options.where)!r} does not parse: "
            f"{_short(error)} Columns: {', '.join(struct.fieldNames())}."
        ) from error
    ready = _ready(options.where)
    again = options.replayed or options.verdict or options.request
    if table is OUTBOX and not again:
        frames = [frame.where(f"{ready} AND replay_id = ''") for frame in frames]
    chosen = whole_log(frames, struct)
    for ids in picked:
        chosen = chosen.join(sf.broadcast(ids), "message_id", "left_semi")
        chosen = chosen.select(*struct.fieldNames())
    if table is OUTBOX and again:
        chosen = _newest(chosen, ready)
    if options.limit:
        chosen = chosen.orderBy("created_at", "id").limit(options.limit)
    return chosen


def _newest(rows: DataFrame, ready: str) -> DataFrame:
    """Return one row for each message of which a row matches `ready`. It is the newest
    row: an operator may have corrected the body. It takes the oldest row's place in the
    order, so that a repeated replay selects the same messages."""
    place = sf.struct("created_at", "id")
    found = rows.groupBy("message_id").agg(
        sf.max_by(sf.struct(*rows.columns), place).alias("row"),
        sf.min(place).alias("first"),
        sf.bool_or(sf.expr(ready)).alias("ready"),
    )
    first = {name: sf.col(f"first.{name}") for name in ("created_at", "id")}
    return found.where("ready").select("row.*", "first").withColumns(first)


def _insist_on_proof(log: WholeLog, chosen: DataFrame) -> int:
    """Verify the batches that contain the chosen archived messages. Return the number
    of batches whose checksum the log does not have. Raises VerificationRefused if the
    lake does not match its log, for example if a batch has another checksum."""
    if log.lake is None:
        return 0
    rows = chosen.where("batch_id IS NOT NULL").select("batch_id").distinct().collect()
    batches = {row.batch_id for row in rows}
    delta, named = log.files_of(OUTBOX.name)
    if delta is None or not batches:
        return 0
    files = [
        one for one in named if any(one.reaches(each - 1, each) for each in batches)
    ]
    found = Verified()
    read_back(log.spark, log.lake.spec, OUTBOX, files, delta, found, batches)
    if found.problems:
        raise VerificationRefused(
            "Nothing was stored, since the lake is not as it was: "
            + " ".join(found.problems)
        )
    return found.unproven


def _ready(where: str) -> str:
    """Return a condition for outbox rows that have ended. Cancelled messages match only
    if the filter `where` refers to cancelled messages."""
    named = re.search(
        r"\bcancelled_at\b|\b(outcome|last_error)\b.*'cancelled", where, re.DOTALL
    )
    return "outcome IS NOT NULL" if named else "outcome <> 'cancelled'"


def _insist_on_one_row_each(rows: DataFrame, identity: str) -> None:
    doubled = rows.groupBy("message_id").count().where("count > 1").count()
    if doubled:
        raise UsageError(
            f"{doubled} values of {identity} occur in several rows each, which would "
            "become one message. Name columns that identify a row, or none."
        )


def _store(
    rows: DataFrame,
    source: SourceSpec,
    name: str,
    rate: float,
    dry_run: bool,
    run: Run,
) -> Outcome:
    _insist_on_a_name(name)
    if dry_run:
        return _shown(rows, name, run, "messages would be stored under")
    staging = Staging(source.resolved(), name)
    try:
        tasks = gather_from(rows, partial(_stage, staging))
        stored = staging.merge(tasks, rate=rate)
    except BaseException:
        with suppress(Exception):  # The first error is the one to report.
            staging.clear()
        raise
    chosen = sum(one.rows for one in tasks)
    known = chosen - stored
    facts = {"name": name, "chosen": chosen}
    run.rows = stored
    run.counts = facts | {"stored": stored, "known": known}
    lines = [f"{stored:,} of {chosen:,} messages stored as {name}."]
    if known:
        lines.append(
            f"{known:,} were stored by {name} before. Give another --name "
            "to store them once more."
        )
    return Outcome(lines, facts)


def _redeliver(
    chosen: DataFrame, source: SourceSpec, name: str, options: ReplayOptions, run: Run
) -> Outcome:
    """Request a bulk operation in which the app redelivers the chosen dead letters."""
    _insist_on_a_name(name)
    if options.dry_run:
        return _shown(chosen, name, run, "dead letters would be redelivered as")
    letters = [(row[0], row[1]) for row in chosen.select("id", "message_id").collect()]
    why = recordable(options.where) or options.verdict
    operation = ask_to_redeliver(
        source.resolved(), name, letters, rate=options.rate, why=why
    )
    run.rows = 0 if operation is None else len(letters)
    run.counts = {"name": name, "chosen": len(letters), "operation": operation}
    line = f"{len(letters):,} dead letter{'s' * (len(letters) != 1)}: "
    if not letters:
        line = "No open dead letter was selected."
    elif operation is None:
        line += (
            f"{name} has requested them before. Give another --name to request them "
            "again."
        )
    else:
        line += (
            f"bulk operation {operation} redelivers them, as {name}. The service's "
            "manage.py consume works it off."
        )
    return Outcome([line], dict(run.counts))


def _insist_on_a_name(name: str) -> None:
    if not 0 < len(name) <= 64:
        raise UsageError("The name of a replay has at most 64 characters.")


def _shown(rows: DataFrame, name: str, run: Run, would: str) -> Outcome:
    """Return a summary of the messages that would be stored or redelivered."""
    per_destination = rows.groupBy("destination").count().collect()
    counts = {row["destination"]: row["count"] for row in per_destination}
    # Only ids, no content: what TXMSG["MASK"] hides elsewhere must not be shown here.
    few = rows.limit(5).select(
        "message_id", "destination", sf.octet_length("body").alias("bytes")
    )
    sample = [row.asDict() for row in few.collect()]
    facts = {"name": name, "chosen": sum(counts.values())}
    run.counts = facts | {"dry_run": True}
    lines = [f"{facts['chosen']:,} {would} {name}."]
    lines += [f"  {name}: {n:,}" for name, n in sorted(counts.items())]
    lines += [f"  {one}" for one in sample]
    return Outcome(lines, facts | {"destinations": counts, "sample": sample})


def _stage(staging: Staging, batches: Iterator[pa.RecordBatch]) -> list[Brought]:
    """Write the rows of a task to the staging table. Executors run this function."""
    return [staging.stage(attempt_key(), map(_insist_on_bodies, batches))]


def _insist_on_bodies(batch: pa.RecordBatch) -> pa.RecordBatch:
    body = batch.column("body")
    if body.null_count:
        place = body.is_null().index(True).as_py()
        message = batch.column("message_id")[place]
        raise UsageError(
            f"The lake has no body of message {message} and others: it was archived "
            "with KEEP_BODIES off. Nothing was stored."
        )
    return batch


def _short(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(";")[0].rstrip(".") + "."


def insist_on_the_request(given: argparse.Namespace) -> None:
    """Raise UsageError for options that would change a requested replay."""
    options = options_of(ReplayOptions, given, found_by=given.run)
    allowed = ReplayOptions(
        request=options.request, rate=options.rate, dry_run=options.dry_run
    )
    if options.request and options != allowed:
        raise UsageError(
            "The request names the messages: with --request, give only --rate and "
            "--dry-run."
        )


def replay_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Run a replay, and return a summary of the stored messages. Raises
    PipelineError."""
    options = options_of(ReplayOptions, given, found_by=given.run)
    _insist_on_a_selection(options)
    with job_session(given) as spark:
        return run_replay(spark, spec, options, run)


def send_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Store one message for each row of a dataset, and return a summary of the stored
    messages. Raises PipelineError."""
    template = parse_template(_template(given.template))
    source = spec.service()
    kind = given.format or given.path.rstrip("/").rpartition(".")[2].lower()
    if kind not in ("parquet", "csv", "json", "jsonl"):
        raise UsageError(
            f"The format of {given.path} is not known: say --format parquet, csv or "
            "json."
        )
    with job_session(given) as spark:
        try:
            reader = spark.read.option("header", "true")  # of CSV
            dataset = reader.load(given.path, kind.removesuffix("l"))
        except AnalysisException as error:
            raise UsageError(f"{given.path} cannot be read: {_short(error)}") from error
        rows = from_dataset(
            dataset, run=given.name, destination=given.destination, template=template,
            key=given.key, headers=dict(given.header), identity=given.identity,
            broker=given.broker,
        )  # fmt: skip
        if given.identity:
            _insist_on_one_row_each(rows, given.identity)
        return _store(rows, source, given.name, given.rate, given.dry_run, run)


def _template(text: str) -> str:
    """Return the template that the option specifies: either as JSON, or as the name of
    a file that contains JSON."""
    if text.lstrip().startswith(("{", "[")):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The template {text!r} cannot be read: {error}") from error
