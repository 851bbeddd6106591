"""`erase`: removes messages for good, from the databases and from the lake, including
old files of the lake.

Until all messages are erased, the record of the run contains their ids. So a killed run
can be repeated with the same options.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, reduce
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.functions as sf
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from ... import wire
from ...rules import NOT_LEASED, dead_letters, inbox, outbox
from ..batchlog import BatchLog
from ..connection import Connection, connect_plain
from ..engine import gather
from ..errors import UsageError
from ..lake import Lake, LakeTable, NoLake, touched
from ..lakefile import LakeFile, rows_of
from ..lock import archiving, erasure, keeping
from ..runs import Run, erasing
from ..schemas import TABLES, Table
from ..source.snapshot import remove_left_copies
from ..spec import JobSpec, LakeSpec
from ..storage import place_of
from .running import job_session
from .settling import rewritten

#: The lake's tables with messages, in the order in which they are erased, and the
#: relations that belong to each. The broker in the database stores a message's id in
#: its headers.
RELATIONS: dict[str, tuple[str, ...]] = {
    "attempts": ("django_txmsg_attempt", "django_txmsg_queuemessage"),
    # A task's run contains the task's return value.
    "inbox": ("django_txmsg_inboxmessage", "django_txmsg_taskrun"),
    "verdicts": ("django_txmsg_finding",),
    "journeys": (),
    # A branch has an answer, and a run's other rows have to be gone before it.
    "flow_steps": ("django_txmsg_flowstep",),
    "flow_undos": ("django_txmsg_flowundo",),
    "flow_runs": ("django_txmsg_branch", "django_txmsg_batch", "django_txmsg_run"),
    "dead_letters": ("django_txmsg_deadletter",),
    "outbox": ("django_txmsg_stagedmessage", "django_txmsg_outboxmessage"),
}
_QUEUE, _INBOX = "django_txmsg_queuemessage", "django_txmsg_inboxmessage"
_OUTBOX, _RUN = "django_txmsg_outboxmessage", "django_txmsg_run"
_LETTER = "django_txmsg_deadletter"
#: The responses to requests with an Idempotency-Key.
RESPONSES = "django_txmsg_idempotencykey"
_TAILS = "django_txmsg_keytail"
#: Most messages of a statement: in SQLite all other writers wait for it.
_SLICE = 500


def messages_named(
    connection: Connection,
    keys: Sequence[str],
    correlation_ids: Sequence[str],
    *,
    only_queued: bool = False,
) -> set[str]:
    """Return the ids of a database's messages that have one of these keys or
    correlation ids. For a run of a flow with such a key or correlation id, the result
    contains the id of the message that started the run. With `only_queued`, only the
    queues of the embedded broker are searched.

    A message in the queues of the embedded broker may have no outbox row here: it may
    belong to another service, or its row may have been pruned.
    """
    named = [(one, '"key"', wire.KEY) for one in keys]
    named += [(one, "correlation_id", wire.CORRELATION_ID) for one in correlation_ids]
    found: set[str] = set()
    for value, column, name in named:
        header = _header(connection, name)
        received = header if name == wire.KEY else column
        for relation, of, where in (
            (_OUTBOX, "message_id", column),
            ("django_txmsg_stagedmessage", "message_id", column),
            (_INBOX, "message_id", received),
            ("django_txmsg_deadletter", "message_id", received),
            (_RUN, "run_id", column),
            (_QUEUE, _header(connection, wire.MESSAGE_ID), header),
        ):
            if only_queued and relation != _QUEUE:
                continue
            for (text,) in connection.rows(
                f"SELECT {of} FROM {relation} WHERE {where} = %s", value
            ):
                with suppress(ValueError):  # of a sender that is none of ours
                    found.add(str(uuid.UUID(str(text))))
    return found


def erase_rows(
    connection: Connection, relations: Iterable[str], ids: Sequence[str], *,
    dry_run: bool, conditions: Mapping[str, str] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Delete the rows of these messages from the given database tables, or those that
    match other `conditions`. In a dry run, only count them. Returns the number of rows
    by database table.

    For `RESPONSES`, `ids` are sessions: the stored responses to their requests are
    emptied. The idempotency keys stay, so no request is executed again."""
    counts: dict[str, int] = {}
    for relation in relations:
        counts[relation] = 0
        for part in _slices(ids):
            where = _where(connection, relation, part, conditions or _CONDITIONS)
            counts[relation] += _changed(connection, dry_run, relation, where)
            if relation == _INBOX and not dry_run:
                _let_go(connection, _where(connection, "", part, {}))
    return counts


