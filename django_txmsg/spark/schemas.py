"""The columns that are read from each table, and the columns that the lake stores.

A `Column` has its Spark type, its Arrow type, its SQL expression for PostgreSQL, and
its type id in PostgreSQL's binary format (`rowhash`). Columns are never removed. Each
has the lake version that added it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql import types as t

from ..rules import Rule, dead_letters, flows, inbox, outbox

#: Version of the lake's layout and schemas. A reader refuses a newer one.
LAKE_VERSION = 1

Kind = Literal[
    "long", "int", "double", "bool", "uuid", "text", "json", "bytes", "instant", "xid"
]

_SPARK: dict[str, t.DataType] = {
    "long": t.LongType(),
    "int": t.IntegerType(),
    "double": t.DoubleType(),
    "bool": t.BooleanType(),
    "uuid": t.StringType(),
    "text": t.StringType(),
    "json": t.StringType(),
    "bytes": t.BinaryType(),
    "instant": t.TimestampType(),
    "xid": t.LongType(),
}
_ARROW_OF: dict[type[t.DataType], pa.DataType] = {
    t.LongType: pa.int64(),
    t.IntegerType: pa.int32(),
    t.DoubleType: pa.float64(),
    t.StringType: pa.string(),
    t.BinaryType: pa.binary(),
    t.TimestampType: pa.timestamp("us", tz="UTC"),
    t.DateType: pa.date32(),
    t.BooleanType: pa.bool_(),
}
#: PostgreSQL's expression for reading a kind. A uuid and a transaction id are read as
#: bytes.
_CASTS = {"text": "::text", "json": "::text"}
#: The same for hashing.
_HASHED = {"text": "::text", "json": "::text", "xid": "::text::bigint"}


@dataclass(frozen=True)
class Column:
    """One column of a table of the message log."""

    name: str
    kind: Kind
    nullable: bool = False
    source: str = ""
    """The column's name in the database, where it differs."""
    expression: str = ""
    """SQL for a value from another row; the table is `t`."""
    personal: bool = False
    """Whether a lake without bodies leaves it out, as it leaves out all bytes."""

    @property
    def spark(self) -> t.StructField:
        """The field in a DataFrame."""
        return t.StructField(self.name, _SPARK[self.kind], self.nullable)

    @property
    def arrow(self) -> pa.Field:
        """The field in a record batch."""
        return pa.field(self.name, _arrow_type(_SPARK[self.kind]), self.nullable)

    @property
    def sql(self) -> str:
        """The column as an SQL expression. The table's alias is `t`."""
        return self.expression or f't."{self.source or self.name}"'

    @property
    def selected(self) -> str:
        """The SQL expression that PostgreSQL evaluates to read the column."""
        return f'{self.sql}{_CASTS.get(self.kind, "")} AS "{self.name}"'

    @property
    def hashed(self) -> str:
        """The SQL expression that PostgreSQL evaluates to hash the column."""
        return f"{self.sql}{_HASHED.get(self.kind, '')}"


@dataclass(frozen=True)
class Table:
    """A table of the message log.

    `relation` is the table's name in the database. `clock` is the column for time
    ranges and for the days in the lake. Rows that match `settled` will not change any
    more.

    `outcome` tells how to determine the outcome of a row. If `outcome` is a text, it is
    the name of the column that contains the row's outcome. Otherwise, `outcome`
    consists of pairs of an outcome and a column. The row has the outcome of the first
    pair whose column is not null. The last pair has no column, and applies to all other
    rows.
    """

    name: str
    relation: str
    clock: str
    columns: tuple[Column, ...]
    settled: Rule
    outcome: str | tuple[tuple[str, str], ...]
    tracked: bool = False
    """Whether rows carry the id of the transaction that changed them last."""
    live: tuple[Column, ...] = ()
    """Columns that say something of rows which are not settled yet: the lake has
    none of them."""

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(one for one in self.columns if one.name == name)

    def struct(self) -> t.StructType:
        """Return the schema that `format("txmsg")` reads: the service, then the
        columns."""
        fields = [t.StructField("service", t.StringType(), False)]
        return t.StructType(fields + [one.spark for one in self.columns])

    def live_struct(self) -> t.StructType:
        """Return the schema that the jobs read from a database."""
        return t.StructType([*self.struct().fields, *[one.spark for one in self.live]])

    def lake_struct(self) -> t.StructType:
        """Return the schema in the lake. All columns are nullable, because a file may
        be older than a column."""
        fields = [t.StructField(one.name, one.spark.dataType) for one in self.columns]
        fields += [
            t.StructField("outcome", t.StringType()),
            t.StructField("batch_id", t.LongType()),
            t.StructField("service", t.StringType()),
            t.StructField("day", t.DateType()),
        ]
        return t.StructType(fields)


