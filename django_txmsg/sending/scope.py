"""What the messages sent in this context belong to: a session, a stage, or neither.

The middleware and the stages enter a scope; `send_message()` reads it.
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
    """Make messages sent from now on belong to `entered`, and return the scope before.

    For a scope that may end in another function, such as a request's under ASGI.
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
    """Return how many threads of this process are running a handler."""
    return len(_inside)


def _forked() -> None:
    """Messages of a forked child do not belong to its parent's scope: the child would
    continue with the same ordinals, and give other messages the same ids."""
    _scope.set(None)
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