def withdraw(connection: Connection, ids: Sequence[str]) -> Counter[str]:
    """Delete the messages that have not left the outbox. If a relay has claimed one, it
    may be sending it: wait for the relay. Returns the number of deleted rows."""
    deleted, erase = Counter[str](), partial(erase_rows, connection, [_OUTBOX], ids)
    for tries in count():
        deleted.update(erase(dry_run=False, conditions=_UNCLAIMED))
        if not any(erase(dry_run=True, conditions=_PENDING).values()):
            break
        if not tries:
            sys.stderr.write("Waiting for a relay that has claimed messages.\n")
        # Nothing tells when a relay has settled a row: ask again.
        time.sleep(0.2)
    return deleted


def erase_tails(connection: Connection, keys: Sequence[str], *, dry_run: bool) -> int:
    """Delete the relay's records of these keys, or count them in a dry run. After that,
    a later message with such a key has no predecessor."""
    return sum(_changed(connection, dry_run, _TAILS, '"key" = %s', key) for key in keys)


def _changed(
    connection: Connection, dry_run: bool, relation: str, where: str, *values: Any
) -> int:
    """Delete the rows that match a condition, or empty them if they are responses. In a
    dry run, only count them. Returns their number."""
    if dry_run:
        sql = f"SELECT count(*) FROM {relation} WHERE {where}"
        return int(connection.value(sql, *values))
    change = f"DELETE FROM {relation}"
    if relation == RESPONSES:
        change = f"UPDATE {relation} SET body = NULL, headers = '[]'"
    return connection.execute(f"{change} WHERE {where}", *values)


def _slices(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + _SLICE] for start in range(0, len(ids), _SLICE)]


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


