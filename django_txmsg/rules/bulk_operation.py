"""Asking for something to be done to dead letters: one row, whoever asks.

What is to be done with each of them is `dead_letters/`'s to know; a consumer, or who
has asked, works the row off from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Dead letters of the first batch. The next ones are larger.
FIRST_BATCH = 100
#: The least and the most messages a second that can be asked for.
RATES = 0.001, 1_000_000


def wrong_rate(rate: float | None) -> str:
    """Return what is wrong with a number of messages a second, or ""."""
    if rate is None or RATES[0] <= rate <= RATES[1]:
        return ""
    return (
        f"The rate must be greater than zero: between {RATES[0]:g} and "
        f"{RATES[1]:,} messages a second, not {rate:g}."
    )


def started(
    vendor: str,
    *,
    kind: str,
    filters: Mapping[str, Any],
    total: int,
    up_to: int,
    by: str,
    why: str,
    force: bool = False,
    rate: float | None = None,
) -> tuple[str, list[Any]]:
    """Return the statement, and its parameters, that stores a running bulk operation
    and returns its id.

    `filters` choose the dead letters, `total` of them, with ids up to `up_to`; `rate`
    are messages a second at most.
    """
    as_json = "%s::jsonb" if vendor == "postgresql" else "%s"
    values = {
        "kind": kind,
        "filter": json.dumps(dict(filters)),
        "force": force,
        "by": by[:255],
        "why": why[:255],
        "rate": rate,
        "total": total,
        "done": 0,
        "skipped": 0,
        "skipped_why": "{}",
        "cursor": 0,
        "up_to": up_to,
        "batch_size": FIRST_BATCH,
        "state": "running",
        "last_error": "",
    }
    places = [as_json if name in ("filter", "skipped_why") else "%s" for name in values]
    names = ", ".join(f'"{name}"' for name in values)
    sql = (
        f"INSERT INTO django_txmsg_bulkoperation ({names})"  # noqa: S608 - constants only
        f" VALUES ({', '.join(places)}) RETURNING id"
    )
    return sql, list(values.values())
