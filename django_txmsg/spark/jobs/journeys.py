"""Maintains the lake's table of journeys. The table has one row for each message and
consumer.

The table covers the settled batches of the archive. A run adds new batches with one log
entry, which also removes the replaced files and records the last batches. So a killed
run has either added its batches completely or not at all. Days without new rows keep
their files.

A settled batch changes only if the lake or the database is restored from a backup: rows
may leave the batch (`amended`), or another batch may get its number. When `erase` or
`sweep --keep` removes rows from the archive, it removes the journeys of these messages,
too.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

import pyspark.sql.functions as sf
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import types as t
from pyspark.storagelevel import StorageLevel

from ..connection import connect_plain
from ..lake import app_name
from ..lakefile import LakeFile
from ..lock import Taken, keeping
from ..noted import MOST
from ..progress import Step, no_step
from ..runs import Run
from ..schemas import struct_of
from ..tally import Tally
from ..transforms import among, timestamp
from ..transforms.journeys import (
    EXPECTED,
    JOURNEY,
    KEPT,
    LETTERS,
    RECEIVED,
    SENT,
    kept,
    mark,
    merged,
    parted,
    steps,
)
from .counted import tallies
from .listeners import Listener
from .reading import WholeLog, day_of

#: The definition of a journey and its format. Journeys of another version are rebuilt.
VERSION = 8
#: Operations of the Delta library that do not change a table's content.
_HARMLESS = frozenset(["ADD COLUMN", "OPTIMIZE", "VACUUM START", "VACUUM END"])


@dataclass(frozen=True)
class Looked:
    """One archived table at one version of its log. `batches` maps each service to the
    last batch whose rows are only in the lake."""

    lake_id: str
    version: int
    #: When that version's entry was made, in milliseconds: after a backup, a version
    #: may exist twice.
    at: int
    batches: Mapping[str, int]


#: The tables from which journeys are built, by name.
Tables = Mapping[str, Looked]


def looked_at(log: WholeLog, name: str) -> Looked:
    """Return the current state of an archived table, with the number of each service's
    last settled batch. This number is 0 if the log has no batch numbers for one of the
    service's files, or if the service's marks cannot be read."""
    delta, named = log.files_of(name)
    services = [one.service for one in log.live]
    if delta is None or log.lake is None:
        return Looked("", 0, 0, dict.fromkeys(services, 0))
    place = log.lake.table(name, t.StructType())
    [entry] = delta.history(1)
    lake_id = str(delta.metadata().id)
    silent = {one.service for one in named if one.batches is None}
    last = dict.fromkeys(services, 0)
    for one in last.keys() - silent:
        settled = log.settled(one, name, lake_id)
        last[one] = min(settled, place.last(delta, "archive", one))
    return Looked(lake_id, entry["version"], entry["timestamp"], last)


def log_entry(service: str, tables: Tables) -> dict[str, Any]:
    """Return the metadata for a log entry. It records the last batches that the
    journeys of a service contain."""
    noted = {name: asdict(one) for name, one in tables.items()}
    return {"version": VERSION, "service": service, "tables": noted}


def brought(delta: DeltaTable, service: str) -> Tables:
    """Return the batches that the journeys of a service contain, as recorded in the
    table's log. Returns {} if there is no record, or if another program has changed the
    table since then."""
    for entry in _newest_first(delta):
        noted = _noted(entry)
        if noted is None and entry["operation"] not in _HARMLESS:
            return {}
        mine = (noted or {}).get("journeys", {})
        if mine.get("service") == service:
            tables = mine["tables"] if mine["version"] == VERSION else {}
            return {name: Looked(**one) for name, one in tables.items()}
    return {}


def _newest_first(delta: DeltaTable) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log, newest first. Entries are loaded a few at a time,
    because each is a separate file."""
    seen, wanted = 0, 8
    while True:
        entries = delta.history(wanted)
        yield from entries[seen:]
        if len(entries) < wanted:
            return
        seen, wanted = wanted, 8 * wanted


