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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.sql.functions as sf
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame

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
from .reading import WholeLog
from .running import job_session
from .verify import Verified, read_back


def replay_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Select messages, and store them again under the name of this replay. Report the
    stored messages.

    The default name is a digest of the options. So repeating a replay with the same
    options stores nothing. A redelivery is named after its run: it chooses only open
    dead letters.

    Raises PipelineError. Without any selection, or if the options contradict each
    other, Spark, which takes seconds to start, does not start.
    """
    if not (given.where or given.verdict or given.request):
        raise UsageError("Which messages? Give --where, --verdict or --request.")
    insist_on_a_finding(given.verdict)
    if given.table == "dead_letters" and given.mode == "copy":
        raise UsageError(
            "A dead letter is redelivered under its own id: --as copy is for the "
            "outbox. The admin can send an edited copy."
        )
    source = spec.service()
    table = DEAD_LETTERS if given.table == "dead_letters" else OUTBOX
    alone = dataclasses.replace(spec, services=(source,))
    with (
        job_session(given) as spark,
        connect_plain(source) as connection,
        storing(connection, source),
        WholeLog(spark, alone) as log,
    ):
        judged = judged_by(log, given.run) if given.verdict else ""
        described: list[Any] = [
            source.service, given.where, given.table, given.mode, given.limit,
            given.replayed,
        ]  # fmt: skip
        if judged:
            described += [given.verdict, judged]
        text = json.dumps(described, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        itself = run.id if table is DEAD_LETTERS else digest
        name = given.name or f"replay-{given.request or itself}"
        picked = [found_in(log, judged, given.verdict)] if judged else []
        wanted = requested_ids(source, given.request) if given.request else []
        if wanted:
            ids = [[one] for one in wanted]
            picked.append(spark.createDataFrame(ids, "message_id string"))
        chosen = choose(log, table, given, picked)
        if table is DEAD_LETTERS:
            _redeliver(chosen, source, name, given, run)
            return
        if given.mode == "copy":
            _insist_on_no_tasks(chosen, spec.task_brokers)
        unproven = 0 if given.dry_run else _insist_on_proof(log, chosen)
        rows = to_outbox_rows(chosen, run=name, mode=given.mode)
        _store(rows, source, name, given, run, new=given.mode == "copy")
        if unproven:
            run.lines.append(
                f"Archived batches that have no checksum to compare with: {unproven:,}."
            )
        if given.verdict == "dead" and given.mode == "same":
            run.lines.append(
                "A stage where a message is dead drops the replayed message: redeliver "
                "its dead letter in that stage's service (--from dead_letters)."
            )
        left = len(wanted) - run.facts["chosen"]
        if left > 0 and not given.dry_run:
            raise UsageError(
                f"{left:,} of {len(wanted):,} requested "
                "messages were not replayed: they have not been sent yet, were "
                "cancelled, or are neither in the database nor in the lake. The others "
                f"are stored as {name}. To replay the missing ones later, request them "
                "again."
            )


def choose(
    log: WholeLog, table: Table, given: argparse.Namespace, picked: Sequence[DataFrame]
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
    columns, where = struct.fieldNames(), given.where or "true"
    try:
        frames = [frame.select(*columns).where(where) for frame in frames]
        for frame in frames:
            frame.schema  # noqa: B018 - resolves the names
    except (ParseException, AnalysisException) as error:
        raise UsageError(
            f"The filter {recordable(given.where)!r} does not parse: "
            f"{_short(error)} Columns: {', '.join(columns)}."
        ) from error
    ready = _ready(given.where)
    again = given.replayed or given.verdict or given.request
    if table is OUTBOX and not again:
        frames = [frame.where(f"{ready} AND replay_id = ''") for frame in frames]
    chosen = whole_log(frames, struct)
    for ids in picked:
        chosen = chosen.join(sf.broadcast(ids), "message_id", "left_semi")
        chosen = chosen.select(*columns)
    if table is OUTBOX and again:
        chosen = _newest(chosen, ready)
    if given.limit:
        chosen = chosen.orderBy("created_at", "id").limit(given.limit)
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


def _insist_on_no_tasks(
    chosen: DataFrame, task_brokers: Sequence[tuple[str, str]]
) -> None:
    """Raise UsageError if tasks of Celery are chosen. Another message id would not make
    a task another one: Celery and OnceTask know it by the id in its publication."""
    for service, broker in task_brokers:
        here = (sf.col("service") == service) & (sf.col("broker") == broker)
        if not chosen.where(here).isEmpty():
            raise UsageError(
                "Celery tasks are chosen, and a copy of a task keeps the task's id: "
                "a OnceTask that has run would not run again. Call the tasks again, or "
                f"leave them out: --where \"… AND broker <> '{broker}'\"."
            )


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
    read_back(log.spark, log.lake.spec, OUTBOX.name, files, delta, found, batches)
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


def _store(
    rows: DataFrame,
    source: SourceSpec,
    name: str,
    given: argparse.Namespace,
    run: Run,
    *,
    new: bool,
) -> None:
    """Store the rows as messages in the outbox. `new` says that their ids are new."""
    if given.dry_run:
        _show(rows, name, run, "messages would be stored under")
        return
    staging = Staging(source.resolved(), name, new=new)
    try:
        tasks = [Brought(**one) for one in gather_from(rows, partial(_stage, staging))]
        stored = staging.merge(tasks, rate=given.rate)
    except BaseException:
        with suppress(Exception):  # The first error is the one to report.
            staging.clear()
        raise
    chosen = sum(one.rows for one in tasks)
    known = chosen - stored
    run.rows = stored
    run.facts = {"name": name, "chosen": chosen}
    run.counts = run.facts | {"stored": stored, "known": known}
    run.lines.append(f"{stored:,} of {chosen:,} messages stored as {name}.")
    if known:
        run.lines.append(
            f"{known:,} were stored by {name} before. Give another --name "
            "to store them once more."
        )


def _redeliver(
    rows: DataFrame, source: SourceSpec, name: str, given: argparse.Namespace, run: Run
) -> None:
    """Request a bulk operation in which the app redelivers these dead letters."""
    if given.dry_run:
        _show(rows, name, run, "dead letters would be redelivered as")
        return
    letters = [(row[0], row[1]) for row in rows.select("id", "message_id").collect()]
    source, why = source.resolved(), recordable(given.where) or given.verdict
    operation = ask_to_redeliver(source, name, letters, rate=given.rate, why=why)
    run.rows = 0 if operation is None else len(letters)
    run.counts = {"name": name, "chosen": len(letters), "operation": operation}
    run.facts = dict(run.counts)
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
    run.lines.append(line)


def _show(rows: DataFrame, name: str, run: Run, would: str) -> None:
    """List the messages that would be stored or redelivered."""
    counts: dict[str, int] = dict(rows.groupBy("destination").count().collect())
    # Only ids, no content: what TXMSG["MASK"] hides elsewhere must not be shown here.
    few = rows.limit(5).select(
        "message_id", "destination", sf.octet_length("body").alias("bytes")
    )
    sample = [row.asDict() for row in few.collect()]
    chosen = sum(counts.values())
    run.counts = {"name": name, "chosen": chosen, "dry_run": True}
    run.facts = run.counts | {"destinations": counts, "sample": sample}
    run.lines.append(f"{chosen:,} {would} {name}.")
    run.lines += [f"  {name}: {n:,}" for name, n in sorted(counts.items())]
    run.lines += [f"  {one}" for one in sample]


def _stage(staging: Staging, batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Write the rows of a task to the staging table. Executors run this function."""
    staged = staging.stage(attempt_key(), map(_insist_on_bodies, batches))
    return [dataclasses.asdict(staged)]


