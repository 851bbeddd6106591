"""Whether a transaction has committed, queried from another connection.

PostgreSQL answers by the transaction's id, at once and for certain. On other databases
the control message's receiver waits instead (`control_receive.py`).
"""

from __future__ import annotations

import enum
from typing import Any

from django.db import DatabaseError, connections

from ..runtime import database_health

#: PostgreSQL's status texts. NULL: the id is too old to be known.
_STATUS = "SELECT pg_xact_status(CAST(%s AS text)::xid8)"
_MARK = "SELECT CAST(pg_current_xact_id() AS text)"


class Verdict(enum.Enum):
    """The known state of a transaction."""

    IN_PROGRESS = "in progress"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


def can_tell(connection: Any) -> bool:
    """Return whether this database supports the query."""
    return bool(connection.vendor == "postgresql")


def transaction_id(connection: Any) -> str:
    """Return the id of the open transaction, with or without savepoints."""
    with connection.cursor() as cursor:
        cursor.execute(_MARK)
        (mark,) = cursor.fetchone()
    return str(mark)


def ask(using: str, mark: str) -> Verdict:
    """Return the outcome of the transaction with this id.

    UNKNOWN if the server does not know the id: a standby that was promoted before the
    transaction reached it, or a very old id.
    """
    try:
        with connections[using].cursor() as cursor:
            cursor.execute(_STATUS, [mark])
            (status,) = cursor.fetchone()
    except DatabaseError as error:
        if database_health.sqlstate(error) in _NOT_KNOWN:
            return Verdict.UNKNOWN
        raise
    return Verdict.UNKNOWN if status is None else Verdict(status)


#: invalid_parameter_value ("is in the future"), invalid_text_representation,
#: undefined_function and undefined_object (a server older than 13).
_NOT_KNOWN = frozenset({"22023", "22P02", "42883", "42704"})
