"""The columns that are read from each table, and the columns that the lake stores.

A `Column` has its Spark type, its Arrow type, its SQL expression for PostgreSQL, and
its type id in PostgreSQL's binary format (`rowhash`). Columns are never removed. Each
has the lake version that added it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as t

from ..rules import Rule, dead_letters, flows, inbox, outbox

#: Version of the lake's layout and schemas. A reader refuses a newer one.
LAKE_VERSION = 1


@dataclass(frozen=True)
class Kind:
    """How the values of a column are read, stored and hashed."""

    spark: t.DataType
    #: PostgreSQL's type id: fixed in its catalogue since before version 8.
    type_id: int
    #: NumPy's name for values that always have as many bytes in PostgreSQL's binary
    #: format.
    form: str = ""
    #: PostgreSQL's cast for reading. A uuid and a transaction id are read as bytes.
    read: str = ""
    #: PostgreSQL's cast for hashing.
    hashed: str = ""


KINDS = {
    "long": Kind(t.LongType(), 20, ">i8"),
    "int": Kind(t.IntegerType(), 23, ">i4"),
    "double": Kind(t.DoubleType(), 701, ">f8"),
    "bool": Kind(t.BooleanType(), 16, ">i1"),
    "uuid": Kind(t.StringType(), 2950, "V16"),
    "text": Kind(t.StringType(), 25, read="::text", hashed="::text"),
    "json": Kind(t.StringType(), 25, read="::text", hashed="::text"),
    "bytes": Kind(t.BinaryType(), 17),
    "instant": Kind(t.TimestampType(), 1184, ">i8"),
    "xid": Kind(t.LongType(), 20, ">i8", hashed="::text::bigint"),
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


@dataclass(frozen=True)
class Column:
    """One column of a table of the message log."""

    name: str
    #: A key of KINDS.
    kind: str
    nullable: bool = False
    #: The column's name in the database, where it differs.
    source: str = ""
    #: SQL for a value from another row; the table is `t`.
    expression: str = ""
    #: Whether a lake without bodies leaves it out, as it leaves out all bytes.
    personal: bool = False

    @property
    def spark(self) -> t.StructField:
        """The field in a DataFrame."""
        return t.StructField(self.name, KINDS[self.kind].spark, self.nullable)

    @property
    def arrow(self) -> pa.Field:
        """The field in a record batch."""
        return pa.field(self.name, _arrow_type(self.spark.dataType), self.nullable)

    @property
    def sql(self) -> str:
        """The column as an SQL expression. The table's alias is `t`."""
        return self.expression or f't."{self.source or self.name}"'

    @property
    def selected(self) -> str:
        """The SQL expression that PostgreSQL evaluates to read the column."""
        return f'{self.sql}{KINDS[self.kind].read} AS "{self.name}"'

    @property
    def hashed(self) -> str:
        """The SQL expression that PostgreSQL evaluates to hash the column."""
        return f"{self.sql}{KINDS[self.kind].hashed}"


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
    #: Whether rows carry the id of the transaction that changed them last.
    tracked: bool = False
    #: Columns that say something of rows which are not settled yet: the lake has none
    #: of them.
    live: tuple[Column, ...] = ()

    def column(self, name: str) -> Column:
        """Return the column with this name."""
        return next(one for one in self.columns if one.name == name)

    def struct(self) -> t.StructType:
        """Return the schema that `format("txmsg")` reads: the service, then the
        columns."""
        columns = t.StructType([one.spark for one in self.columns])
        return struct_of("service string not null", columns)

    def narrow(self, names: Collection[str]) -> t.StructType:
        """Return the schema of those columns in `names` that a database has."""
        there = [*self.struct().fields, *(one.spark for one in self.live)]
        return t.StructType([f for f in there if f.name in names])

    def lake_struct(self) -> t.StructType:
        """Return the schema in the lake. All columns are nullable, because a file may
        be older than a column."""
        fields = [t.StructField(one.name, one.spark.dataType) for one in self.columns]
        own = "outcome string, batch_id long, service string, day date"
        return struct_of(t.StructType(fields), own)


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