def _insist_on_bodies(batch: pa.RecordBatch) -> pa.RecordBatch:
    if (body := batch.column("body")).null_count:
        message = batch.column("message_id")[body.is_null().index(True).as_py()]
        raise UsageError(
            f"The lake has no body of message {message} and others: it was archived "
            "with KEEP_BODIES off. Nothing was stored."
        )
    return batch


def _short(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(";")[0].rstrip(".") + "."


def send_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Store one message for each row of a dataset. Raises PipelineError."""
    template, source = parse_template(_template(given.template)), spec.service()
    kind = given.format or given.path.rstrip("/").rpartition(".")[2].lower()
    if kind not in ("parquet", "csv", "json", "jsonl"):
        raise UsageError(
            f"The format of {given.path} is not known: say --format parquet, csv or "
            "json."
        )
    with job_session(given) as spark:
        try:
            # CSV as in RFC 4180: a quoted value may have quotes and several lines.
            reader = spark.read.options(
                header=True, escape='"', multiLine=kind == "csv", mode="FAILFAST",
                enforceSchema=False, unescapedQuoteHandling="RAISE_ERROR",
            )  # fmt: skip
            dataset = reader.load(given.path, kind.removesuffix("l"))
            if kind == "csv":
                # Without its end, a quoted value would be the rest of the file.
                quotes = sf.sum(sf.regexp_count("value", sf.lit('"')))
                files = spark.read.text(given.path).groupBy(sf.input_file_name())
                if files.agg(quotes.alias("n")).where("n % 2 = 1").count():
                    raise UsageError(f"A quoted value in {given.path} has no end.")
        except AnalysisException as error:
            raise UsageError(f"{given.path} cannot be read: {_short(error)}") from error
        rows = from_dataset(
            dataset, run=given.name, destination=given.destination, template=template,
            key=given.key, headers=dict(given.header), identity=given.identity,
            broker=given.broker,
        )  # fmt: skip
        ids = rows.groupBy("message_id").count()
        if given.identity and (doubled := ids.where("count > 1").count()):
            raise UsageError(
                f"{doubled} values of {given.identity} occur in several rows each, "
                "which would become one message. Name columns that identify a row, or "
                "none."
            )
        _store(rows, source, given.name, given, run, new=True)


def _template(text: str) -> str:
    """Return the template that the option specifies: either as JSON, or as the name of
    a file that contains JSON."""
    if text.lstrip().startswith(("{", "[")):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The template {text!r} cannot be read: {error}") from error
