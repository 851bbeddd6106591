"""Stores many messages at once, each only once, through a staging table.

Each task attempt writes its rows to the staging table under its own key. Then one
transaction moves the rows of the successful attempts into the outbox, records the name
of the run, and clears the staging table. COPY directly into the outbox could not skip
messages that are already stored.

Dead letters are not stored in this way. The app redelivers them, because only the app
knows each dead letter's stage and can give the message to this stage through the inbox.
The app also limits the rate, can pause the redelivery, and records who requested it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ..rules import dead_letters
from ..rules.outbox import NEW
from .connection import Connection, connect_plain
from .errors import EnvironmentFault, UsageError
from .schemas import STAGED
from .spec import SourceSpec

_RUNS = "django_txmsg_storedrun"


def remember(connection: Connection, name: str, messages: int, ids: str) -> bool:
    """Record that the run `name` stores these messages: their number, and the sum of
    their ids. Returns True if the name is new. Returns False if a run of this name has
    already stored these messages. The caller must then not store them again, even if
    they have been archived or pruned since.

    Raises UsageError if the name belongs to other messages.
    """
    if not messages:
        return False
    fresh = connection.execute(
        f"INSERT INTO {_RUNS} (name, messages, ids, stored_at)"
        f" VALUES (%s, %s, %s, {connection.now}) ON CONFLICT (name) DO NOTHING",
        name, messages, ids,
    )  # fmt: skip
    if fresh:
        return True
    [known] = connection.rows(
        f"SELECT messages, ids, stored_at FROM {_RUNS} WHERE name = %s", name
    )
    if tuple(known[:2]) != (messages, ids):
        raise UsageError(
            f"{name} has stored {known[0]:,} messages at {known[2]}, and these "
            f"{messages:,} are not the same. Nothing was stored: a name belongs to "
            "one selection of messages. Give this one another name. If it is a request "
            "of the admin, request the missing messages again."
        )
    return False


_STAGED = "django_txmsg_stagedmessage"
_OUTBOX = "django_txmsg_outboxmessage"
_CLEAR = f"DELETE FROM {_STAGED} WHERE run = %s"
_NAMES = STAGED.fieldNames()
_QUOTED = ", ".join(f'"{name}"' for name in _NAMES)
#: What orders the messages of a run. Concurrent tasks draw the ids in any order, so an
#: id counts only between messages that the run gives no order.
_PLACE = ("position", "sequence")
_ORDER = ", ".join([*_PLACE, "id"])


@dataclass(frozen=True)
class Brought(WriterCommitMessage):
    """The staged rows of one task attempt: their number, and the sum of their message
    ids."""

    task: str
    rows: int
    ids: int


class Staging:
    """The rows of one run in the staging table of a service's database. With `new`, the
    messages have new ids, and get a place in the order of their keys. A message that is
    stored again under its own id keeps its place."""

    def __init__(self, spec: SourceSpec, run: str, *, new: bool = False) -> None:
        self.spec, self.run, self.new = spec, run, new

    def stage(self, task: str, batches: Iterable[pa.RecordBatch]) -> Brought:
        """Write the rows of one task attempt to the staging table, in one
        transaction."""
        rows = ids = 0

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal rows, ids
            for batch in batches:
                rows += batch.num_rows
                for one in batch.column("message_id").to_pylist():
                    ids += uuid.UUID(one).int
                yield batch

        with connect_plain(self.spec) as connection, connection.transaction():
            store = self._copy if self.spec.vendor == "postgresql" else self._insert
            store(connection, task, counted())
        return Brought(task, rows, ids % 2**128)

    def merge(self, tasks: Sequence[Brought], *, rate: float = 0) -> int:
        """Take the rows that `tasks` have staged, and move them to the outbox, in one
        transaction. Returns the number of stored rows. If the run has stored its
        messages before, no row is stored again. What other task attempts have staged is
        deleted: these attempts failed, or were repeated or speculative.

        `rate` is the number of messages that become due per second. With 0, all are due
        immediately.

        Raises EnvironmentFault if staged rows are missing. Raises UsageError if a run
        of this name has stored other messages.
        """
        announced = sum(one.rows for one in tasks)
        ids = sum(one.ids for one in tasks) % 2**128
        # One parameter: there may be more tasks than a statement can have parameters.
        names = json.dumps({one.task: 0 for one in tasks})
        theirs = "run = %s AND task IN (SELECT key FROM json_each(%s))"
        with connect_plain(self.spec) as connection, connection.transaction():
            stored = 0
            if remember(connection, self.run, announced, f"{ids:032x}"):
                stored = self._store(connection, rate, theirs, names)
                # Counted as they go: a statement between two others sees what another
                # process of this run has cleared meanwhile.
                staged = connection.execute(
                    f"DELETE FROM {_STAGED} WHERE {theirs}", self.run, names
                )
                if staged != announced:
                    raise EnvironmentFault(
                        f"Run {self.run}: {announced} messages were announced and "
                        f"{staged} are staged (did the database restart, or was a "
                        "second run of this name stopped?). Nothing was stored: run "
                        "again."
                    )
            connection.execute(_CLEAR, self.run)
        return stored

    def clear(self) -> None:
        """Delete the rows of this run from the staging table."""
        with connect_plain(self.spec) as connection:
            connection.execute(_CLEAR, self.run)

    def _copy(
        self, connection: Connection, task: str, batches: Iterable[pa.RecordBatch]
    ) -> None:
        """Insert the rows with COPY in CSV format, because Arrow writes CSV quickly.
        Bytes are in PostgreSQL's hex format."""
        import pyarrow.csv as csv

        sql = f"COPY {_STAGED} (run, task, {_QUOTED}) FROM STDIN WITH (FORMAT csv)"
        options = csv.WriteOptions(include_header=False, quoting_style="needed")
        with connection.raw.cursor().copy(sql) as copy:
            for batch in batches:
                sink = pa.BufferOutputStream()
                csv.write_csv(self._as_text(batch, task), sink, options)
                copy.write(memoryview(sink.getvalue()))

    def _as_text(self, batch: pa.RecordBatch, task: str) -> pa.RecordBatch:
        count = batch.num_rows
        arrays = [pa.repeat(self.run, count), pa.repeat(task, count)]
        for name in _NAMES:
            values = batch.column(name)
            if name == "body":
                values = pa.array(
                    [f"\\x{body.hex()}" for body in values.to_pylist()], pa.string()
                )
            arrays.append(values)
        return pa.RecordBatch.from_arrays(arrays, names=["run", "task", *_NAMES])

    def _insert(
        self, connection: Connection, task: str, batches: Iterable[pa.RecordBatch]
    ) -> None:
        marks = ", ".join(["%s"] * (len(_NAMES) + 2))
        sql = f"INSERT INTO {_STAGED} (run, task, {_QUOTED}) VALUES ({marks})"
        for batch in batches:
            lines = batch.select(_NAMES).to_pylist()
            for line in lines:
                line["message_id"] = uuid.UUID(line["message_id"])
            connection.many(sql, ([self.run, task, *line.values()] for line in lines))

    def _store(
        self, connection: Connection, rate: float, theirs: str, names: str
    ) -> int:
        postgres = self.spec.vendor == "postgresql"
        now = due = connection.now
        place = f"(row_number() OVER (ORDER BY {_ORDER}) - 1)"
        if rate and postgres:
            due = f"now() + {place} * interval '1 second' / {float(rate)}"
        elif rate:
            due = (
                "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now',"
                f" '+' || ({place} / {float(rate)}) || ' seconds')"
            )
        fields = ", ".join(f'"{name}"' for name in _NAMES if name not in _PLACE)
        # The ids of new messages depend on the whole name, so its end may be cut off.
        replay = f"{NEW}{self.run}"[:64] if self.new else self.run
        return connection.execute(
            f"INSERT INTO {_OUTBOX} ({fields}, replay_id, created_at, due_at, attempts,"
            f" last_error, service) SELECT {fields}, %s, {now}, {due}, 0, '', %s"
            f" FROM {_STAGED} WHERE {theirs} ORDER BY {_ORDER}"
            " ON CONFLICT (message_id, replay_id) DO NOTHING",
            replay, self.spec.service, self.run, names,
        )  # fmt: skip


#: The id of a dead letter, and that of its message.
Letter = tuple[int, str]


def ask_to_redeliver(
    spec: SourceSpec, name: str, letters: Sequence[Letter], *, rate: float, why: str
) -> int | None:
    """Request that a service redelivers these dead letters. Returns the id of the bulk
    operation. Returns None if there are no dead letters, or if a request with this name
    exists.

    Raises UsageError if the existing request is for other dead letters.
    """
    ids = sum(uuid.UUID(message).int for _, message in letters) % 2**128
    with connect_plain(spec) as connection, connection.transaction():
        if not remember(connection, name, len(letters), f"{ids:032x}"):
            return None
        numbers = sorted(number for number, _ in letters)
        sql, values = dead_letters.bulk_operation(
            spec.vendor, kind="redeliver", filters={"ids": numbers}, rate=rate or None,
            service=spec.service, total=len(numbers), up_to=numbers[-1],
            by=f"pipeline: {name}", why=why,
        )  # fmt: skip
        return int(connection.value(sql, *values))
