"""Readers that push filters down: to the database, or to the selection of a lake's
files.

Filter pushdown needs PySpark 4.1 and an explicit setting. So the readers with pushdown
are separate classes in a separate module. `register()` enables pushdown, and the option
`pushdown=false` disables it.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from ..databases import Database
from ..schemas import Column, Table
from .batch import BatchReader, Condition, LakeReader


class PushingReader(BatchReader):
    """A reader that pushes filters down to the database."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Store the filters that the database can apply. Yield the filters that Spark
        must apply. On SQLite, Spark must apply all filters, because the database may
        select a few rows too many."""
        for one in filters:
            condition = _condition(one, self.table, self.database)
            if condition is not None:
                self.conditions.append(condition)
            if condition is None or self.database.vendor == "sqlite":
                # Instants are text there, and their bounds a little wider.
                yield one


_SIGNS: dict[type[Filter], str] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
    EqualTo: "=",
}


def _condition(one: Filter, table: Table, database: Database) -> str | None:
    """Return an SQL condition for a filter. It selects at least the rows that the
    filter selects. Returns None if the filter cannot be expressed in SQL."""
    path = getattr(one, "attribute", ())
    column = next((c for c in table.columns if (c.name,) == tuple(path)), None)
    if column is None or column.kind in ("json", "bytes", "double"):
        return None
    if column.kind == "xid" and database.vendor == "sqlite":
        return None  # which has no such column
    name = column.sql
    if isinstance(one, IsNull):
        return f"{name} IS NULL"
    if isinstance(one, IsNotNull):
        return f"{name} IS NOT NULL"
    if isinstance(one, In):
        literals = [_literal(column, value, database, False) for value in one.value]
        if not literals or None in literals or column.kind == "instant":
            return None
        return f"{name} IN ({', '.join(map(str, literals))})"
    sign = _SIGNS.get(type(one))
    if sign is None or (column.kind in ("text", "uuid") and sign != "="):
        # Spark and the database may order text differently.
        return None
    if database.vendor == "sqlite" and column.kind == "instant":
        if sign == "=":
            return None
        sign = {">": ">=", "<": "<="}.get(sign, sign)
    literal = _literal(column, getattr(one, "value", None), database, sign[0] == "<")
    if literal is None:
        return None
    return f"{_compared(name, column, database)} {sign} {literal}"


def _compared(name: str, column: Column, database: Database) -> str:
    if column.kind == "xid" and database.vendor == "postgresql":
        return f"({name}::text::bigint)"
    return name


def _literal(
    column: Column, value: object, database: Database, upper: bool
) -> str | None:
    if column.kind in ("long", "int", "xid") and isinstance(value, int):
        return str(int(value))
    if column.kind == "instant" and isinstance(value, dt.datetime):
        return database.instant(value, upper=upper)
    if column.kind == "uuid" and isinstance(value, str):
        try:
            return database.uuid(value)
        except ValueError:
            return None
    if column.kind == "text" and isinstance(value, str) and "\x00" not in value:
        return "'" + value.replace("'", "''") + "'"
    return None


def _one_of(value: Any, several: Any) -> bool:
    return value in several


_COMPARED: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: _one_of,
}


class PushingLakeReader(LakeReader):
    """A reader that skips files of other services and days."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Store the filters on service and day. Yield all filters, because Spark must
        apply them to the rows."""
        for one in filters:
            name = ".".join(getattr(one, "attribute", ()))
            value = getattr(one, "value", None)
            if type(one) in _COMPARED and _comparable(name, value):
                self.conditions.append(Condition(_COMPARED[type(one)], name, value))
            yield one


def _comparable(name: str, value: object) -> bool:
    kind = {"service": str, "day": dt.date}.get(name)
    values = value if isinstance(value, list | tuple) else [value]
    return all(type(one) is kind for one in values)
