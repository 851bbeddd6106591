"""The transaction in which messages are sent: hop 1's in a request, hop 7's in a stage.

Both use this block. It begins with the first use of the database, records whether it
has committed, and distinguishes a requested rollback from one that an error made
necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction

from ..django_internals import (
    cause_of_rollback,
    hear_rollbacks,
    in_block,
    is_broken,
    must_roll_back,
    note_errors,
)
from ..django_internals.late_atomic import LateAtomic


class Block:
    """An atomic block that is entered and left once, perhaps in different functions.

    `isolation` and `reading` are passed on to `LateAtomic`. `committed` is true once
    its transaction has committed, even if a hook after the commit raised. `nested`
    means that it is a savepoint in an outer transaction, whose commit it does not
    control.
    """

    def __init__(
        self, using: str, *, isolation: str | None = None, reading: bool = False
    ) -> None:
        self.using = using
        self.committed = self.nested = self._rollback_requested = False
        self._connection: Any = connections[using]
        self._atomic = LateAtomic(using, isolation=isolation, reading=reading)
        self._endings: list[Callable[[], None]] = []

    def enter(self, *, begun: bool = False) -> None:
        """Open it. `begun` means that the server has already begun the transaction."""
        self.nested = in_block(self._connection)
        self._atomic.enter(begun=begun)
        self._endings = [
            note_errors(self._connection),
            hear_rollbacks(self._connection, self._hear),
        ]
        if not self.nested:
            # The first hook of all: any other hook that raises does so after the
            # commit.
            transaction.on_commit(self._note_commit, using=self.using)

    def exit(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the error or of `set_rollback()`. Raises the
        error that made the commit impossible, or that a hook after it raised."""
        for end in self._endings:
            end()
        self._atomic.exit(error)

    @property
    def employed(self) -> bool:
        """Whether the database was used. Opening a savepoint counts."""
        return self._atomic.begun

    @property
    def spoiled(self) -> bool:
        """Whether a caught error leaves only a rollback."""
        return is_broken(self._connection) or (
            must_roll_back(self._connection) and not self._rollback_requested
        )

    @property
    def rolls_back(self) -> bool:
        """Whether leaving it without an error rolls back, for any reason."""
        return must_roll_back(self._connection)

    @property
    def cause(self) -> BaseException | None:
        """The error that made a rollback necessary, or the last one of a statement."""
        return cause_of_rollback(self._connection)

    def _hear(self, rollback: bool) -> None:
        self._rollback_requested = rollback

    def _note_commit(self) -> None:
        self.committed = True
