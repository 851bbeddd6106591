"""The scope of the messages that are sent in this context: a session of the HTTP
outbox, a stage, or none.

The middleware and the stages enter a scope. `send_message()` reads the scope.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import heapq
import itertools
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from django.db import connections, router, transaction

from .. import conf, wire
from ..django_internals import (
    LateAtomic,
    begun_by_hand,
    cause_of_rollback,
    depth,
    has_ended,
    hear_rollbacks,
    in_block,
    is_broken,
    last_hook,
    must_roll_back,
    note_errors,
    roll_back_blocks,
)
from ..envelope.message import Message
from ..models import OutboxMessage
from ..models.outbox_store import NewMessage

# The transaction in which messages are sent: hop 1's in a request, hop 7's in a
# stage.
#
# Both use this block. It begins with the first use of the database, records whether
# it has committed, and distinguishes a requested rollback from one that an error made
# necessary.


class Block:
    """An atomic block for one use. One function may enter the block and another
    function may exit it.

    `isolation` and `reading` are those of `LateAtomic`. `committed` is true after the
    transaction has committed, even if a hook raised an exception after the commit.
    `nested` means that the block is a part of an outer transaction, whose commit the
    block does not control: of an `atomic()` block, or with autocommit off.
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
        self.nested = in_block(self._connection) or (
            not begun and begun_by_hand(self._connection)
        )
        self._atomic.enter(begun=begun)
        self._depth = depth(self._connection)
        self._endings = [
            note_errors(self._connection),
            hear_rollbacks(self._connection, self._hear),
        ]
        if not self.nested:
            # The first hook of all: any other hook that raises does so after the
            # commit.
            transaction.on_commit(self._note_commit, using=self.using)

    def exit(self, error: BaseException | None) -> None:
        """Commit, or roll back if there is an `error` or `set_rollback()` was called.
        Inner blocks that were not left are rolled back first. Raises the error that
        prevented the commit, or the error of a hook after the commit."""
        for end in self._endings:
            end()
        roll_back_blocks(self._connection, self._depth)
        self._atomic.exit(error)

    @property
    def employed(self) -> bool:
        """Whether the block used the database. Creating a savepoint counts."""
        return self._atomic.begun

    @property
    def left_open(self) -> bool:
        """Whether an `atomic()` block was entered inside this block and not left."""
        return depth(self._connection) > self._depth

    @property
    def spoiled(self) -> bool:
        """Whether an error inside the block prevents a commit, even if the error was
        caught."""
        return is_broken(self._connection) or (
            must_roll_back(self._connection) and not self._rollback_requested
        )

    @property
    def rolls_back(self) -> bool:
        """Whether the block will roll back even if it ends without an error."""
        return must_roll_back(self._connection)

    @property
    def cause(self) -> BaseException | None:
        """The error that forces the transaction to roll back. If there is none, the
        last error of a statement."""
        return cause_of_rollback(self._connection)

    def _hear(self, rollback: bool) -> None:
        self._rollback_requested = rollback

    def _note_commit(self) -> None:
        self.committed = True


class CommitHook:
    """A hook after the commit, which holds the numbers of messages. If Django drops
    the hook, because the messages were rolled back, their numbers are free again.

    Python deletes the dropped hook at once. If something still refers to the hook, the
    numbers stay taken. They also stay taken if the transaction was committed, and an
    earlier hook's error has kept Django from calling this hook.
    """

    def __init__(self, alias: str) -> None:
        self._connection: Any = connections[alias]
        #: A TestCase runs hooks in the middle of its transaction.
        self.called = False
        self.numbers: list[tuple[Numbers, int]] = []

    def __call__(self) -> None:
        self.called = True

    def __del__(self) -> None:
        if not (self.called or has_ended(self._connection)):
            for numbers, number in self.numbers:
                heapq.heappush(numbers.free, number)


