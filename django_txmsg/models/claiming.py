"""The one statement by which a worker takes rows: outbox, parked messages, queues.

It chooses under locks that others skip, bounds what was chosen in rows and in bytes,
and marks it as taken, all in one go. What it chose is materialized: nothing makes the
planner choose twice, and take more than was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .fields import skip_locked_sql

#: Bytes of message bodies that the claims of one process bring into memory at a time.
#: A single larger message is taken alone.
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
    """Return SQL that takes rows of `table`, the first ones by their column `due`.

    `where` speaks of candidates as `c` and needs no clock that moves within the
    statement: an index can then end the search at the first row that is not due.
    `assign`, `also` (a last condition) and `returning` speak of the row as `o`, and may
    look at `picked (id, due)`. `before` is a CTE to begin with. Higher values of the
    column `rank` come first, whatever is due first. The parameters come in this order:
    of `before`, of `where`, then `bounds()`, of `assign`, of `also`, of `returning`.
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
            WHERE total <= %s OR (%s AND total = size))
        UPDATE {table} AS o SET {assign}
        WHERE o.id IN (SELECT id FROM picked) AND {also}
        RETURNING {returning}
    """  # noqa: S608 - constants only


def bounds(
    limit: int, max_bytes: int | None = None, *, larger: bool = True
) -> Sequence[Any]:
    """Return the parameters that bound a claim in rows and in bytes, MAX_BYTES unless
    said. `larger` lets a single message be larger than that."""
    return [limit, MAX_BYTES if max_bytes is None else max_bytes, larger]