def columns_of(*parts: Column | str) -> tuple[Column, ...]:
    """Return the columns of all parts. A part is a column, or a text such as
    `name text, rows long null`. A column is nullable only if the text says so."""
    found: list[Column] = []
    for part in parts:
        if isinstance(part, Column):
            found.append(part)
            continue
        for text in part.split(", "):
            name, kind, *null = text.split(" ")
            found.append(Column(name, kind, nullable=bool(null)))
    return tuple(found)


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
    columns=columns_of(
        "id long, message_id uuid, replay_id text, broker text, destination text, "
        "key text, correlation_id text, session_id uuid null, headers json, "
        "content_type text, body bytes, created_at instant, due_at instant, "
        "expires_at instant null, attempts int, last_error text, "
        "dispatched_at instant null, dead_at instant null, cancelled_at instant null, "
        "created_xid xid null, changed_xid xid null",
    ),
    settled=outbox.SETTLED,
    outcome=(("dispatched", "dispatched_at"), ("dead", "")),
    tracked=True,
)

INBOX = Table(
    name="inbox",
    relation="django_txmsg_inboxmessage",
    clock="first_received_at",
    columns=columns_of(
        "id long, stage text, message_id uuid, destination text, correlation_id text",
        Column("sender", "text", source="service"),
        "created_at instant null, deliveries int, attempts int, "
        "first_received_at instant, last_received_at instant, "
        "started_at instant null, processed_at instant null, dead_at instant null, "
        "revoked_at instant null, last_error text, created_xid xid null, "
        "changed_xid xid null",
    ),
    settled=inbox.SETTLED,
    outcome=(("processed", "processed_at"), ("dead", "dead_at"), ("killed", "")),
    tracked=True,
    live=columns_of("due_at instant null, waits_for uuid null"),
)

ATTEMPTS = Table(
    name="attempts",
    relation="django_txmsg_attempt",
    clock="failed_at",
    columns=columns_of(
        "id long, message_id uuid, stage text, number int, worker text, "
        "failed_at instant, duration double null, exception text, traceback text, "
        "fingerprint text",
    ),
    settled=inbox.ATTEMPT_SETTLED,
    outcome=(("failed", ""),),
)

DEAD_LETTERS = Table(
    name="dead_letters",
    relation="django_txmsg_deadletter",
    clock="created_at",
    columns=columns_of(
        "id long, message_id uuid, stage text, broker text, destination text, "
        "correlation_id text, headers json, content_type text, body bytes, "
        "reason text, exception text, traceback text, fingerprint text, attempts int, "
        "deaths int, message_created_at instant null, created_at instant, "
        "resolution text, resolved_at instant null, resolved_by text, "
        "replaced_by uuid null",
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
    columns=columns_of(
        "id long, message_id uuid",
        Column("run_id", "uuid", expression=_RUN),
        "step text, version int",
        Column("state", "text", personal=True),
        "then text, undos int, left bool, created_at instant",
    ),
    settled=flows.OF_AN_ENDED_RUN,
    outcome=(("done", ""),),
)

FLOW_UNDOS = Table(
    name="flow_undos",
    relation="django_txmsg_flowundo",
    clock="created_at",
    columns=columns_of(
        "id long",
        # The message that started the run: a step's own work has no request.
        Column("message_id", "uuid", expression=_RUN),
        "number int, destination text, body bytes, body_type text, "
        "request_id uuid null, cancels bool, answered bool, created_at instant, "
        "confirmed_at instant null",
    ),
    settled=flows.OF_AN_ENDED_RUN,
    outcome=(("confirmed", "confirmed_at"), ("open", "")),
)

FLOW_RUNS = Table(
    name="flow_runs",
    relation="django_txmsg_run",
    clock="created_at",
    columns=columns_of(
        "id long",
        Column("message_id", "uuid", source="run_id"),
        "flow text, key text, correlation_id text, first_run uuid, version int",
        Column("state", "text", personal=True),
        "step text, waits_for text, asked text, request_id uuid null, since instant, "
        "undos int",
        Column("answer", "text", personal=True),
        "answer_type text",
        Column("result", "text", source="outcome"),
        "caller json",
        Column("baggage", "json", personal=True),
        "created_at instant, ended_at instant null",
    ),
    settled=flows.SETTLED,
    outcome="result",
    live=columns_of("due_at instant null"),
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
    "content_type string not null, body binary not null, position timestamp, "
    "sequence long"
)
