"""`erase`: removes messages for good, from the databases and from the lake, including
old files of the lake.

Until all messages are erased, the record of the run contains their ids. So a killed run
can be repeated with the same options.
"""

from __future__ import annotations

import argparse
import datetime as dt
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf
from pyspark.sql import Column, SparkSession
from pyspark.sql import types as t

from ... import wire
from ...rules import inbox
from ..connection import Connection, connect_plain
from ..engine import spread
from ..errors import UsageError
from ..lake import Lake, LakeTable, NoLake, touched
from ..lakefile import FILE, LakeFile, rows_of
from ..ledger import Ledger
from ..lock import erasure, keeping
from ..runs import Run, erasing
from ..schemas import TABLES, arrow_schema, struct_of
from ..source.snapshot import remove_left_copies
from ..spec import JobSpec, LakeSpec, SourceSpec
from ..storage import place_of
from .outcome import Outcome, job_session
from .settling import rewritten

#: Relations that belong to a table of the lake. The broker in the database stores a
#: message's id in its headers.
_RELATIONS = {
    "attempts": ("django_txmsg_attempt", "django_txmsg_queuemessage"),
    # A task's run contains the task's return value.
    "inbox": ("django_txmsg_inboxmessage", "django_txmsg_taskrun"),
    "verdicts": ("django_txmsg_finding",),
    "dead_letters": ("django_txmsg_deadletter",),
    "outbox": ("django_txmsg_stagedmessage", "django_txmsg_outboxmessage"),
    # A branch has an answer, and a run's other rows have to be gone before it.
    "flow_steps": ("django_txmsg_flowstep",),
    "flow_undos": ("django_txmsg_flowundo",),
    "flow_runs": ("django_txmsg_branch", "django_txmsg_batch", "django_txmsg_run"),
}
_QUEUE, _INBOX = "django_txmsg_queuemessage", "django_txmsg_inboxmessage"
_OUTBOX, _RUN = "django_txmsg_outboxmessage", "django_txmsg_run"
#: The responses to requests with an Idempotency-Key.
RESPONSES = "django_txmsg_idempotencykey"
#: Most messages of a statement: in SQLite all other writers wait for it.
_SLICE = 500


def messages_named(
    source: SourceSpec, keys: Sequence[str], correlation_ids: Sequence[str]
) -> set[str]:
    """Return the ids of a database's messages that have one of these keys or
    correlation ids. For a run of a flow with such a key or correlation id, the result
    contains the id of the message that started the run."""
    found: set[str] = set()
    with closing(connect_plain(source)) as connection:
        header = _header(connection, wire.KEY)
        for value in keys:
            found |= _queued(connection, wire.KEY, value)
            for relation, column in (
                ("django_txmsg_outboxmessage", '"key"'),
                ("django_txmsg_stagedmessage", '"key"'),
                ("django_txmsg_inboxmessage", header),
                ("django_txmsg_deadletter", header),
            ):
                found |= _ids(connection, relation, column, value)
            found |= _ids(connection, _RUN, '"key"', value, "run_id")
        for value in correlation_ids:
            found |= _queued(connection, wire.CORRELATION_ID, value)
            for relation in (
                "django_txmsg_outboxmessage", "django_txmsg_stagedmessage",
                "django_txmsg_inboxmessage", "django_txmsg_deadletter",
            ):  # fmt: skip
                found |= _ids(connection, relation, "correlation_id", value)
            found |= _ids(connection, _RUN, "correlation_id", value, "run_id")
    return found