def struct_of(*parts: t.StructType | str) -> t.StructType:
    """Return a schema with the columns of all parts. A part is a schema, or a text such
    as `name string, rows long not null`. (Spark itself parses such a text only with a
    session.)"""
    found = t.StructType()
    for part in parts:
        if isinstance(part, t.StructType):
            for column in part.fields:
                found.add(column)
            continue
        for text in part.split(", "):
            name, kind, *rest = text.split(" ")
            found.add(name, kind, nullable=not rest)
    return found


def arrow_schema(struct: t.StructType) -> pa.Schema:
    """Return the Arrow schema of the batches that Spark expects for `struct`."""
    return pa.schema(
        [pa.field(f.name, _arrow_type(f.dataType), f.nullable) for f in struct.fields]
    )


def _arrow_type(kind: t.DataType) -> pa.DataType:
    if isinstance(kind, t.ArrayType):
        return pa.list_(_arrow_type(kind.elementType))
    return _ARROW_OF[type(kind)]


OUTBOX = Table(
    name="outbox",
    relation="django_txmsg_outboxmessage",
    clock="created_at",
    columns=(
        Column("id", "long"),
        Column("message_id", "uuid"),
        Column("replay_id", "text"),
        Column("broker", "text"),
        Column("destination", "text"),
        Column("key", "text"),
        Column("correlation_id", "text"),
        Column("session_id", "uuid", nullable=True),
        Column("headers", "json"),
        Column("content_type", "text"),
        Column("body", "bytes"),
        Column("created_at", "instant"),
        Column("due_at", "instant"),
        Column("expires_at", "instant", nullable=True),
        Column("attempts", "int"),
        Column("last_error", "text"),
        Column("dispatched_at", "instant", nullable=True),
        Column("dead_at", "instant", nullable=True),
        Column("cancelled_at", "instant", nullable=True),
        Column("created_xid", "xid", nullable=True),
        Column("changed_xid", "xid", nullable=True),
    ),
    settled=outbox.SETTLED,
    outcome=(("dispatched", "dispatched_at"), ("dead", "")),
    tracked=True,
)

INBOX = Table(
    name="inbox",
    relation="django_txmsg_inboxmessage",
    clock="first_received_at",
    columns=(
        Column("id", "long"),
        Column("stage", "text"),
        Column("message_id", "uuid"),
        Column("destination", "text"),
        Column("correlation_id", "text"),
        Column("sender", "text", source="service"),
        Column("created_at", "instant", nullable=True),
        Column("deliveries", "int"),
        Column("attempts", "int"),
        Column("first_received_at", "instant"),
        Column("last_received_at", "instant"),
        Column("started_at", "instant", nullable=True),
        Column("processed_at", "instant", nullable=True),
        Column("dead_at", "instant", nullable=True),
        Column("last_error", "text"),
        Column("created_xid", "xid", nullable=True),
        Column("changed_xid", "xid", nullable=True),
    ),
    settled=inbox.SETTLED,
    outcome=(("processed", "processed_at"), ("dead", "dead_at"), ("killed", "")),
    tracked=True,
    live=(
        Column("due_at", "instant", nullable=True),
        Column("waits_for", "uuid", nullable=True),
    ),
)

ATTEMPTS = Table(
    name="attempts",
    relation="django_txmsg_attempt",
    clock="failed_at",
    columns=(
        Column("id", "long"),
        Column("message_id", "uuid"),
        Column("stage", "text"),
        Column("number", "int"),
        Column("worker", "text"),
        Column("failed_at", "instant"),
        Column("duration", "double", nullable=True),
        Column("exception", "text"),
        Column("traceback", "text"),
        Column("fingerprint", "text"),
    ),
    settled=inbox.ATTEMPT_SETTLED,
    outcome=(("failed", ""),),
)

