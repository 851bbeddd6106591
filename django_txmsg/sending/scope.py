"""The scope that messages sent in this context belong to: a session of the HTTP outbox,
a stage, or none. The middleware and the stages enter a scope; `send_message()` reads
the scope.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, transaction

from ..django_internals import (
    LateAtomic,
    cause_of_rollback,
    hear_rollbacks,
    in_block,
    is_broken,
    must_roll_back,
    note_errors,
)
from ..envelope.message import Message
from ..models.outbox_store import NewMessage

# The transaction in which messages are sent: hop 1's in a request, hop 7's in a
# stage.
#
# Both use this block. It begins with the first use of the database, records whether
# it has committed, and distinguishes a requested rollback from one that an error made
# necessary.


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
        """Open the block. `begun` means that the server has already begun the
        transaction."""
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
        error that prevented the commit, or that a hook after the commit raised."""
        for end in self._endings:
            end()
        self._atomic.exit(error)

    @property
    def employed(self) -> bool:
        """Whether the block used the database. Opening a savepoint counts."""
        return self._atomic.begun

    @property
    def spoiled(self) -> bool:
        """Whether an error inside the block has made a commit impossible, even if the
        error was caught."""
        return is_broken(self._connection) or (
            must_roll_back(self._connection) and not self._rollback_requested
        )

    @property
    def rolls_back(self) -> bool:
        """Whether the block will roll back even if it ends without an error."""
        return must_roll_back(self._connection)

    @property
    def cause(self) -> BaseException | None:
        """The error that made a rollback necessary, or the last error of a
        statement."""
        return cause_of_rollback(self._connection)

    def _hear(self, rollback: bool) -> None:
        self._rollback_requested = rollback

    def _note_commit(self) -> None:
        self.committed = True


@dataclass
class Scope:
    """What the messages sent in this context belong to: a session
    (`http_outbox/session.py`) or a stage's attempt (`consuming/modes.py`).

    `cause` is the message that a stage processes, from whose id its messages' ids are
    derived; `worker` is the process that runs the stage. `enlist`, if set, adds
    messages to the broker's transaction instead of the outbox. `stored` counts the
    stored messages by database alias. `join`, if set, is called before each INSERT on
    `using`, and returns the session id of the rows and the lock that the INSERT takes;
    `newest` is when the last INSERT had that lock, by the database's clock. Without a
    lock, `transactions` has the rows' transaction ids by connection, if the database
    reports them; threads may share a scope. `ended` means that the scope is over: code
    that runs longer, such as a task of an async view, still has it in its context, but
    its messages do not belong to the scope.
    """

    session_id: uuid.UUID
    using: str | None = None
    cause: Message | None = None
    stage: str = ""
    worker: str = ""
    enlist: Callable[[NewMessage], None] | None = None
    stored: dict[str, int] = field(default_factory=dict)
    ordinals: Iterator[int] = field(default_factory=itertools.count)
    join: Callable[[], tuple[uuid.UUID, int | None]] | None = None
    newest: dt.datetime | None = None
    transactions: dict[Any, str] = field(default_factory=dict)
    ended: bool = False


_scope: ContextVar[Scope | None] = ContextVar("django_txmsg_scope", default=None)
#: The threads that are running a stage's handler.
_inside: set[int] = set()


def current_scope() -> Scope | None:
    """Return the scope that messages sent now would belong to."""
    scope = _scope.get()
    return None if scope is None or scope.ended else scope


def enter_scope(entered: Scope | None) -> Scope | None:
    """Let messages sent from now on belong to `entered`, and return the former scope.

    For a scope that may end in another function, such as a request's under ASGI.
    """
    before = _scope.get()
    _scope.set(entered)
    return before


@contextmanager
def in_scope(entered: Scope) -> Iterator[Scope]:
    """Let messages sent inside the block belong to `entered`. Surrounds a stage's
    handler."""
    token = _scope.set(entered)
    _inside.add(threading.get_ident())
    try:
        yield entered
    finally:
        _inside.discard(threading.get_ident())
        _scope.reset(token)
        entered.ended = True


def handlers_running() -> int:
    """Return the number of threads of this process that are running a handler."""
    return len(_inside)


def _forked() -> None:
    """Leave the parent's scope in a forked child. Otherwise the child would continue
    its parent's count of messages, and derive the same ids for other messages."""
    _scope.set(None)
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
