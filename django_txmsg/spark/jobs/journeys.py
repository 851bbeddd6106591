"""The lake's table of journeys: one row for each message and consumer, kept up batch by
batch.

It holds what the archive's settled batches say. One entry of its log brings the rows of
new batches, takes the files out that they have made old, and says up to which batches
it goes: a run that is killed has done all of it or nothing. Days that no new row
concerns are left as they are.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import pyspark.sql.functions as sf
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

from ..connection import connect_plain
from ..errors import EnvironmentFault
from ..lakefile import LakeFile
from ..lakelog import Named
from ..laketable import CommitFailedError, app_name
from ..lock import Taken, keeping
from ..runs import Run
from ..transforms.instants import timestamp
from ..transforms.journeys import JOURNEY, RECEIVED, SENT, merged, steps
from .brought import Standing, Tables, batches, brought, looked_at, stands, told
from .reading import WholeLog
from .steps import Step, no_step

NAME = "journeys"
#: Rows from which on those are looked for that nothing is added to. Fewer are added up
#: and written anew together, which takes less time than looking.
MANY = 100_000
#: Messages whose marks go to every task, at most.
BROADCAST = 1_000_000
_STRUCT = t.StructType(
    [
        *JOURNEY.fields,
        t.StructField("service", t.StringType()),
        t.StructField("day", t.DateType()),
    ]
)
#: Of which tables, and the columns that are read of them.
_SIDES = {"outbox": SENT, "inbox": RECEIVED}


class Journeys:
    """The journeys of the services of a log, as the first of them keeps them: those of
    one version of the table, whoever changes it meanwhile. `keep` says whether new
    batches are to be brought; while another run has the lock, none are. Without a lake
    there are no journeys."""

    def __init__(
        self,
        log: WholeLog,
        run: Run,
        *,
        keep: bool = True,
        many: int = MANY,
        on_step: Step = no_step,
    ) -> None:
        self.log, self.run, self.keep, self.on_step = log, run, keep, on_step
        self.many = many
        self.service = log.spec.service().service
        self.app = app_name(NAME, self.service, NAME)
        self.named: list[Named] = []
        self.through: Tables = {}
        self.goal: Tables = {}
        """What is in the table, and what is to be in it: nothing where it is of no use
        to this run."""
        self._stack = ExitStack()

    def __enter__(self) -> Journeys:
        try:
            self._look()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _look(self) -> None:
        if self.log.lake is None:
            return
        self.place = self.log.lake.table(NAME, _STRUCT)
        present = {table: looked_at(self.log, table) for table in _SIDES}
        keep = self.keep and any(map(any, batches(present).values())) and self._alone()
        delta = self.place.ensure() if keep else self.place.load()
        if delta is None:
            return
        self.delta = delta
        self.named = self._own(delta)
        known = brought(delta, self.service)
        standing = stands(self.log, known, present)
        if standing is Standing.OTHER:
            return
        if standing is Standing.GOOD:
            self.through = self.goal = known
        if keep and batches(present) != batches(self.through):
            self.goal = present

    def _alone(self) -> bool:
        """Hold the journeys alone until the end, if nobody else does."""
        source = self.log.spec.service()
        connection = self._stack.enter_context(closing(connect_plain(source)))
        try:
            self._stack.enter_context(keeping(connection, source))
        except Taken:
            return False
        return True

    def read(self) -> DataFrame | None:
        """Return JOURNEY, a row for each of its keys, or None where there are none."""
        return self._of(self.named, *JOURNEY.fieldNames()) if self.through else None

    def _of(self, named: list[Named], *columns: str) -> DataFrame:
        return self.place.read(self.log.spark, named=named, columns=columns)

    @property
    def large(self) -> bool:
        """Whether there are so many that it pays to leave some as they are."""
        rows = sum(one.rows for one in self.named)
        return bool(self.through) and rows >= self.many

    def rest(self, since: dt.datetime | None = None) -> DataFrame:
        """Return the steps that will be in no journey after `catch_up()`: those of the
        databases, and of batches that are not settled. Where there are no journeys,
        those that tell what became of the messages sent since an instant."""
        if not self.goal:
            return steps(*_logs(self.log, since))
        return steps(
            *(
                self.log.read(table, struct, above=self._last(self.goal, table))
                for table, struct in _SIDES.items()
            )
        )

    def catch_up(self) -> int:
        """Bring the batches that have been settled since; return how many rows of
        journeys were written. Raises EnvironmentFault when somebody else has changed
        the table meanwhile."""
        if batches(self.goal) == batches(self.through):
            return 0
        fresh = merged(
            steps(
                *(
                    self.log.archived(
                        table, struct, self._last(self.through, table),
                        self._last(self.goal, table),
                    )
                    for table, struct in _SIDES.items()
                )
            )
        )  # fmt: skip
        old = self.named
        if self.large:
            fresh = fresh.localCheckpoint()
            old = self._concerned(fresh)
        if self.through:
            fresh = merged(fresh.unionByName(self._of(old, *JOURNEY.fieldNames())))
        # Few files: a day is one task's. To part them evenly would mean to look at rows
        # first that are dear to make.
        days = fresh.repartition(sf.to_date("begun_at"))
        rows = days.sortWithinPartitions("begun_at")
        results = self.run.results(self.log.spec.lake_spec(), self.service)
        files = replace(results, clock="begun_at").write(NAME, JOURNEY, rows)
        self.on_step("written")
        self._commit(files, old)
        self.on_step("committed")
        gone = set(old)
        self.named = [one for one in self.named if one not in gone] + [
            Named(one.path, one.service, one.day, one.size, one.rows) for one in files
        ]
        self.through = self.goal
        return sum(one.rows for one in files)

    def _commit(self, files: Sequence[LakeFile], old: Sequence[Named]) -> None:
        number = self.place.last(self.delta, self.app) + 1
        while True:
            try:
                self.place.commit(
                    self.delta, files, replaced=old, app=(self.app, number),
                    metadata={NAME: told(self.service, self.goal)},
                )  # fmt: skip
                return
            except CommitFailedError as error:
                # Another service may have changed its part, while ours is as it was.
                delta = self.place.ensure()
                own = set(self._own(delta))
                if own != set(self.named) or self.place.last(delta, self.app) >= number:
                    raise EnvironmentFault(
                        f"Another run has changed the journeys of {self.service!r} "
                        f"({error}): run again."
                    ) from error
                self.delta = delta

    def _own(self, delta: DeltaTable) -> list[Named]:
        found = self.place.named(delta)
        return [one for one in found if one.service == self.service]

    def _last(self, tables: Tables, table: str) -> Mapping[str, int]:
        """Return each service's last batch that is in there."""
        known = tables[table].batches if tables else {}
        return {one.service: known.get(one.service, 0) for one in self.log.live}

    def _concerned(self, fresh: DataFrame) -> list[Named]:
        """Return the files of the days whose journeys new rows go on with."""
        marks = marks_of(fresh)
        if marks is None:
            return self.named
        there = self._of(self.named, "message_id", "day").withColumn("mark", _mark())
        hits = there.join(sf.broadcast(marks), "mark", "left_semi")
        days = {row[0] for row in hits.select("day").distinct().collect()}
        return [one for one in self.named if one.day in days]


