"""A check before an archive: lake and database must know the same batches."""

from __future__ import annotations

from collections.abc import Sequence

from ..batchlog import BatchLog
from ..errors import EnvironmentFault
from ..lake import Lake, NoLake
from ..ledger import Ledger
from ..marks import Mark
from ..spec import LakeSpec


class Agreement:
    """Compares a table's log in a lake with the marks in its database."""

    def __init__(self, ledger: Ledger, lake: LakeSpec, *, accept_loss: bool) -> None:
        self.marks, self.table = ledger.marks, ledger.table
        self.service, self.lake = ledger.spec.service, lake
        self.accept_loss = accept_loss

    def reach(self) -> tuple[BatchLog, Mark]:
        """Return the lake's log, read to its end, and the database's mark for it.

        Batches of the log above the mark must be settled. Raises EnvironmentFault if
        the lake has lost batches, or if another lake has batches in progress.
        """
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
        """A batch in progress for another lake would be archived into both."""
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