def stands(log: WholeLog, known: Tables, present: Tables) -> Tables | None:
    """Return the batches of the journeys that a run can build on. `known` are the
    batches in the journeys, and `present` those in the archive. Returns {} if the run
    must rebuild the journeys.

    Returns None if the run must leave the journeys alone. They belong to more services,
    or contain more than the queried databases: a replica that lags behind, or a backup
    whose archive has not run yet."""
    if not known:
        return {}
    ours = {one.service for one in log.live}
    theirs = {service for one in known.values() for service in one.batches}
    if ours != theirs:
        return None if ours < theirs else {}
    usable: Tables | None = known
    for name, now in present.items():
        then = known[name]
        if not any(then.batches.values()):
            continue
        delta, _ = log.files_of(name)
        if delta is None or then.lake_id != now.lake_id or not _as_it_was(delta, then):
            return {}
        if any(then.batches[one] > now.batches[one] for one in ours):
            usable = None
    return usable


def _as_it_was(delta: DeltaTable, then: Looked) -> bool:
    """Return True if all rows of the batches in `then` are unchanged in the archive."""
    count = delta.version() - then.version + 1
    entries = delta.history(count) if count > 0 else []
    if not entries or (entries[-1]["version"], entries[-1]["timestamp"]) != (
        then.version, then.at,
    ):  # fmt: skip
        return False
    return not any(_changes(one, then.batches) for one in entries[:-1])


def _changes(entry: Mapping[str, Any], seen: Mapping[str, int]) -> bool:
    noted = _noted(entry)
    if noted is None:
        return entry["operation"] not in _HARMLESS
    if "amended" not in noted:
        return False
    last = seen.get(noted["service"], 0)
    return any(low <= last for low, _ in noted["touched"])