def marks_of(rows: DataFrame) -> DataFrame | None:
    """Return a mark for each message of some rows, or None where they are too many to
    go to every task."""
    marks = rows.select(_mark().alias("mark")).distinct().localCheckpoint()
    return marks if marks.count() <= BROADCAST else None


def parted(rows: DataFrame, marks: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the rows of the messages that are marked, and all others. A mark that two
    messages have by chance costs a row more, and no more."""
    marked, names = rows.withColumn("mark", _mark()), rows.columns
    return (
        marked.join(sf.broadcast(marks), "mark", "left_semi").select(*names),
        marked.join(sf.broadcast(marks), "mark", "left_anti").select(*names),
    )


def _mark() -> Column:
    return sf.xxhash64("message_id")


def _logs(log: WholeLog, since: dt.datetime | None) -> tuple[DataFrame, DataFrame]:
    """Return what was sent since an instant, and what became of it. A message that was
    sent again may have been received long before."""
    if since is None:
        return log.read("outbox", SENT), log.read("inbox", RECEIVED)
    day = (since - dt.timedelta(days=1)).date()
    start = timestamp(since)
    again = t.StructType([*SENT.fields, t.StructField("replay_id", t.StringType())])
    sent = log.read("outbox", again, since=day).where(sf.col("created_at") >= start)
    resent = sent.where("replay_id <> ''").select("message_id").distinct()
    own = sf.coalesce("created_at", "first_received_at") >= start
    if resent.isEmpty():
        return sent, log.read("inbox", RECEIVED, since=day).where(own)
    received = log.read("inbox", RECEIVED)
    earlier = received.where(~own).join(resent, "message_id", "left_semi")
    return sent, received.where(own).unionByName(earlier)
