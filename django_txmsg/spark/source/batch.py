"""Reads a table of a database or of a lake for a batch query.

A table of a database is divided into partitions by id. With a named snapshot, any
number of partitions see the same state. Without one, there is a single partition,
because two statements could see different states.

In a lake, the query reads only the files that the log names. The directory also
contains replaced files and files of failed attempts. `spark.read.parquet()` would read
these files too.

Both readers push filters down: to the database, or to the selection of a lake's files.
This needs PySpark 4.1 and a setting, which `register()` makes.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ... import wire
from ..databases import Database, open_database
from ..errors import UsageError
from ..lake import Lake, LakeTable
from ..lakefile import rows_as
from ..schemas import Column, Table, arrow_schema
from ..spec import LakeSpec, SourceSpec

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

#: Partitions of a read within a snapshot, by default.
PARTITIONS = 4

#: The prefix of an object store's options.
STORAGE = "storage."


class Selection:
    """The columns that Spark requests, in Spark's order and with Spark's
    nullability."""

    def __init__(self, service: str, table: Table, schema: StructType) -> None:
        known = {one.name: one for one in (*table.columns, *table.live)}
        for name in schema.fieldNames():
            if name != "service" and name not in known:
                raise UsageError(f"The table {table.name} has no column {name!r}.")
        self.service, self.table = service, table
        self.columns = [known.get(name) for name in schema.fieldNames()]
        self.schema = arrow_schema(schema)

    def read(
        self, database: Database, where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the SQL condition `where` selects."""
        wanted = [one for one in self.columns if one is not None]
        projection = wanted or [self.table.column("id")]
        for batch in database.read(self.table, projection, where, snapshot):
            names = pa.repeat(pa.scalar(self.service, pa.string()), batch.num_rows)
            found = iter(batch.columns)
            arrays = [names if one is None else next(found) for one in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass
class Stretch(InputPartition):
    """A partition with the rows `first <= position < last`. The position is the row's
    id or, in a stream from PostgreSQL, a transaction id."""

    first: int
    last: int

    def condition(self, position: str = "t.id") -> str:
        """Return the range as a condition for an SQL expression."""
        return f"{position} >= {self.first} AND {position} < {self.last}"


def id_ranges(database: Database, table: Table, count: int) -> list[Stretch]:
    """Divide all possible ids into `count` ranges with about the same number of rows.
    The existing ids are sampled, because ranges of equal width could have very
    different numbers of rows."""
    known = sorted(database.sample(table)) if count > 1 else []
    inner = {known[len(known) * part // count] for part in range(1, count) if known}
    return [Stretch(*edge) for edge in pairwise([-(2**63), *sorted(inner), 2**63 - 1])]


class BatchReader(DataSourceReader):
    """Reads the requested columns of a table. The database applies the filters."""

    def __init__(
        self,
        spec: SourceSpec,
        table: Table,
        schema: StructType,
        options: Mapping[str, str],
    ) -> None:
        self.database = open_database(spec)
        self.table, self.columns = table, Selection(spec.service, table, schema)
        self.snapshot = options.get("snapshot", "")
        self.count = int(options.get("partitions", PARTITIONS if self.snapshot else 1))
        self.conditions: list[str] = []
        for name, upper in (("since", False), ("until", True)):
            if name in options:
                given = options[name].replace("Z", "+00:00")  # for Python 3.10
                instant = dt.datetime.fromisoformat(given)
                literal = self.database.instant(instant, upper=False)
                sign = "<" if upper else ">="
                self.conditions.append(f"t.{table.clock} {sign} {literal}")

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the ids into ranges with about the same number of rows."""
        return id_ranges(self.database, self.table, self.count)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        assert isinstance(partition, Stretch)
        where = " AND ".join([partition.condition(), *self.conditions])
        yield from self.columns.read(self.database, where, self.snapshot)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Store the filters that the database can apply. Yield the filters that Spark
        must apply. On SQLite, Spark must apply all filters, because the database may
        select a few rows too many."""
        for one in filters:
            condition = _condition(one, self.table, self.database)
            if condition is not None:
                self.conditions.append(condition)
            if condition is None or self.database.spec.vendor == "sqlite":
                # Instants are text there, and their bounds a little wider.
                yield one


#: The SQL signs of comparisons and their functions, by Spark's names. PySpark 4.0 has
#: no such classes.
_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "GreaterThan": (">", operator.gt),
    "GreaterThanOrEqual": (">=", operator.ge),
    "LessThan": ("<", operator.lt),
    "LessThanOrEqual": ("<=", operator.le),
    "EqualTo": ("=", operator.eq),
    "In": ("IN", lambda value, several: value in several),
}
_NULLS = {"IsNull": "IS NULL", "IsNotNull": "IS NOT NULL"}


def _condition(one: Filter, table: Table, database: Database) -> str | None:
    """Return an SQL condition for a filter. It selects at least the rows that the
    filter selects. Returns None if the filter cannot be expressed in SQL."""
    kind, value = type(one).__name__, getattr(one, "value", None)
    path = getattr(one, "attribute", ())
    column = next((c for c in table.columns if (c.name,) == tuple(path)), None)
    sqlite = database.spec.vendor == "sqlite"
    if column is None or column.kind in ("json", "bytes", "double"):
        return None
    if sqlite and column.kind == "xid":
        return None  # which has no such column
    name = f"({column.sql}::text::bigint)" if column.kind == "xid" else column.sql
    if kind in _NULLS:
        return f"{name} {_NULLS[kind]}"
    sign = _COMPARISONS[kind][0] if kind in _COMPARISONS else ""
    # Spark and the database may order text differently. SQLite stores an instant as one
    # of several texts.
    ordered = sign[:1] in ("<", ">")
    unsafe = ("text", "uuid") if ordered else ("instant",) if sqlite else ()
    if not sign or column.kind in unsafe:
        return None
    if sqlite and column.kind == "instant":
        sign = f"{sign[0]}="
    several = value if isinstance(value, list | tuple) else [value]
    literals = [_literal(column, one, database, sign[0] == "<") for one in several]
    if not literals or None in literals:
        return None
    return f"{name} {sign} ({', '.join(map(str, literals))})"


def _literal(
    column: Column, value: object, database: Database, upper: bool
) -> str | None:
    if column.kind in ("long", "int", "xid") and isinstance(value, int):
        return str(int(value))
    if column.kind == "instant" and isinstance(value, dt.datetime):
        return database.instant(value, upper=upper)
    if column.kind == "uuid" and isinstance(value, str):
        return database.uuid(value) if wire.uuid_or_none(value) else None
    if column.kind == "text" and isinstance(value, str) and "\x00" not in value:
        return "'" + value.replace("'", "''") + "'"
    return None


class LakeReader(DataSourceReader):
    """Reads the requested columns of a table in the lake. Files of other services and
    days are skipped."""

    def __init__(self, table: LakeTable, schema: StructType) -> None:
        self.table, self.schema = table, schema
        #: Conditions on the service or the day of a file.
        self.conditions: list[tuple[str, Callable[[Any, Any], bool], Any]] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Return the files that may contain matching rows."""
        return [
            InputPartition(one)
            for one in self.table.named()
            if all(
                compared(getattr(one, name), value)
                for name, compared, value in self.conditions
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file."""
        named = [partition.value]
        yield from rows_as(self.table.files, self.table.root, self.schema, named)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Store the filters on service and day. Yield all filters, because Spark must
        apply them to the rows."""
        for one in filters:
            name = ".".join(getattr(one, "attribute", ()))
            value = getattr(one, "value", None)
            kind = type(one).__name__
            if kind in _COMPARISONS and _comparable(name, value):
                self.conditions.append((name, _COMPARISONS[kind][1], value))
            yield one


def _comparable(name: str, value: object) -> bool:
    kind = {"service": str, "day": dt.date}.get(name)
    values = value if isinstance(value, list | tuple) else [value]
    return all(type(one) is kind for one in values)


def lake_table(options: Mapping[str, str]) -> LakeTable:
    """Return the lake's table that the options `lake` and `table` choose.

    Raises EnvironmentFault if there is no lake, UsageError for an unknown table.
    """
    storage = {
        name[len(STORAGE) :].upper(): value
        for name, value in options.items()
        if name.startswith(STORAGE)
    }
    lake = Lake(LakeSpec(options["lake"], storage_options=storage))
    name = options.get("table", "outbox")
    table = lake.table(name, StructType())
    delta = table.load() if name in lake.names() else None
    if delta is None:
        raise UsageError(
            f"There is no table {name!r} in the lake; there are "
            f"{', '.join(lake.names()) or 'none yet'}."
        )
    table.struct = from_arrow_schema(pa.schema(delta.schema().to_arrow()))
    return table
