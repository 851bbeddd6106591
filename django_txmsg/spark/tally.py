"""Counts of finished journeys, in the footer of the file that has the journeys' rows.
With the counts, journeys can be judged without reading the rows.

If rows are rewritten or files are merged, the new file has no counts, or counts that do
not match its rows. Such counts are ignored.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

#: The footer's key.
KEY = b"txmsg.over"
SUM = b"txmsg.over.crc32"
#: Most lines of a footer. A file with more destinations is read.
MOST = 5_000
_BY = ["sent_on", "destination", "sender", "consumer", "again", "receivers"]
_SUMS = {"sent_count": "sum", "sent_min": "min", "sent_max": "max"}
_EPOCH = dt.date(1970, 1, 1)
_DAY = 86_400_000_000


@dataclass(frozen=True)
class Line:
    """The counts of journeys of messages that one sender sent on the same day to the
    same destination, and one consumer received. Instants are in microseconds since
    1970."""

    sent_on: dt.date
    destination: str
    #: The service that sent them and the stage that received them, in lines that count
    #: what was received.
    sender: str | None
    consumer: str | None
    #: Whether they were delivered more than once.
    again: bool
    #: The consumers of messages sent to a topic, as JSON. These lines count what was
    #: sent; the others, of which a topic has one for each consumer, what was received.
    receivers: str | None
    messages: int
    first_us: int
    last_us: int


@dataclass(frozen=True)
class Tally:
    """The counts of all rows of a file."""

    lines: tuple[Line, ...]
    #: The longest time from when a message was due until it was processed.
    slowest_us: int

    @property
    def rows(self) -> int:
        """The number of journeys."""
        return sum(one.messages for one in self.lines)


@dataclass
class Tallying:
    """Counts the rows of a file while it is written. The counts have at most MOST
    lines."""

    slowest_us: int = 0
    _counted: list[pa.Table] = field(default_factory=list)

    def add(self, rows: pa.Table) -> None:
        """Add rows of finished journeys to the counts."""
        if self._counted and self._counted[0].num_rows > MOST:
            return
        # A message to a topic goes to who listens when it is due.
        due = pc.if_else(pc.is_valid(rows["receivers"]), rows["due_at"], None)
        sent = pc.coalesce(due, rows["stored_at"], rows["told_at"]).cast(pa.int64())
        self.slowest_us = max(self.slowest_us, pc.max(rows["took_us"]).as_py() or 0)
        columns = {
            "sent_on": pa.array(sent.to_numpy() // _DAY, pa.int32()),
            "destination": rows["destination"],
            "sender": rows["told_by"],
            "consumer": rows["consumer"],
            "again": pc.greater(rows["deliveries"], 1),
            "receivers": rows["receivers"],
            "sent": sent,
        }
        found = pa.table(columns).group_by(_BY)
        self._counted.append(
            found.aggregate([("sent", "count"), ("sent", "min"), ("sent", "max")])
        )
        whole = pa.concat_tables(self._counted).group_by(_BY)
        summed = whole.aggregate(list(_SUMS.items()))
        names = [*_BY, *(f"{name}_{how}" for name, how in _SUMS.items())]
        self._counted = [summed.select(names).rename_columns([*_BY, *_SUMS])]

    def footer(self) -> dict[bytes, bytes]:
        """Return the counts for the footer. Returns {} if they have more than MOST
        lines."""
        [summed] = self._counted
        if summed.num_rows > MOST:
            return {}
        lines = list(zip(*(one.to_pylist() for one in summed.columns), strict=True))
        noted = json.dumps({"slowest_us": self.slowest_us, "lines": lines}).encode()
        return {KEY: noted, SUM: str(crc32(noted)).encode()}


def tally_in(described: Any) -> Tally | None:
    """Return the counts in a file's footer. Returns None if there are none, or if they
    do not match the rows."""
    known = described.metadata or {}
    text = known.get(KEY, b"")
    # A page of the file has a checksum of its own; its footer has none.
    if not text or known.get(SUM) != str(crc32(text)).encode():
        return None
    noted = json.loads(text)
    lines = tuple(
        Line(_EPOCH + dt.timedelta(days=day), *rest) for day, *rest in noted["lines"]
    )
    tally = Tally(lines, noted["slowest_us"])
    return tally if tally.rows == described.num_rows else None
