"""A savepoint for each message of a batch, one after another in one transaction.

Like those of `transaction.atomic()`, with one difference: a savepoint is released
together with the start of the next one, and the last one by the commit. On PostgreSQL
that is one round trip to the server for each message instead of two
(docs/decisions/djangos-private-api.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import Error, connections, transaction

from ..django_internals import under_savepoint


class Savepoints:
    """The savepoints of one transaction, which must be open on `using`."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._numbers = itertools.count(1)
        self._last = ""

    @contextmanager
    def next(self) -> Iterator[None]:
        """Around the work of one message: an exception rolls back only that work.

        If even this fails, the transaction must roll back, as with `atomic()`.
        """
        name = f"txmsg_{next(self._numbers)}"
        self._begin(name)
        try:
            with under_savepoint(connections[self._using], name):
                yield
        except BaseException:
            try:
                transaction.savepoint_rollback(name, using=self._using)
            except Error:
                transaction.set_rollback(True, using=self._using)
            else:
                transaction.set_rollback(False, using=self._using)
            raise

    def _begin(self, name: str) -> None:
        sql = [f"SAVEPOINT {name}"]
        if self._last:
            sql.insert(0, f"RELEASE SAVEPOINT {self._last}")
        if connections[self._using].vendor == "postgresql":
            sql = ["; ".join(sql)]
        with connections[self._using].cursor() as cursor:
            for statement in sql:
                cursor.execute(statement)
        self._last = name
