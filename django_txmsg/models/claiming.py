"""The statement by which a worker claims rows of the outbox, of parked messages, or of
queues, and how many bytes a claim may load.

The statement locks the rows that it selects, skips rows that other claims have locked,
limits the number of rows and bytes, and marks the rows as claimed. The selection is
materialized: otherwise the planner might evaluate the selection twice, and claim more
rows than requested.

For hops 5 and 6 on `database://`, the size of all bodies that the sessions of one
process have claimed is limited. A claim copies a body several times, so only one
session at a time claims large bodies. The other sessions go on claiming small bodies,
because a handler may need an hour for a large body. But a session that holds bodies
claims none behind a large one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..runtime.per_process import Members, PerProcess
from .fields import Sql

#: Most bytes of message bodies that the claims of one process load into memory at a
#: time. A single larger message is claimed alone.
MAX_BYTES = 16 * 1024 * 1024

#: More bytes than any body has.
UNLIMITED = 2**62
#: Seconds of large bodies without a break, after which no more are claimed until all
#: are settled: a body larger than the limit can only be claimed then.
PATIENCE = 5.0


def claim_sql(
    sql: Sql,
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
      and may use `picked (id, due)`. `before` is a leading WITH clause.
    - If `rank` names a column, rows with a higher value come first.

    The parameters of the statement are those of `before`, `where`, `bounds()`,
    `assign`, `also` and `returning`, in this order.
    """
    ranked, highest = (f", c.{rank}", f"{rank} DESC, ") if rank else ("", "")
    return f"""
        {before + "," if before else "WITH"} found AS MATERIALIZED (
            SELECT c.id, c.{due} AS due, length(c.body) AS size{ranked} FROM {table} c
            WHERE {where}
            ORDER BY {highest and f"c.{highest}"}c.{due}, c.id LIMIT %s
            {sql.skip_locked}),
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


@dataclass(frozen=True, slots=True)
class Room:
    """The limit of one claim: bodies of `total` bytes together, or a single body of at
    most `alone` bytes."""

    total: int
    alone: int
    #: Whether to skip larger bodies and claim those behind them. To find such a body,
    #: the claim may read the whole queue.
    skips: bool = False

    @property
    def complete(self) -> bool:
        """Whether the claim may load a body of any size, if it loads only this body."""
        return self.alone == UNLIMITED

    @property
    def largest(self) -> int:
        """The size of the largest body that the claim may load."""
        return max(self.total, self.alone)


class Share:
    """One session's share of the process's limit."""

    def __init__(self) -> None:
        #: Bytes of its deliveries that are not settled.
        self.held = 0
        _claims().members.add(self)

    @contextmanager
    def claim(self, limit: int, wait: float) -> Iterator[Room]:
        """Yield the Room of one claim: how many bytes the block may claim. All sessions
        of the process share `limit` bytes. If this session holds no bodies, the call
        may wait up to `wait` seconds until another session has finished its claim.

        The block must increase `held` by the number of bytes that it has claimed.
        """
        claims = _claims()
        alone = not self.held and claims.large.acquire(timeout=wait)
        try:
            yield claims.room(self, limit, alone=alone)
        finally:
            if alone:
                claims.large.release()

    def leave(self) -> None:
        """Give up this session's share, so that other sessions can use it."""
        self.held = 0
        _claims().members.discard(self)


class _Claims:
    """The shares of all sessions of a process."""

    def __init__(self) -> None:
        self.members: Members[Share] = Members()
        #: Held by a session while it claims, if the claim may find a large body.
        self.large = threading.Lock()
        #: Since when there has always been a large body.
        self._crowded: float | None = None

    def room(self, share: Share, limit: int, *, alone: bool) -> Room:
        members = self.members.all()
        part = limit // max(1, len(members))
        total = max(0, part - share.held)
        if not alone:
            return Room(total, 0, skips=not share.held)
        large = sum(one.held for one in members if one.held > part)
        if not large:
            self._crowded = None
            return Room(total, UNLIMITED)
        now = time.monotonic()
        self._crowded = now if self._crowded is None else self._crowded
        patient = now - self._crowded < PATIENCE
        return Room(total, max(0, limit - large) if patient else 0, skips=True)


_claims = PerProcess(_Claims)
