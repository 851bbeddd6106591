"""Redelivers dead letters by a request to the app.

The app knows each dead letter's stage and what was processed already; it limits the
rate, can be paused, and records who asked.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ..rules import bulk_operation
from .connection import connect_plain
from .errors import UsageError
from .spec import SourceSpec
from .stored_run import remember

#: The id of a dead letter, and that of its message.
Letter = tuple[int, str]


def ask(
    spec: SourceSpec, name: str, letters: Sequence[Letter], *, rate: float, why: str
) -> int | None:
    """Have a service redeliver dead letters, and return the id of its bulk operation;
    None if there are none, or if a request with this name exists.

    Raises UsageError if that request was for others, and for a rate that no worker can
    keep.
    """
    if wrong := bulk_operation.wrong_rate(rate or None):
        raise UsageError(wrong)
    ids = sum(uuid.UUID(message).int for _, message in letters) % 2**128
    connection = connect_plain(spec)
    try:
        with connection.transaction():
            if not remember(connection, name, len(letters), f"{ids:032x}"):
                return None
            numbers = sorted(number for number, _ in letters)
            sql, values = bulk_operation.started(
                spec.vendor,
                kind="redeliver",
                filters={"ids": numbers},
                total=len(numbers),
                up_to=numbers[-1],
                by=f"pipeline: {name}",
                why=why,
                rate=rate or None,
            )
            return int(connection.value(sql, *values))
    finally:
        connection.close()
