"""`show`: prints everything known about a message from databases and lake, oldest
first.

It does not start Spark, and shows no bodies.
"""

from __future__ import annotations

import argparse
import datetime as dt
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import ParquetFileFormat
from pyspark.sql import types as t

from ...rules.dead_letters import resolver
from ..batchlog import is_mounted
from ..databases import open_database
from ..errors import spoilt
from ..lake import Lake, LakeTable
from ..lakefile import LakeFile, rows_as, rows_of
from ..runs import Run
from ..schemas import TABLES, Table
from ..spec import JobSpec, SourceSpec

#: What happened at an instant of a row, in words that name other columns of it.
_STEPS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "outbox": (
        ("created_at", "stored for {destination}"),
        ("due_at", "due"),
        ("dispatched_at", "dispatched to broker {broker}"),
        ("cancelled_at", "cancelled"),
        ("dead_at", "ended undelivered: {last_error}"),
    ),
    "inbox": (
        ("first_received_at", "received by {stage}, from {sender}"),
        ("processed_at", "processed by {stage}, {deliveries} deliveries"),
        ("dead_at", "given up by {stage}: {last_error}"),
    ),
    "attempts": (("failed_at", "attempt {number} of {stage} failed: {exception}"),),
    "dead_letters": (
        ("created_at", "dead letter: {reason}"),
        ("resolved_at", "dead letter {resolution} {resolver}"),
    ),
    "flow_steps": (("created_at", "step {step} of run {run_id}; then: {then}"),),
    "flow_undos": (
        ("created_at", "undo {number} registered, by {destination}"),
        ("confirmed_at", "undo {number} confirmed, by {destination}"),
    ),
    "flow_runs": (
        ("created_at", "run of flow {flow} began"),
        ("ended_at", "run of flow {flow} ended: {result}"),
    ),
}
#: The columns by which a message is found.
_KEYS = ("message_id", "key", "correlation_id")
_HEAVY = ("body", "headers", "traceback", "state", "answer", "caller", "baggage")


def show_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """List the events of the messages with this id, key or correlation
    id. Raises EnvironmentFault if the lake does not have all archived rows."""
    lake = Lake(spec.lake) if spec.lake is not None and is_mounted(spec) else None
    terms = {given.term}
    with suppress(ValueError):
        terms.add(str(uuid.UUID(given.term)))
    rows = list(_rows(spec, lake, terms))
    # Not every table has a key and a correlation id.
    if (ids := {row["message_id"] for _, _, row in rows}) - terms:
        rows = [one for one in _rows(spec, lake, ids) if one[2]["message_id"] in ids]
    steps = [step for one in rows for step in _steps(*one)]
    steps.sort(key=lambda step: (step["at"], step["message_id"]))
    run.rows = len(steps)
    run.lines = [
        f"{one['at']:%Y-%m-%d %H:%M:%S.%f} UTC  {one['message_id']}  {one['service']}: "
        f"{one['what']} ({one['place']})"
        for one in steps
    ]
    if not steps:
        named = ", ".join(one.service for one in spec.services)
        run.lines = [
            f"Neither the databases of {named} nor the lake know {given.term!r}. Name "
            "other services: --service NAME=URL."
        ]
    run.facts["steps"] = steps


def _rows(
    spec: JobSpec, lake: Lake | None, terms: set[str]
) -> Iterator[tuple[Table, str, dict[str, Any]]]:
    """Yield the rows in which one of the columns `_KEYS` has one of these values, each
    with its table and its place."""
    for table in TABLES.values():
        seen = set()
        for source in (one.reading() for one in spec.services):
            for row in _live(source, table, terms):
                seen.add(_identity(row))
                yield table, "database", row
        for row in _archived(lake, table, terms) if lake is not None else ():
            # A row is in both while its batch is on the way.
            if _identity(row) not in seen:
                yield table, "lake", row


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    # A topic's message may have the same id in two databases of a service.
    return row["service"], row["id"], row["message_id"], row.get("stage")


def _live(
    source: SourceSpec, table: Table, terms: set[str]
) -> Iterator[dict[str, Any]]:
    database = open_database(source)
    columns = [one for one in table.columns if one.name not in _HEAVY]
    texts = ", ".join("'" + one.replace("'", "''") + "'" for one in terms)
    conditions = [f"{one.sql} IN ({texts})" for one in columns if one.name in _KEYS[1:]]
    with suppress(ValueError):
        own, ids = table.column("message_id").sql, map(database.uuid, terms)
        conditions.append(f"{own} IN ({', '.join(ids)})")
    if conditions:
        for batch in database.read(table, columns, f"({' OR '.join(conditions)})"):
            for row in batch.to_pylist():
                yield row | {"service": source.service}


def _archived(lake: Lake, table: Table, terms: set[str]) -> Iterator[dict[str, Any]]:
    place = lake.table(table.name, table.lake_struct())
    struct = t.StructType([f for f in place.struct.fields if f.name not in _HEAVY])
    keys, wanted = [one for one in _KEYS if one in struct.names], pa.array(terms)
    files = (one for one in place.named() if _has(place, one, keys, wanted))
    for batch in rows_as(place.files, place.root, struct, files):
        yield from batch.filter(_matches(batch, keys, wanted)).to_pylist()


def _has(place: LakeTable, named: LakeFile, keys: Sequence[str], terms: Any) -> bool:
    """Return whether a file has rows that match. This reads only the columns `keys`,
    and only if the file's statistics do not exclude a match."""
    path = f"{place.root}/{named.path}"
    schema = pa.schema([(one, pa.string()) for one in keys])
    wanted = reduce(or_, [pc.field(one).isin(terms) for one in keys])
    try:
        fragment = ParquetFileFormat().make_fragment(path, place.files)
        possible = fragment.subset(wanted, schema=schema).row_groups
    except (OSError, pa.ArrowException) as error:
        raise spoilt(path, error) from error
    return bool(possible) and any(
        pc.any(_matches(batch, batch.schema.names, terms)).as_py()
        for batch in rows_of(place.files, path, keys)
    )


def _matches(batch: pa.RecordBatch, keys: Sequence[str], terms: Any) -> Any:
    return reduce(pc.or_, [pc.is_in(batch.column(one), terms) for one in keys])


def _steps(
    table: Table, place: str, row: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    first: dt.datetime | None = None
    row = {**row, "resolver": resolver(row.get("resolved_by") or "")}
    for name, words in _STEPS[table.name]:
        at = row.get(name)
        # When it is due is news only if that is later.
        if at is None or (name == "due_at" and at == first):
            continue
        first = first or at
        shown = {key: str(value).partition("\n")[0] for key, value in row.items()}
        yield {
            "at": at, "message_id": row["message_id"], "service": row["service"],
            "what": words.format(**shown).rstrip(), "place": place,
        }  # fmt: skip
