"""What the messages sent in this context belong to: a session, a stage, or neither.

The middleware and the stages enter a scope; `send_message()` asks for it.
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

from ..envelope.message import Message
from ..models.outbox_store import NewMessage


@dataclass
class Scope:
    """What the messages sent in this context belong to: a session, as
    `http_outbox/session.py` makes it, or a stage's attempt (`consuming/attempt.py`).

    `cause` is the message that a stage processes; its own messages get ids derived
    from it, and `worker` is the process that does so. `enlist`, when set, takes
    messages into the broker's transaction instead of the outbox. `stored` counts the
    messages stored, by database alias. `join`, when set, is called before each INSERT
    on `using`, and says as which session's the rows are stored and which lock the
    INSERT takes: `newest` is when the last of them had it, by the database's clock.
    Without a lock, `transactions` has the id of theirs, where databases tell, by their
    connection: threads may share a scope. `ended` says that it is over: code that
    outlives it, as an async view's task may, has taken it along in its context, and
    what is sent there is not of this scope.
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
#: The threads that are in a stage's handler.
_inside: set[int] = set()


def current_scope() -> Scope | None:
    """Return the scope that messages sent now would belong to."""
    scope = _scope.get()
    return None if scope is None or scope.ended else scope


def enter_scope(entered: Scope | None) -> Scope | None:
    """Make messages sent from now on belong to `entered`, and return what was before.

    For a scope that does not end where it began, as a request's under ASGI.
    """
    before = _scope.get()
    _scope.set(entered)
    return before


@contextmanager
def in_scope(entered: Scope) -> Iterator[Scope]:
    """Make messages sent inside belong to `entered`: around a stage's handler."""
    token = _scope.set(entered)
    _inside.add(threading.get_ident())
    try:
        yield entered
    finally:
        _inside.discard(threading.get_ident())
        _scope.reset(token)
        entered.ended = True


def handlers_running() -> int:
    """Return how many threads of this process are in a handler."""
    return len(_inside)


def _forked() -> None:
    """What a child sends is not of its parent's scope: it would count on from the same
    ordinal, and give other messages the same ids."""
    _scope.set(None)
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
