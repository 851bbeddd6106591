"""The messages that belong to the name of a `replay` or `send`, stored once."""

from __future__ import annotations

from .connection import Connection
from .errors import UsageError

_RUNS = "django_txmsg_storedrun"


def remember(connection: Connection, name: str, messages: int, ids: str) -> bool:
    """Record the messages that belong to a name: how many, and the sum of their ids.
    Returns whether the name is new. Messages stored before may be archived or pruned by
    now, and are not stored again.

    Raises UsageError if the name belongs to other messages.
    """
    if not messages:
        return False
    fresh = connection.execute(
        f"INSERT INTO {_RUNS} (name, messages, ids, stored_at)"
        f" VALUES (%s, %s, %s, {now_sql(connection)}) ON CONFLICT (name) DO NOTHING",
        name, messages, ids,
    )  # fmt: skip
    if fresh:
        return True
    [known] = connection.rows(
        f"SELECT messages, ids, stored_at FROM {_RUNS} WHERE name = %s", name
    )
    if tuple(known[:2]) != (messages, ids):
        raise UsageError(
            f"{name} has stored {known[0]:,} messages at {known[2]}, and these "
            f"{messages:,} are not the same. Nothing was stored: a name belongs to "
            "one selection of messages, so give this one another name."
        )
    return False


def now_sql(connection: Connection) -> str:
    """Return SQL for the instant at which a row is written, in a statement with
    parameters."""
    if connection.vendor == "postgresql":
        return "now()"
    return "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"