def erase_rows(
    source: SourceSpec, name: str, ids: Sequence[str], *, dry_run: bool
) -> dict[str, int]:
    """Delete the rows of these messages from the database tables that correspond to the
    lake's table `name`. In a dry run, only count them. Returns the number of rows by
    database table."""
    counts: dict[str, int] = {}
    with closing(connect_plain(source)) as connection:
        for relation in _RELATIONS.get(name, ()):
            counts[relation] = 0
            for start in range(0, len(ids), _SLICE):
                where = _where(connection, relation, ids[start : start + _SLICE])
                if dry_run:
                    counts[relation] += connection.value(
                        f"SELECT count(*) FROM {relation} WHERE {where}"
                    )
                else:
                    counts[relation] += connection.execute(
                        f"DELETE FROM {relation} WHERE {where}"
                    )
                    if relation == _INBOX:
                        _let_go(connection, where)
    return counts


def erase_tails(source: SourceSpec, keys: Sequence[str], *, dry_run: bool) -> int:
    """Delete the relay's records of these keys, or count them in a dry run. After that,
    a later message with such a key has no predecessor."""
    verb = "SELECT count(*)" if dry_run else "DELETE"
    found = 0
    with closing(connect_plain(source)) as connection:
        ask = connection.value if dry_run else connection.execute
        for key in keys:
            found += ask(f'{verb} FROM django_txmsg_keytail WHERE "key" = %s', key)
    return found


def _let_go(connection: Connection, erased: str) -> None:
    """Release the messages of an ordered stage that wait for an erased message. If a
    worker has claimed such a message to park it again, the worker loses the claim."""
    postgresql = connection.vendor == "postgresql"
    headers = (
        f"headers - '{wire.AFTER}'"
        if postgresql
        else f"json_remove(headers, '$.\"{wire.AFTER}\"')"
    )
    connection.execute(
        f"UPDATE {_INBOX} SET due_at = {connection.now}, waits_for = NULL,"
        f" headers = {headers}, lease_until = NULL, lease_token = NULL"
        f" WHERE {erased.replace('message_id', 'waits_for')} AND {inbox.OPEN.sql()}"
    )


def sessions_of(source: SourceSpec, ids: Sequence[str]) -> set[str]:
    """Return the sessions (of HTTP requests) that stored these messages in a
    database."""
    found: set[str] = set()
    with closing(connect_plain(source)) as connection:
        for start in range(0, len(ids), _SLICE):
            where = _where(connection, _OUTBOX, ids[start : start + _SLICE])
            rows = connection.rows(
                f"SELECT DISTINCT session_id FROM {_OUTBOX} WHERE {where}"
                " AND session_id IS NOT NULL"
            )
            found |= {str(uuid.UUID(str(row[0]))) for row in rows}
    return found


def erase_responses(
    source: SourceSpec, sessions: Sequence[str], *, dry_run: bool
) -> int:
    """Empty the stored responses to the requests of these sessions. Returns their
    number. The idempotency keys stay, so no request is executed again."""
    count = 0
    with closing(connect_plain(source)) as connection:
        for start in range(0, len(sessions), _SLICE):
            part = [uuid.UUID(one) for one in sessions[start : start + _SLICE]]
            where = f"session_id IN ({', '.join(['%s'] * len(part))})"
            where += " AND (body IS NOT NULL OR headers <> '[]')"
            values = map(connection.given, part)
            if dry_run:
                count += connection.value(
                    f"SELECT count(*) FROM {RESPONSES} WHERE {where}", *values
                )
            else:
                count += connection.execute(
                    f"UPDATE {RESPONSES} SET body = NULL, headers = '[]' WHERE {where}",
                    *values,
                )
    return count


def _ids(
    connection: Connection,
    relation: str,
    column: str,
    value: str,
    of: str = "message_id",
) -> set[str]:
    rows = connection.rows(f"SELECT {of} FROM {relation} WHERE {column} = %s", value)
    return {str(uuid.UUID(str(row[0]))) for row in rows}


def _queued(connection: Connection, header: str, value: str) -> set[str]:
    """Return the ids of the messages with this header value in the queues of the
    embedded broker. Such a message may have no outbox row here: it may belong to
    another service, or its row may have been pruned."""
    rows = connection.rows(
        f"SELECT {_header(connection, wire.MESSAGE_ID)} FROM {_QUEUE}"
        f" WHERE {_header(connection, header)} = %s",
        value,
    )
    return {known for (text,) in rows if (known := _id_of(text))}


