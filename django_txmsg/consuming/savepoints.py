"""A savepoint for each message of a batch, one after another in one transaction.

As `transaction.atomic()` makes them, with one difference: a savepoint is released
together with the beginning of the next one, and the last one by the commit. On
PostgreSQL that is one round trip to the server for each message instead of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error, connections


class Savepoints:
    """Those of one transaction, which must be open on `using`."""

    def __init__(self, using: str) -> None:
        self._connection: Any = connections[using]
        self._numbers = itertools.count(1)
        self._last = ""

    @contextmanager
    def next(self) -> Iterator[None]:
        """Around the work of one message: an exception rolls back that work, alone.

        If even this fails, `needs_rollback` is left set, as `atomic()` leaves it.
        """
        connection = self._connection
        name = f"txmsg_{next(self._numbers)}"
        self._begin(name)
        connection.savepoint_ids.append(name)
        try:
            yield
        except BaseException:
            connection.savepoint_ids.pop()
            try:
                connection.savepoint_rollback(name)
            except Error:
                connection.needs_rollback = True
            else:
                connection.needs_rollback = False
            raise
        connection.savepoint_ids.pop()

    def _begin(self, name: str) -> None:
        operations = self._connection.ops
        sql = [operations.savepoint_create_sql(name)]
        if self._last:
            sql.insert(0, operations.savepoint_commit_sql(self._last))
        if self._connection.vendor == "postgresql":
            sql = ["; ".join(sql)]
        with self._connection.cursor() as cursor:
            for statement in sql:
                cursor.execute(statement)
        self._last = name