DEAD_LETTERS = Table(
    name="dead_letters",
    relation="django_txmsg_deadletter",
    clock="created_at",
    columns=(
        Column("id", "long"),
        Column("message_id", "uuid"),
        Column("stage", "text"),
        Column("broker", "text"),
        Column("destination", "text"),
        Column("correlation_id", "text"),
        Column("headers", "json"),
        Column("content_type", "text"),
        Column("body", "bytes"),
        Column("reason", "text"),
        Column("exception", "text"),
        Column("traceback", "text"),
        Column("fingerprint", "text"),
        Column("attempts", "int"),
        Column("deaths", "int"),
        Column("message_created_at", "instant", nullable=True),
        Column("created_at", "instant"),
        Column("resolution", "text"),
        Column("resolved_at", "instant", nullable=True),
        Column("resolved_by", "text"),
        Column("replaced_by", "uuid", nullable=True),
    ),
    settled=dead_letters.SETTLED,
    outcome="resolution",
)

#: The id of the run that a row belongs to.
_RUN = "(SELECT r.run_id FROM django_txmsg_run r WHERE r.id = t.run_id)"

FLOW_STEPS = Table(
    name="flow_steps",
    relation="django_txmsg_flowstep",
    clock="created_at",
    columns=(
        Column("id", "long"),
        Column("message_id", "uuid"),
        Column("run_id", "uuid", expression=_RUN),
        Column("step", "text"),
        Column("version", "int"),
        Column("state", "text", personal=True),
        Column("then", "text"),
        Column("undos", "int"),
        Column("left", "bool"),
        Column("created_at", "instant"),
    ),
    settled=flows.OF_AN_ENDED_RUN,
    outcome=(("done", ""),),
)

FLOW_UNDOS = Table(
    name="flow_undos",
    relation="django_txmsg_flowundo",
    clock="created_at",
    columns=(
        Column("id", "long"),
        # The message that started the run: a step's own work has no request.
        Column("message_id", "uuid", expression=_RUN),
        Column("number", "int"),
        Column("destination", "text"),
        Column("body", "bytes"),
        Column("body_type", "text"),
        Column("request_id", "uuid", nullable=True),
        Column("cancels", "bool"),
        Column("answered", "bool"),
        Column("created_at", "instant"),
        Column("confirmed_at", "instant", nullable=True),
    ),
    settled=flows.OF_AN_ENDED_RUN,
    outcome=(("confirmed", "confirmed_at"), ("open", "")),
)

FLOW_RUNS = Table(
    name="flow_runs",
    relation="django_txmsg_run",
    clock="created_at",
    columns=(
        Column("id", "long"),
        Column("message_id", "uuid", source="run_id"),
        Column("flow", "text"),
        Column("key", "text"),
        Column("correlation_id", "text"),
        Column("first_run", "uuid"),
        Column("version", "int"),
        Column("state", "text", personal=True),
        Column("step", "text"),
        Column("waits_for", "text"),
        Column("asked", "text"),
        Column("request_id", "uuid", nullable=True),
        Column("since", "instant"),
        Column("undos", "int"),
        Column("answer", "text", personal=True),
        Column("answer_type", "text"),
        Column("result", "text", source="outcome"),
        Column("caller", "json"),
        Column("baggage", "json", personal=True),
        Column("created_at", "instant"),
        Column("ended_at", "instant", nullable=True),
    ),
    settled=flows.SETTLED,
    outcome="result",
    live=(Column("due_at", "instant", nullable=True),),
)

#: All tables, in the order in which they are archived: a run after its steps and undos.
TABLES = {
    one.name: one
    for one in (
        OUTBOX, INBOX, ATTEMPTS, DEAD_LETTERS, FLOW_STEPS, FLOW_UNDOS, FLOW_RUNS,
    )
}  # fmt: skip

#: The writer's input: one message for each row.
STAGED = struct_of(
    "message_id string not null, broker string not null, "
    "destination string not null, key string not null, "
    "correlation_id string not null, headers string not null, "
    "content_type string not null, body binary not null, position timestamp"
)