def _noted(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata that this package added to a log entry. Returns None if it
    added none."""
    return json.loads(entry["txmsg"]) if entry.get("txmsg") else None


NAME = "journeys"
#: Number of rows from which on it pays to look for rows that need no merging. Fewer are
#: merged and rewritten together, which takes less time than looking.
MANY = 100_000
#: Number of files of a day from which on they are merged.
CROWD = 16
#: Most messages whose marks are sent to every task.
BROADCAST = 1_000_000
_STRUCT = struct_of(KEPT, "service string, day date")
#: The source tables, and the columns that are read from them.
_SIDES = {"outbox": SENT, "inbox": RECEIVED, "dead_letters": LETTERS}


class Journeys:
    """The journeys of several services, in the lake of the first service.

    They are read from one version of the table, even if another process changes the
    table. With `keep`, the run adds new batches, unless another run holds the lock. If
    there is no lake, there are no journeys.
    """

    def __init__(
        self,
        log: WholeLog,
        run: Run,
        *,
        keep: bool = True,
        on_step: Step = no_step,
    ) -> None:
        self.log, self.run, self.keep, self.on_step = log, run, keep, on_step
        self.service = log.spec.service().service
        self.named: list[LakeFile] = []
        #: Files of finished journeys, if it pays to leave some unchanged.
        self.known: dict[LakeFile, Tally] = {}
        #: The table's present and intended content; nothing if it is of no use to this
        #: run.
        self.through: Tables = {}
        self.goal: Tables = {}

    def __enter__(self) -> Journeys:
        with ExitStack() as stack:
            self._look(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _look(self, stack: ExitStack) -> None:
        if self.log.lake is None:
            return
        self.place = self.log.lake.table(NAME, _STRUCT)
        present = {table: looked_at(self.log, table) for table in _SIDES}
        keep = self.keep and any(any(one.batches.values()) for one in present.values())
        keep = keep and self._alone(stack)
        delta = self.place.ensure() if keep else self.place.load()
        if delta is None:
            return
        self.delta = delta
        self.named = self.place.named(delta, self.service)
        known = stands(self.log, brought(delta, self.service), present)
        if known is None:
            return
        self.through, self.goal = known, present if keep else known
        self._count(())

    def _count(self, fresh: Sequence[LakeFile]) -> None:
        """Read the counts from the footers of the files. `fresh` lists the files that
        were added since the last call. If earlier counts are known, only the fresh
        files are read."""
        if self.large:
            known, named = self.known, set(self.named)
            self.known = {one: known[one] for one in known if one in named}
            self.known |= tallies(self.place, fresh if known else self.named)

    def _alone(self, stack: ExitStack) -> bool:
        """Take the lock on the journeys until the end of this run. Returns False if
        another run holds it."""
        source = self.log.spec.service()
        connection = stack.enter_context(connect_plain(source))
        with suppress(Taken):
            stack.enter_context(keeping(connection, source))
            return True
        return False

    def read(self, but: Container[LakeFile] = ()) -> DataFrame | None:
        """Return the JOURNEY rows of all files except `but`. Each key has one row.
        Returns None if there are no journeys."""
        if not self.through:
            return None
        named = [one for one in self.named if one not in but]
        return self._of(named, *JOURNEY.fieldNames())

    def _of(self, named: list[LakeFile], *columns: str) -> DataFrame:
        return self.place.read(self.log.spark, named=named, columns=columns)

    @property
    def large(self) -> bool:
        """Whether the table has so many rows that a run should rewrite only the files
        that must change, and leave all others unchanged."""
        rows = sum(one.rows for one in self.named)
        return bool(self.through) and rows >= MANY

    def rest(
        self, since: dt.datetime | None = None, messages: Collection[str] = ()
    ) -> DataFrame:
        """Return the steps that no journey contains after `catch_up()`. They are in the
        databases and in unsettled batches. With `since`, return the steps of messages
        that were sent or became due since then, and of `messages`. Some steps of other
        messages may be among them."""
        if since is not None and len(messages) <= MOST:
            return steps(*self._recent(since, messages))
        return steps(*self._all())

    def _all(self) -> list[DataFrame]:
        return [self._unsettled(*side) for side in _SIDES.items()]

    def _unsettled(self, table: str, struct: t.StructType, **more: Any) -> DataFrame:
        above = self._last(self.goal, table) if self.goal else None
        return self.log.read(table, struct, above=above, **more)

    def _recent(self, since: dt.datetime, messages: Collection[str]) -> list[DataFrame]:
        day = day_of(since)
        ids = ", ".join(f"'{uuid.UUID(one).hex}'" for one in messages)

        def read(table: str, struct: t.StructType, *clocks: str) -> DataFrame:
            tests = [f"t.{clock} >= {{day}}" for clock in clocks]
            keys = [n for n in ("message_id", "replaced_by") if n in struct.names]
            tests += [f"t.{key} IN ({ids})" for key in keys if ids]
            where = f"({' OR '.join(tests)})"
            # What was due or resolved since may have been archived long before.
            whole = bool(ids) or (table != "inbox" and not self.goal)
            more: dict[str, Any] = {"whole": whole}
            if table == "outbox":
                more["only"] = among(messages)
                for clock in clocks:
                    more["only"] |= sf.col(clock) >= sf.lit(day)
            return self._unsettled(table, struct, since=day, where=where, **more)

        again = t.StructType([*SENT.fields, t.StructField("replay_id", t.StringType())])
        sent = read("outbox", again, "created_at", "due_at", "dispatched_at")
        letters = read("dead_letters", LETTERS, "created_at", "resolved_at")
        resent = sent
        if self.goal:
            last = self._last(self.goal, "outbox")
            settled = self.log.archived("outbox", again, {}, last, since=day)
            resent = sent.unionByName(settled)
        left = sf.greatest("created_at", "due_at", "dispatched_at") >= timestamp(since)
        those = resent.where(left).where("replay_id <> ''").select("message_id")
        received = read("inbox", RECEIVED, "first_received_at", "last_received_at")
        sent = sent.select(*SENT.fieldNames())
        # A message that was replayed may have been sent, received and buried long ago.
        found = {one.message_id for one in those.distinct().limit(MOST + 1).collect()}
        if found <= set(messages):
            return [sent, received, letters]
        if len(named := found.union(messages)) <= MOST:
            return self._recent(since, named)
        return self._all()

    @cached_property
    def fresh(self) -> DataFrame | None:
        """JOURNEY rows of the batches that were settled since the last run. None if
        there are none."""
        if all(self._last(self.goal, n) == self._last(self.through, n) for n in _SIDES):
            return None
        rows = steps(
            *(
                self.log.archived(
                    table, struct, self._last(self.through, table),
                    self._last(self.goal, table),
                )
                for table, struct in _SIDES.items()
            )
        )  # fmt: skip
        return merged(rows).localCheckpoint(storageLevel=StorageLevel.DISK_ONLY)

    def catch_up(self, listening: Sequence[Listener] = ()) -> None:
        """Add the batches that were settled since the last run. `listening` are the
        listeners of topics. Raises Overtaken if another run has changed the journeys
        of this service."""
        fresh = self.fresh
        if fresh is None:
            return
        marks = marks_of(fresh) if self.large else None
        old, others = self.concerned(marks, crowd=CROWD), None
        if self.through:
            known = self._of(old, *KEPT.fieldNames())
            if marks is not None:
                # Of a message with something new, all journeys are at hand. Others
                # remain what they are: some of their journeys may be in other files.
                known, others = parted(known, marks)
            fresh = merged(fresh.unionByName(known.select(*JOURNEY.fieldNames())))
        spark = self.log.spark
        rows = kept(fresh, spark.createDataFrame(map(astuple, listening), EXPECTED))
        if others is not None:
            rows = rows.unionByName(others)
        # Few files: each day is written by one task. To split them evenly, Spark would
        # first compute all rows, which is expensive.
        days = rows.repartition(sf.to_date("begun_at"))
        rows = days.sortWithinPartitions("over", "begun_at")
        results = self.run.results(self.log.spec.lake_spec(), self.service)
        results = replace(results, clock="begun_at", apart="over")
        files = results.write(NAME, KEPT, rows)
        self.on_step("written")
        number = self.place.last(self.delta, NAME, self.service) + 1
        self.place.commit(
            self.delta, files, replaced=old,
            app=(app_name(NAME, self.service, NAME), number),
            metadata={NAME: log_entry(self.service, self.goal)},
        )  # fmt: skip
        self.on_step("committed")
        self.named = [*set(self.named).difference(old), *files]
        self.through = self.goal
        del self.fresh  # asked again, there is nothing more
        self._count(files)

    def _last(self, tables: Tables, table: str) -> Mapping[str, int]:
        """Return the number of each service's last batch of a table."""
        known = tables[table].batches if tables else {}
        return {one.service: known.get(one.service, 0) for one in self.log.live}

    def concerned(self, marks: DataFrame | None, crowd: int = 0) -> list[LakeFile]:
        """Return the files that may contain journeys of the marked messages. A file is
        of one of two kinds: it has either finished or open journeys. If a day has at
        least `crowd` files of one kind, these files are returned, too."""
        if marks is None:
            return self.named
        hit = set()
        if not marks.isEmpty():
            for over in (True, False):
                named = [one for one in self.named if (one in self.known) is over]
                if not named:
                    continue
                there = self._of(named, "mark", "day")
                found = there.join(sf.broadcast(marks), "mark", "left_semi")
                days = found.select("day").distinct().collect()
                hit |= {(day, over) for (day,) in days}
        kinds = {one: (one.day, one in self.known) for one in self.named}
        if crowd:
            hit |= {kind for kind, n in Counter(kinds.values()).items() if n >= crowd}
        return [one for one, kind in kinds.items() if kind in hit]


def marks_of(rows: DataFrame, found: bool = True) -> DataFrame | None:
    """Return the marks (short hashes) of the messages in `rows`, or None if there are
    too many marks to send to every task. Pass `found=False` if `rows` is known to be
    empty; then no rows are read."""
    if not found:
        return rows.sparkSession.createDataFrame([], "mark long")
    marks = rows.select(mark().alias("mark")).distinct().localCheckpoint()
    return marks if marks.count() <= BROADCAST else None
