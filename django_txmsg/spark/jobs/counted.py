"""Judges finished journeys from the counts in the footers of their files, without
reading the journeys."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from ..errors import EnvironmentFault
from ..lake import LakeTable
from ..lakefile import LakeFile
from ..tally import Line, Tally, tally_in
from ..transforms import MICROSECOND, instant, micros
from ..transforms.journeys import PROMPT
from ..transforms.reconcile import OUTCOME
from .listeners import Listener

#: Footers that are read at the same time: an object store is slow, but parallel.
_AT_ONCE = 16
#: Most lines of footers in memory at a time: some 150 MB.
LINES = 500_000
_Group = tuple[dt.date, str, str]


def tallies(
    place: LakeTable, named: Sequence[LakeFile]
) -> Iterator[tuple[LakeFile, Tally]]:
    """Yield each file whose footer counts all of its rows, with these counts. The
    largest files come first. All yielded counts together have at most LINES lines. A
    file whose counts would exceed this limit is omitted. Raises EnvironmentFault if a
    file is missing or damaged."""

    def read(one: LakeFile) -> Tally | None:
        path = f"{place.root}/{one.path}"
        try:
            with place.files.open_input_file(path) as stream:
                return tally_in(pq.read_metadata(stream))
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"{path} cannot be read ({error}). Run again; if it is lost, remove "
                f"the directory {place.root}, which the next run creates again."
            ) from error

    left = LINES
    named = sorted(named, key=lambda one: -one.rows)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for one, tally in zip(named, pool.map(read, named), strict=True):
            if tally is None or tally.rows != one.rows or len(tally.lines) > left:
                continue
            left -= len(tally.lines)
            yield one, tally


def usable(
    known: Mapping[LakeFile, Tally], late_after: dt.timedelta, since: dt.datetime | None
) -> dict[LakeFile, Sequence[Line]]:
    """Return the files whose messages can be judged from the counts. Each file comes
    with the counts that this run needs.

    No message of such a file took longer than `late_after`. If `since` is given, either
    all messages of the file were dispatched before `since`, or all of them were sent
    later. A file whose messages were dispatched before `since` comes without counts.
    """
    limit = int(late_after.total_seconds() * 1e6)
    start = None if since is None else micros(since)
    # A message that left later is not finished.
    left = PROMPT // MICROSECOND
    found: dict[LakeFile, Sequence[Line]] = {}
    for one, tally in known.items():
        if tally.slowest_us > limit:
            continue
        if start is None or min(line.first_us for line in tally.lines) >= start:
            found[one] = tally.lines
        elif max(line.last_us for line in tally.lines) + left < start:
            found[one] = ()
    return found


def received_by_all(
    lines: Iterable[Line], listeners: Mapping[str, Sequence[Listener]]
) -> bool:
    """Return True if the counted messages were received by exactly the stages that
    listened to their topics. `listeners` contains the stages of each topic. Returns
    False if a stage began or stopped listening while these messages were sent, because
    the counts do not show which messages that stage should have received."""
    for line in lines:
        if line.receivers is None:
            continue
        first, last = instant(line.first_us), instant(line.last_us)
        whole, partly = set(), False
        for one in listeners.get(line.destination, ()):
            if one.since <= first and (one.until is None or last < one.until):
                whole.add(one.consumer)
            elif one.since <= last and (one.until is None or first < one.until):
                partly = True
        if partly or whole != set(json.loads(line.receivers)):
            return False
    return True


def as_outcome(spark: SparkSession, lines: Iterable[Line]) -> DataFrame:
    """Return OUTCOME rows with the verdicts of the counted messages."""
    summed: dict[_Group, tuple[int, int, int]] = {}
    for line in lines:
        if line.receivers is not None:
            continue
        verdict = "redelivered_deduplicated" if line.again else "ok"
        key = (line.sent_on, line.destination, verdict)
        count, first, last = summed.get(key, (0, line.first_us, line.last_us))
        summed[key] = (
            count + line.messages, min(first, line.first_us), max(last, line.last_us)
        )  # fmt: skip
    rows = [
        (*key, count, instant(first), instant(last), None)
        for key, (count, first, last) in summed.items()
    ]
    return spark.createDataFrame(rows, OUTCOME)
