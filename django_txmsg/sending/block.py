"""The transaction that messages are sent in: hop 1's in a request, hop 7's in a stage.

One block for both. It begins with the first use of the database, knows whether it has
committed, and tells a rollback that was asked for from one that an error left behind.
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
)
from ..django_internals.late_atomic import LateAtomic


class Block:
    """An atomic block that is entered and left once, perhaps in different functions.

    `isolation` and `reading` are those of `LateAtomic`. `committed` says that its
    transaction did, even when a hook that ran after the commit raised; `nested`, that
    it is a savepoint in somebody else's, whose commit is not its own.
    """

    def __init__(
        self, using: str, *, isolation: str | None = None, reading: bool = False
    ) -> None:
        self.using = using
        self.committed = self.nested = self._rollback_asked = False
        self._connection: Any = connections[using]
        self._atomic = LateAtomic(using, isolation=isolation, reading=reading)
        self._hear_no_more: Callable[[], None] | None = None

    def enter(self, *, begun: bool = False) -> None:
        """Open it. `begun` says that the server has begun the transaction already."""
        self.nested = in_block(self._connection)
        self._atomic.enter(begun=begun)
        self._hear_no_more = hear_rollbacks(self._connection, self._hear)
        if not self.nested:
            # The first hook of all: whatever raises after it, raises after the commit.
            transaction.on_commit(self._note_commit, using=self.using)

    def exit(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the error or of what `set_rollback()` said.
        Raises what made the commit impossible, or what a hook after it raised."""
        if self._hear_no_more is not None:
            self._hear_no_more()
        self._atomic.exit(error)

    @property
    def employed(self) -> bool:
        """Whether the database was asked for anything. A savepoint asks it."""
        return self._atomic.begun

    @property
    def spoiled(self) -> bool:
        """Whether an error that was caught leaves nothing but to roll back."""
        return is_broken(self._connection) or (
            must_roll_back(self._connection) and not self._rollback_asked
        )

    @property
    def rolls_back(self) -> bool:
        """Whether leaving it without an error rolls back, for whatever reason."""
        return must_roll_back(self._connection)

    @property
    def cause(self) -> BaseException | None:
        """The error that has spoiled it, if Django has seen it."""
        return cause_of_rollback(self._connection)

    def _hear(self, rollback: bool) -> None:
        self._rollback_asked = rollback

    def _note_commit(self) -> None:
        self.committed = True
