"""The archive's ledger: numbered entries in the Delta log of a table in the lake.

Each batch of the archive is one log entry with the number of the batch. An archiver can
add an entry only if it has seen the previous one. So an archiver that has lost its lock
cannot add entries after another archiver has added one. Before an archive begins, the
log is compared with the marks in the database: both must record the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .errors import EnvironmentFault
from .lake import Lake, NoLake
from .lakefile import LakeFile
from .lakelog import Named
from .laketable import CommitFailedError, LakeTable, app_name
from .ledger import Ledger
from .marks import Mark
from .schemas import Table
from .spec import LakeSpec


class BatchLog:
    """The entries for one service in the log of one table. `last` is the number of the
    newest entry that this run has seen."""

    def __init__(self, place: LakeTable, service: str, table: Table) -> None:
        self.place, self.service, self.table = place, service, table
        self.app = app_name("archive", service, table.name)
        self.last = 0

    def identity(self) -> str:
        """Return the id that the lake's table got when it was created. Returns "" if
        the table does not exist."""
        delta = self.place.load()
        return "" if delta is None else str(delta.metadata().id)

    def read(self) -> int:
        """Read the number of the newest entry, and store it in `last`."""
        delta = self.place.load()
        self.last = 0 if delta is None else self.place.last(delta, self.app)
        return self.last

    def enter(
        self,
        number: int,
        files: Iterable[LakeFile] = (),
        *,
        replaced: Iterable[Named] = (),
        **metadata: Any,
    ) -> None:
        """Add the entry `number` to the log. Raises EnvironmentFault if another
        archiver has added an entry since `last`."""
        delta = self.place.ensure()
        found = self.place.last(delta, self.app)
        if found != self.last:
            raise self.taken_over(f"its log is at {found}, not at {self.last}")
        try:
            self.place.commit(
                delta,
                files,
                replaced=replaced,
                metadata={
                    "batch": number, "table": self.table.name,
                    "service": self.service, **metadata,
                },
                app=(self.app, number),
            )  # fmt: skip
        except CommitFailedError as error:
            raise self.taken_over(error) from error
        self.last = number

    def taken_over(self, why: object) -> EnvironmentFault:
        """Return the error to raise when another archiver has added an entry."""
        return EnvironmentFault(
            f"Another archiver has taken {self.table.name} of {self.service!r} over "
            f"({why}): this one has lost its lock, and has changed nothing more. Run "
            "again."
        )


class Agreement:
    """Compares the log of a table in the lake with the marks in the database."""

    def __init__(self, ledger: Ledger, lake: LakeSpec, *, accept_loss: bool) -> None:
        self.marks, self.table = ledger.marks, ledger.table
        self.service, self.lake = ledger.spec.service, lake
        self.accept_loss = accept_loss

    def reach(self) -> tuple[BatchLog, Mark]:
        """Return the log, and the database's mark for this lake. If the log has batches
        above the mark, the caller must settle them. Raises EnvironmentFault if the lake
        has lost batches, or if batches for another lake are in progress."""
        marks = self.marks.read()
        try:
            lake = Lake(self.lake)
        except NoLake:
            self._insist_on_no_loss(marks, "there is no lake")
            lake = Lake(self.lake, create=True)
        place = lake.table(self.table.name, self.table.lake_struct())
        log = BatchLog(place, self.service, self.table)
        identity = log.identity()
        known = next((one for one in marks if one.lake_id == identity), None)
        if known is None:
            self._insist_on_no_loss(marks, "a different lake is there")
        last = log.read()
        through = 0
        if known is not None and last < known.purged_through:
            self._insist_on_no_loss([known], f"it ends with batch {last}", last)
            known, through = None, last
        if known is None and not identity:
            # There is no lake, and perhaps nothing to archive.
            known = Mark("", self.lake.uri, 0, 0, 0)
        elif known is None or known.lake != self.lake.uri:
            through = known.purged_through if known else through
            known = self.marks.place(identity, self.lake.uri, through)
        self._insist_on_one_lake(marks, known)
        return log, known

    def _insist_on_no_loss(
        self, marks: Sequence[Mark], why: str, last: int = 0
    ) -> None:
        lost = [
            one
            for one in marks
            if one.lake == self.lake.uri and one.purged_through > last
        ]
        if not lost:
            return
        if self.accept_loss:
            for one in lost:
                self.marks.place(
                    one.lake_id, f"{one.lake} (lost)"[:1024], one.purged_through
                )
            return
        raise EnvironmentFault(
            f"The lake at {self.lake.uri} has lost batches of {self.table.name} of "
            f"{self.service!r}: this database has archived {lost[0].rows:,} rows in "
            f"batches up to {lost[0].purged_through} into it, and {why}. Mount it, or "
            "bring its newest backup back, and run again: rows of the missing "
            "batches are nowhere else. If they are lost for good, continue with "
            "--accept-loss."
        )

    def _insist_on_one_lake(self, marks: Sequence[Mark], own: Mark) -> None:
        """Raise EnvironmentFault if a batch for another lake is in progress. Its rows
        would otherwise be archived into both lakes."""
        for one in marks:
            if one.lake_id == own.lake_id:
                continue
            if one.begun_through <= one.purged_through:
                continue
            if self.accept_loss:
                self.marks.place(one.lake_id, one.lake, one.begun_through)
                continue
            raise EnvironmentFault(
                f"Batch {one.begun_through} of {self.table.name} is on its way into "
                f"the lake {one.lake}: finish it there before you archive into "
                f"{self.lake.uri}. If that lake is lost, continue with --accept-loss."
            )
