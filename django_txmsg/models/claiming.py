"""The statement by which a worker claims rows of the outbox, of parked messages, or of
queues.

The statement locks the rows that it selects, skips rows that other claims have locked,
limits the number of rows and bytes, and marks the rows as claimed. The selection is
materialized: otherwise the planner might evaluate the selection twice, and claim more
rows than requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.claimed_bytes import UNLIMITED
from .fields import skip_locked_sql

#: Most bytes of message bodies that the claims of one process load into memory at a
#: time. A single larger message is claimed alone.
MAX_BYTES = 16 * 1024 * 1024


def claim_sql(
    connection: Any,
    table: str,
    *,
    due: str,
    where: str,
    assign: str,
    returning: str,
    before: str = "",
    also: str = "TRUE",
    rank: str = "",
) -> str:
    """Return SQL that claims rows of `table`, in the order of the column `due`.

    - `where` is the condition on a candidate row `c`. A clock in it must be constant
      within the statement, so that an index scan can stop at the first row not due.
    - `assign`, `also` (a further condition) and `returning` refer to the row as `o`,
      and may use `picked (id, due)`. `before` is a leading CTE.
    - If `rank` names a column, rows with a higher value come first.

    The parameters of the statement are those of `before`, `where`, `bounds()`,
    `assign`, `also` and `returning`, in this order.
    """
    ranked, highest = (f", c.{rank}", f"{rank} DESC, ") if rank else ("", "")
    return f"""
        WITH {before and before + ","} found AS MATERIALIZED (
            SELECT c.id, c.{due} AS due, length(c.body) AS size{ranked} FROM {table} c
            WHERE {where}
            ORDER BY {highest and f"c.{highest}"}c.{due}, c.id LIMIT %s
            {skip_locked_sql(connection)}),
        picked AS MATERIALIZED (
            SELECT id, due FROM (
                SELECT id, due, size,
                    sum(size) OVER (ORDER BY {highest}due, id) AS total
                FROM found) AS summed
            WHERE total <= %s OR (size <= %s AND total = size))
        UPDATE {table} AS o SET {assign}
        WHERE o.id IN (SELECT id FROM picked) AND {also}
        RETURNING {returning}
    """  # noqa: S608 - constants only


def bounds(
    limit: int, max_bytes: int | None = None, *, alone: int = UNLIMITED
) -> Sequence[Any]:
    """Return the parameters that limit a claim to `limit` rows and to `max_bytes` (by
    default MAX_BYTES). If the first message alone has more than `max_bytes`, the claim
    takes only this message, or nothing if the message has more than `alone` bytes."""
    return [limit, MAX_BYTES if max_bytes is None else max_bytes, alone]
