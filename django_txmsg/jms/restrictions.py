"""Warns of asynchronous sends inside ``transaction.atomic()`` or on an event loop, or
forbids them.

Inside ``transaction.atomic()``, use the outbox instead, because a rollback cannot take
back a message that a broker has stored. On an event loop, a send blocks the loop while
the window is full. This module does not import Django. It uses Django only if the
process has already imported Django.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from enum import Enum

from .errors import IllegalStateError

_IN_ATOMIC = (
    "An asynchronous send inside transaction.atomic() reaches the broker even if the "
    "transaction is rolled back. Use django_txmsg.send_message(), which stores the "
    "message in the outbox with the transaction."
)
_ON_LOOP = (
    "An asynchronous send on a running event loop blocks the loop while the window is "
    "full. Send from a thread: await asyncio.to_thread(producer.submit, message)."
)


class Policy(str, Enum):
    """What to do with an asynchronous send inside ``transaction.atomic()`` or on an
    event loop."""

    ALLOW = "allow"
    WARN = "warn"
    FORBID = "forbid"


def check(in_atomic: Policy, on_event_loop: Policy) -> None:
    """Apply the connection's policies to a send that has a listener or a future.

    Raises ``IllegalStateError`` if a policy forbids the send.
    """
    if in_atomic is not Policy.ALLOW and _inside_atomic_block():
        _apply(in_atomic, _IN_ATOMIC)
    if on_event_loop is not Policy.ALLOW and _on_running_loop():
        _apply(on_event_loop, _ON_LOOP)


def _apply(policy: Policy, text: str) -> None:
    if policy is Policy.FORBID:
        raise IllegalStateError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _inside_atomic_block() -> bool:
    """Return whether a Django database connection of this thread is inside
    ``atomic()``."""
    database = sys.modules.get("django.db")
    if database is None:
        return False
    opened = database.connections.all(initialized_only=True)
    return any(connection.in_atomic_block for connection in opened)


def _on_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
