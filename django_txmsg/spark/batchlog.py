"""The archive's ledger: its numbered entries in the log of a table of the lake.

Batch n is the entry with n as the Delta transaction version of this service's archive.
An entry can be made only on top of the previous one, which is the fence: an archiver
that has lost its lock can make none after another has made one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import EnvironmentFault
from .lakefile import LakeFile
from .lakelog import Named
from .laketable import CommitFailedError, LakeTable, app_name
from .schemas import Table


class BatchLog:
    """The entries of one service's archive of one table. `last` is the newest that this
    run has seen."""

    def __init__(self, place: LakeTable, service: str, table: Table) -> None:
        self.place, self.service, self.table = place, service, table
        self.app = app_name("archive", service, table.name)
        self.last = 0

    def identity(self) -> str:
        """Return the table's id from its creation, or nothing if there is no table."""
        delta = self.place.load()
        return "" if delta is None else str(delta.metadata().id)

    def read(self) -> int:
        """Read the newest entry's number."""
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
        """Make the entry `number` on top of the last one. Raises EnvironmentFault if
        another archiver has made one since."""
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
        """Return the error for an archiver that another one has overtaken."""
        return EnvironmentFault(
            f"Another archiver has taken {self.table.name} of {self.service!r} over "
            f"({why}): this one has lost its lock, and has changed nothing more. Run "
            "again."
        )