def _id_of(text: str | None) -> str:
    try:
        return str(uuid.UUID(text or ""))
    except ValueError:
        return ""  # of a sender that is none of ours


def _where(connection: Connection, relation: str, ids: Sequence[str]) -> str:
    # Literals of parsed ids, never of a user's text.
    texts = [str(uuid.UUID(one)) for one in ids]
    if relation == _QUEUE:
        listed = ", ".join(f"'{one}'" for one in texts)
        return f"{_header(connection, wire.MESSAGE_ID)} IN ({listed})"
    if connection.vendor == "sqlite":
        texts = [one.replace("-", "") for one in texts]
    listed = ", ".join(f"'{one}'" for one in texts)
    if relation in _OF_A_RUN:
        # An open run is needed until it ends.
        ended = f"SELECT id FROM {_RUN} WHERE ended_at IS NOT NULL"
        own = f"{ended} AND run_id IN ({listed})"
        return _OF_A_RUN[relation].format(own=own, ended=ended, listed=listed)
    return f"message_id IN ({listed})"


def _header(connection: Connection, name: str) -> str:
    if connection.vendor == "sqlite":
        return f"json_extract(headers, '$.\"{name}\"')"
    return f"headers ->> '{name}'"


#: The condition for the rows that belong to runs.
_OF_A_RUN = {
    "django_txmsg_flowstep": "run_id IN ({own})"
    " OR message_id IN ({listed}) AND run_id IN ({ended})",
    "django_txmsg_flowundo": "run_id IN ({own})"
    " OR request_id IN ({listed}) AND run_id IN ({ended})",
    "django_txmsg_batch": "run_id IN ({own})",
    "django_txmsg_branch": "batch_id IN (SELECT id FROM django_txmsg_batch WHERE"
    " run_id IN ({own}))",
    _RUN: "id IN ({own})",
}

#: The columns by which a row of the lake belongs to a message.
_ID = ["message_id"]
_IDS = {
    "flow_steps": ["message_id", "run_id"],
    "flow_undos": ["message_id", "request_id"],
}
_ANY_TIME = dt.datetime.max.replace(tzinfo=dt.timezone.utc)
#: The lake's tables with messages.
ORDER = (
    "attempts", "inbox", "verdicts", "journeys", "flow_steps", "flow_undos",
    "flow_runs", "dead_letters", "outbox",
)  # fmt: skip
#: A new file, and the path of the file that it replaces.
_REWRITTEN = struct_of("old string not null", FILE)