class Numbers:
    """The numbers 0, 1, 2, … of messages that have the same content."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self._unused = itertools.count()

    def take(self, alias: str | None = None) -> int:
        """Return the lowest free number. If the number is for a message in the open
        transaction of the database `alias`, a rollback of the message frees it."""
        try:
            number = heapq.heappop(self.free)
        except IndexError:
            number = next(self._unused)
        if alias is not None and in_block(connections[alias]):
            hook = last_hook(connections[alias])
            if not isinstance(hook, CommitHook) or hook.called:
                hook = CommitHook(alias)
                connections[alias].on_commit(hook, robust=True)
            hook.numbers.append((self, number))
        return number


@dataclass
class Scope:
    """The session (`http_outbox/session.py`) or the stage's attempt
    (`consuming/modes.py`) to which messages sent in this context belong. Threads may
    share a scope.

    - `cause` is the message that a stage processes. The ids of the stage's messages are
      derived from the id of `cause`. `worker` is the process that runs the stage.
    - `numbers` number the messages. `separate` means that the messages do not commit
      together with the stage's work. Messages that are sent in any thread other than
      `thread` also commit separately, because such a thread has its own connection.
    - `enlist`, if set, adds messages to the broker's transaction, or keeps them until
      the handler returns, instead of storing them. `blocks`, if set, says how many
      atomic blocks were open on each connection before the handler ran. A message that
      the handler sends in a block of its own is not enlisted, but stored there.
    - `stored` counts the stored messages by database alias.
    - `session` is the outbox session, if the scope is one's. Its `join()` is called
      before each INSERT on `using`. It returns the session id of the rows, and the lock
      that the INSERT takes, if any. `newest` is the database's clock at the last INSERT
      with such a lock.
    - `transactions` maps each connection to the id of the last transaction that stored
      rows without such a lock, if the database reports this id.
    - `ended` means that messages sent from now on do not belong to the scope. Code that
      runs longer, such as a task of an async view, still has the scope in its context.
    """

    session_id: uuid.UUID
    using: str | None = None
    cause: Message | None = None
    stage: str = ""
    worker: str = ""
    enlist: Callable[[Sequence[NewMessage]], None] | None = None
    blocks: Mapping[Any, int] | None = None
    stored: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Numbers] = field(default_factory=lambda: defaultdict(Numbers))
    separate: bool = False
    thread: int = field(default_factory=threading.get_ident)
    newest: dt.datetime | None = None
    transactions: dict[Any, str] = field(default_factory=dict)
    session: Any = None
    ended: bool = False

    def of_block(self, alias: str) -> Scope:
        """Return the scope of a message that is sent in the database `alias`. In a
        block that the handler has opened itself, the message commits with the block."""
        if self.blocks is None:
            return self
        connection = connections[alias]
        own = depth(connection) > self.blocks.get(connection, 0)
        return self.apart() if own else self

    def apart(self) -> Scope:
        """Return the scope of messages that are stored in another transaction than the
        stage's work."""
        return replace(self, enlist=None, separate=True)

    def derived_id(
        self,
        alias: str,
        content: Callable[[], tuple[object, ...]] = tuple,
        *,
        by_content: bool = False,
    ) -> uuid.UUID:
        """Return the id of the next message that the stage stores in the database
        `alias`.

        Usually, the id is derived from the message's position among the stage's
        messages. But a message that commits separately stays stored if the attempt
        fails later. The next attempt may skip this message, and then the messages after
        it have other positions. So if a message commits separately, its id is derived
        from its content, and from a number: how many such messages the attempt has sent
        and not rolled back. With `by_content`, this is so for any message. `content` is
        called only in these two cases.
        """
        assert self.cause is not None
        service, cause, stage = conf.get().SERVICE, self.cause.id, self.stage
        elsewhere = alias != self.using or threading.get_ident() != self.thread
        separate = self.enlist is None and (self.separate or elsewhere)
        if not (separate or by_content):
            return wire.derived_id(service, cause, stage, self.numbers[""].take())
        identified = repr((alias, *content()))
        digest = hashlib.sha256(identified.encode()).hexdigest()
        number = self.numbers[digest].take(alias)
        return wire.derived_id(service, cause, stage, number, digest)


_scope: ContextVar[Scope | None] = ContextVar("django_txmsg_scope", default=None)


def current_scope() -> Scope | None:
    """Return the scope of messages that are sent now, or None."""
    scope = _scope.get()
    return None if scope is None or scope.ended else scope


def alias_of(using: str | None) -> str:
    """Return the alias of the database in which messages sent now are stored: `using`,
    the database of the current scope, or the outbox's."""
    current = current_scope()
    inherited = None if current is None else current.using
    return using or inherited or str(router.db_for_write(OutboxMessage))


def enter_scope(entered: Scope | None) -> Scope | None:
    """Make `entered` the scope of messages that are sent from now on, and return the
    previous scope. Use this for a scope that may end in another function, such as the
    scope of a request under ASGI."""
    before = _scope.get()
    _scope.set(entered)
    return before


@contextmanager
def in_scope(entered: Scope) -> Iterator[Scope]:
    """Make `entered` the scope of messages that are sent inside the block. Use this
    around a stage's handler."""
    token = _scope.set(entered)
    try:
        yield entered
    finally:
        _scope.reset(token)
        entered.ended = True


def _forked() -> None:
    """Leave the scope in a forked child process. Otherwise the child would continue the
    parent's numbering of messages, and so give its own messages the ids of the parent's
    messages."""
    _scope.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