def sessions_of(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Return the sessions (of HTTP requests) that stored these messages in a
    database."""
    found: set[str] = set()
    for part in _slices(ids):
        rows = connection.rows(
            f"SELECT DISTINCT session_id FROM {_OUTBOX} WHERE"
            f" {_where(connection, '', part, {})} AND session_id IS NOT NULL"
        )
        found |= {str(uuid.UUID(str(row[0]))) for row in rows}
    return found


def _where(
    connection: Connection, relation: str, ids: Sequence[str],
    conditions: Mapping[str, str],
) -> str:  # fmt: skip
    # Literals of parsed ids, never of a user's text.
    texts = [str(uuid.UUID(one)) for one in ids]
    if connection.vendor == "sqlite" and relation != _QUEUE:
        texts = [one.replace("-", "") for one in texts]
    listed = ", ".join(f"'{one}'" for one in texts)
    return conditions.get(relation, _BY_ID).format(
        ids=listed, header=_header(connection, wire.MESSAGE_ID), ended=_ENDED,
        now=connection.now, own=f"{_ENDED} AND run_id IN ({listed})",
    )  # fmt: skip


def _header(connection: Connection, name: str) -> str:
    if connection.vendor == "sqlite":
        return f"json_extract(headers, '$.\"{name}\"')"
    return f"headers ->> '{name}'"


#: The ended runs of flows: an open run is needed until it ends.
_ENDED = f"SELECT id FROM {_RUN} WHERE ended_at IS NOT NULL"
_BY_ID = "message_id IN ({ids})"
_PENDING = {_OUTBOX: f"{_BY_ID} AND {outbox.PENDING.sql()}"}
_UNCLAIMED = {_OUTBOX: f"{_PENDING[_OUTBOX]} AND {NOT_LEASED.sql(now='{now}')}"}
#: Of the tables with rows that an open run may need: the condition for all rows.
_NEEDED = {_INBOX: _BY_ID, _LETTER: _BY_ID, _OUTBOX: _BY_ID, _RUN: "run_id IN ({ids})"}
#: The condition for the rows to erase of messages, by default their message id.
_CONDITIONS = {
    _QUEUE: "{header} IN ({ids})",
    # An open run cannot undo a request if the record of its work is gone.
    _INBOX: _BY_ID + " AND " + (~inbox.MAY_BE_UNDONE).sql(),
    _LETTER: _BY_ID + " AND " + (~dead_letters.MAY_BE_UNDONE).sql(),
    _OUTBOX: _BY_ID + " AND " + (~outbox.UNDO_WAITS).sql(cutoff="{now}"),
    RESPONSES: "session_id IN ({ids}) AND (body IS NOT NULL OR headers <> '[]')",
    "django_txmsg_flowstep": "run_id IN ({own})"
    " OR message_id IN ({ids}) AND run_id IN ({ended})",
    "django_txmsg_flowundo": "run_id IN ({own})"
    " OR request_id IN ({ids}) AND run_id IN ({ended})",
    "django_txmsg_batch": "run_id IN ({own})",
    "django_txmsg_branch": "batch_id IN (SELECT id FROM django_txmsg_batch WHERE"
    " run_id IN ({own}))",
    _RUN: "id IN ({own})",
}

#: The columns by which a row of the lake belongs to a message: by default, its id.
_IDS = {
    "flow_steps": ["message_id", "run_id"],
    "flow_undos": ["message_id", "request_id"],
}
_ANY_TIME = dt.datetime.max.replace(tzinfo=dt.timezone.utc)


def _fence(lake: Lake, service: str, table: Table) -> None:
    """Prevent an archiver that has lost its lock from adding batches to the lake."""
    log = BatchLog(lake, service, table)
    if log.identity:
        log.enter(log.last + 1)


def _named_in(
    lake: Lake, spark: SparkSession, services: Sequence[str], given: argparse.Namespace
) -> set[str]:
    """Return the ids of the messages in the lake that have one of the given keys or
    correlation ids."""
    correlated = sf.col("correlation_id").isin(*given.correlation_id)
    keyed = sf.col("key").isin(*given.key)
    header = sf.get_json_object("headers", f"$['{wire.KEY}']")
    ids: set[str] = set()
    for name, condition in {
        "outbox": correlated | keyed,
        "inbox": correlated,
        "dead_letters": correlated | header.isin(*given.key),
        "flow_runs": correlated | keyed,
    }.items():
        place = lake.table(name, TABLES[name].lake_struct())
        rows = place.read(spark, services=services).where(condition)
        ids |= {row[0] for row in rows.select("message_id").distinct().collect()}
    return ids


def _sessions_in(
    lake: Lake, spark: SparkSession, services: Sequence[str], ids: Sequence[str]
) -> set[str]:
    """Return the sessions that stored these messages, from the lake. The responses to
    the requests of these sessions may contain personal data."""
    place = lake.table("outbox", TABLES["outbox"].lake_struct())
    named = spark.createDataFrame([(one,) for one in ids], "message_id string")
    rows = place.read(spark, services=services).where("session_id IS NOT NULL")
    rows = rows.join(sf.broadcast(named), "message_id", "left_semi")
    return {row[0] for row in rows.select("session_id").distinct().collect()}


def _from_lake(
    spark: SparkSession, lake: Lake, name: str, service: str, ids: Sequence[str],
    dry_run: bool,
) -> int:  # fmt: skip
    """Rewrite the files that contain rows of these messages. Return the number of
    erased rows.

    Also delete all files that the log does not name, because replaced files and files
    of killed runs may contain such rows. This happens twice: before the rewriting, to
    make room on a full disk, and after it, to delete the replaced files.
    """
    place = lake.table(name, t.StructType([]))
    delta = place.load()
    if delta is None:
        return 0
    if not dry_run:
        _remove_unnamed(place, service)
    named = place.named(delta, service)
    fresh: dict[LakeFile, LakeFile] = {}
    if named and ids:
        token = str(uuid.uuid4())
        task = partial(_rewrite, lake.spec, name, ids, dry_run, token)
        with place.discarding(service, [token]):
            by_path = {one.path: one for one in named}
            for path, facts in gather(spark, task, named):
                fresh[by_path[path]] = LakeFile.of(facts)
    erased = sum(old.rows - new.rows for old, new in fresh.items())
    if fresh and not dry_run:
        place.commit(
            delta,
            [one for one in fresh.values() if one.rows],
            replaced=fresh,
            metadata={
                "erased": erased, "service": service, "touched": touched(fresh),
            },
        )  # fmt: skip
        _remove_unnamed(place, service)
    return erased


def _remove_unnamed(place: LakeTable, service: str) -> None:
    place.vacuum(0, dry_run=False)
    for path in place.orphans(service, _ANY_TIME):
        place.files.delete_file(path)


def _rewrite(
    lake: LakeSpec, name: str, ids: Sequence[str], dry_run: bool, token: str,
    files: Iterator[LakeFile],
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Search files for the messages, and rewrite the files that contain any. Yield
    the paths of these files, each with the facts of the new file, whose name begins
    with `token`. Executors run this function."""
    place = LakeTable(place_of(lake), name, t.StructType([]))
    names = _IDS.get(name, ["message_id"])
    wanted = pa.array(ids, pa.string())

    def kept(batch: pa.RecordBatch) -> pa.RecordBatch:
        gone = reduce(pc.or_, [pc.is_in(batch.column(one), wanted) for one in names])
        return batch.filter(pc.invert(gone))

    for file in files:
        batches = rows_of(place.files, f"{place.root}/{file.path}", names)
        rows = sum(batch.num_rows - kept(batch).num_rows for batch in batches)
        if not rows:
            continue
        fresh = LakeFile("", file.service, file.day, 0, file.rows - rows)
        if not dry_run:
            # Another attempt of this task may have written the same rows.
            unique = f"{token}-{uuid.uuid4()}"
            fresh = next(iter(rewritten(place, [file], unique, kept)), fresh)
        yield file.path, fresh.facts()


def erase_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Erase messages from the databases of all specified services, from the queues of
    embedded brokers, and from the services' parts of the lake. Report the numbers of
    rows. In a dry run, nothing is erased, and these are the numbers that a real run
    would erase. Raises EnvironmentFault while an archive, a `reconcile` or a replay is
    running."""
    keys, correlation_ids, dry_run = given.key, given.correlation_id, given.dry_run
    named = [*given.message_id, *keys, *correlation_ids]
    if not (named and all(named)):
        raise UsageError(
            "Which messages? Give --message-id, --key or --correlation-id. (An empty "
            "value selects no message. Is a variable of your shell unset?)"
        )
    rows, archived, kept = Counter[str](), Counter[str](), Counter[str]()
    with job_session(given) as spark, ExitStack() as stack:
        remove_left_copies()
        lake = None
        if spec.lake is not None:
            with suppress(NoLake):
                lake = Lake(spec.lake)
        databases: list[Connection] = []
        for source in spec.services:
            connection = stack.enter_context(connect_plain(source))
            for table in TABLES.values():
                # No archive may add messages after they were looked up.
                stack.enter_context(archiving(connection, source, table.name))
                if lake is not None and not dry_run:
                    _fence(lake, source.service, table)
            stack.enter_context(keeping(connection, source))
            # No replay may store a message again that it has read before.
            stack.enter_context(erasure(connection, source))
            databases.append(connection)
        brokers = [stack.enter_context(connect_plain(one)) for one in spec.queues]
        services = [one.service for one in spec.services]
        chosen = {str(one) for one in given.message_id}
        if keys or correlation_ids:
            for one in databases:
                chosen |= messages_named(one, keys, correlation_ids)
            for one in brokers:
                chosen |= messages_named(one, keys, correlation_ids, only_queued=True)
            chosen |= _named_in(lake, spark, services, given) if lake else set()
        ids = sorted(stack.enter_context(erasing(spec.services, run, chosen)))
        sessions = _sessions_in(lake, spark, services, ids) if lake and ids else set()
        sessions = sessions.union(*(sessions_of(one, ids) for one in databases))
        for one in databases:
            rows.update(erase_rows(one, [RESPONSES], sorted(sessions), dry_run=dry_run))
            if not dry_run:
                rows.update(withdraw(one, ids))
        for one in brokers:
            rows.update(erase_rows(one, [_QUEUE], ids, dry_run=dry_run))
        for name, relations in RELATIONS.items():
            for service, one in zip(services, databases, strict=True):
                if lake is not None:
                    archived[name] += _from_lake(
                        spark, lake, name, service, ids, dry_run
                    )
                rows.update(erase_rows(one, relations, ids, dry_run=dry_run))
        for one in databases:
            rows[_TAILS] += erase_tails(one, keys, dry_run=dry_run)
            kept.update(erase_rows(one, _NEEDED, ids, dry_run=True, conditions=_NEEDED))
    if dry_run:
        kept -= rows
    run.rows = rows.total() + archived.total()
    run.counts = {"messages": len(ids), "database": rows, "lake": +archived}
    run.facts |= run.counts | {"kept": +kept}
    would = "would be " if dry_run else ""
    run.lines.append(f"{len(ids):,} messages are selected.")
    for where, counts in (("database", rows), ("lake", archived)):
        run.lines += [
            f"  {where}: {count:,} rows of {name} {would}erased."
            for name, count in counts.items()
            if count
        ]
    run.lines += [
        f"  database: {count:,} rows of {name} stay, since an open run of a flow may "
        "need them: erase again when it has ended."
        for name, count in (+kept).items()
    ]