@dataclass(frozen=True)
class EraseOptions:
    """The values that identify the messages to erase. Raises UsageError if no value is
    given. An empty value is refused, too, because it would match all messages without a
    key."""

    message_ids: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    correlation_ids: tuple[str, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse options without values, before Spark starts."""
        names = (*self.message_ids, *self.keys, *self.correlation_ids)
        if not names:
            raise UsageError(
                "Which messages? Give --message-id, --key or --correlation-id."
            )
        if not all(names):
            raise UsageError(
                "An empty --key or --correlation-id selects no message. Is a "
                "variable of your shell unset?"
            )


@dataclass
class Erased:
    """The number of erased messages, and the number of deleted rows by table. In a dry
    run, nothing is erased, and these are the numbers that a real run would erase."""

    messages: int
    database: dict[str, int]
    lake: dict[str, int]
    files: int = 0


def run_erase(
    spark: SparkSession, spec: JobSpec, options: EraseOptions, run: Run
) -> Erased:
    """Erase messages from the databases of all specified services, and from their parts
    of the lake. Raises EnvironmentFault while an archive, a `reconcile` or a replay
    is running."""
    remove_left_copies()
    lake = None
    if spec.lake is not None:
        with suppress(NoLake):
            lake = Lake(spec.lake)
    with ExitStack() as stack:
        for source in spec.services:
            for table in TABLES.values():
                ledger = stack.enter_context(closing(Ledger(source, table)))
                # No archive may add messages after they were looked up.
                stack.enter_context(ledger.lock())
            connection = stack.enter_context(closing(connect_plain(source)))
            stack.enter_context(keeping(connection, source))
            # No replay may store a message again that it has read before.
            stack.enter_context(erasure(connection, source))
        chosen = _chosen(spark, spec.services, lake, options)
        ids = sorted(stack.enter_context(erasing(spec.services, run, chosen)))
        done = Erased(len(ids), {}, {})
        sessions = _sessions(spark, spec.services, lake, ids)
        done.database[RESPONSES] = sum(
            erase_responses(source, sessions, dry_run=options.dry_run)
            for source in spec.services
        )
        for name in ORDER:
            for source in spec.services:
                if lake is not None:
                    _from_lake(spark, lake, name, source, ids, options, done)
                rows = erase_rows(source, name, ids, dry_run=options.dry_run)
                for table_name, count in rows.items():
                    found = done.database.get(table_name, 0)
                    done.database[table_name] = found + count
    done.database["django_txmsg_keytail"] = sum(
        erase_tails(source, options.keys, dry_run=options.dry_run)
        for source in spec.services
    )
    run.rows = sum(done.database.values()) + sum(done.lake.values())
    run.counts = dict(done.__dict__)
    return done


def _chosen(
    spark: SparkSession,
    services: Sequence[SourceSpec],
    lake: Lake | None,
    options: EraseOptions,
) -> set[str]:
    """Return the ids of all selected messages, in the databases and in the lake."""
    ids = {one.lower() for one in options.message_ids}
    if not (options.keys or options.correlation_ids):
        return ids
    for source in services:
        ids |= messages_named(source, options.keys, options.correlation_ids)
    if lake is None:
        return ids
    correlated = sf.col("correlation_id").isin(*options.correlation_ids)
    header = sf.get_json_object("headers", f"$['{wire.KEY}']")
    named: dict[str, Column] = {
        "outbox": correlated | sf.col("key").isin(*options.keys),
        "inbox": correlated,
        "dead_letters": correlated | header.isin(*options.keys),
        "flow_runs": correlated | sf.col("key").isin(*options.keys),
    }
    own = [one.service for one in services]
    for name, condition in named.items():
        place = lake.table(name, TABLES[name].lake_struct())
        rows = place.read(spark, services=own).where(condition)
        found = rows.select("message_id").distinct().collect()
        ids |= {row["message_id"] for row in found}
    return ids


def _sessions(
    spark: SparkSession,
    services: Sequence[SourceSpec],
    lake: Lake | None,
    ids: Sequence[str],
) -> list[str]:
    """Return the sessions that stored the messages. The responses to the requests of
    these sessions may contain personal data."""
    found: set[str] = set()
    for source in services:
        found |= sessions_of(source, ids)
    if lake is not None and ids:
        place = lake.table("outbox", TABLES["outbox"].lake_struct())
        own = [one.service for one in services]
        named = spark.createDataFrame([(one,) for one in ids], "message_id string")
        rows = place.read(spark, services=own).where("session_id IS NOT NULL")
        rows = rows.join(sf.broadcast(named), "message_id", "left_semi")
        found |= {row[0] for row in rows.select("session_id").distinct().collect()}
    return sorted(found)


def _from_lake(
    spark: SparkSession,
    lake: Lake,
    name: str,
    source: SourceSpec,
    ids: Sequence[str],
    options: EraseOptions,
    done: Erased,
) -> None:
    """Rewrite the files that contain rows of these messages.

    Also delete all files that the log does not name, because replaced files and files
    of killed runs may contain such rows. This happens twice: before the rewriting, to
    make room on a full disk, and after it, to delete the replaced files.
    """
    place = lake.table(name, t.StructType([]))
    if not options.dry_run:
        _remove_unnamed(place, source.service)
    delta = place.load()
    if delta is None:
        return
    named = place.named(delta, source.service)
    fresh = _rewritten(spark, lake.spec, place, named, ids, options.dry_run)
    old = list(fresh)
    erased = sum(one.rows for one in old) - sum(one.rows for one in fresh.values())
    done.lake[name] = done.lake.get(name, 0) + erased
    done.files += len(old)
    if old and not options.dry_run:
        place.commit(
            delta,
            [one for one in fresh.values() if one.rows],
            replaced=old,
            metadata={"erased": erased, "touched": touched(old)},
        )
        _remove_unnamed(place, source.service)


def _remove_unnamed(place: LakeTable, service: str) -> None:
    place.vacuum(0, dry_run=False)
    for path in place.orphans(service, _ANY_TIME):
        place.files.delete_file(path)


def _rewritten(
    spark: SparkSession,
    lake: LakeSpec,
    place: LakeTable,
    named: Sequence[LakeFile],
    ids: Sequence[str],
    dry_run: bool,
) -> dict[LakeFile, LakeFile]:
    """Return the files with rows of these messages, each with the file that replaces
    it."""
    if not named or not ids:
        return {}
    token = str(uuid.uuid4())
    task = EraseTask(lake, place.name, ids, dry_run, token)
    with place.discarding(named[0].service, [token]):
        found = spread(spark, task, named, _REWRITTEN).collect()
    by_path = {one.path: one for one in named}
    pairs = [(by_path[row.old], row) for row in found]
    return {old: LakeFile.reported(row, old.service, old.batches) for old, row in pairs}


@dataclass
class EraseTask:
    """The function that executors run. It rewrites the files that contain messages to
    erase."""

    lake: LakeSpec
    name: str
    ids: Sequence[str]
    dry_run: bool
    token: str
    """The beginning of the new files' names."""

    def __call__(self, files: Iterator[LakeFile]) -> Iterator[pa.RecordBatch]:
        """Search files for the messages, and rewrite the files that contain any. Yield
        the new files."""
        place = LakeTable(place_of(self.lake), self.name, t.StructType([]))
        names = _IDS.get(self.name, _ID)
        for file in files:
            rows = 0
            for batch in rows_of(place.files, f"{place.root}/{file.path}", names):
                rows += pc.sum(self._erased(batch)).as_py() or 0
            if not rows:
                continue
            fresh = LakeFile("", file.service, file.day, 0, file.rows - rows)
            if not self.dry_run:
                # Another attempt of this task may have written the same rows.
                name = f"{self.token}-{uuid.uuid4()}"
                fresh = next(iter(rewritten(place, [file], name, self._kept)), fresh)
            yield pa.RecordBatch.from_pylist(
                [fresh.report() | {"old": file.path}], schema=arrow_schema(_REWRITTEN)
            )

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.filter(pc.invert(self._erased(batch)))

    def _erased(self, batch: pa.RecordBatch) -> Any:
        """Return a mask of the batch: true for each row of a message to erase."""
        wanted = pa.array(self.ids, pa.string())
        names = _IDS.get(self.name, _ID)
        columns = [batch.column(one) for one in names]
        return reduce(pc.or_, [pc.is_in(one, wanted) for one in columns])


def erase_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Erase messages, and return a summary with the numbers of rows. Raises
    PipelineError."""
    options = EraseOptions(
        message_ids=tuple(map(str, given.message_id)),
        keys=tuple(given.key),
        correlation_ids=tuple(given.correlation_id),
        dry_run=given.dry_run,
    )
    with job_session(given) as spark:
        done = run_erase(spark, spec, options, run)
    would = "would be " if given.dry_run else ""
    lines = [f"{done.messages:,} messages are selected."]
    for where, counts in (("database", done.database), ("lake", done.lake)):
        lines += [
            f"  {where}: {count:,} rows of {name} {would}erased."
            for name, count in counts.items()
            if count
        ]
    return Outcome(lines, dict(done.__dict__))
