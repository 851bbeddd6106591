"""The archive's ledger: numbered entries in the Delta log of a table in the lake.

Each batch of the archive is one log entry with the number of the batch. An archiver can
add an entry only if it has seen the previous one. So an archiver that has lost its lock
cannot add entries after another archiver has added one.

Before a job archives, judges or deletes, it compares the log with the marks in the
database. A marked batch can be missing from the log for two reasons: the lake is not
mounted, or the lake was restored from an older backup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from posixpath import normpath
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable

from .connection import connect_plain
from .errors import EnvironmentFault
from .lake import Lake, NoLake, Overtaken, app_name
from .lakefile import LakeFile
from .ledger import Ledger, Mark, marks_in
from .schemas import TABLES, Table
from .spec import JobSpec, LakeSpec, SourceSpec


class BatchLog:
    """The entries for one service in the log of one table. `last` is the number of the
    newest entry that this run has seen. `identity` is the id that the lake's table got
    when it was created, or "" if the table does not exist."""

    def __init__(self, lake: Lake, service: str, table: Table) -> None:
        self.place = lake.table(table.name, table.lake_struct())
        self.service, self.table = service, table
        self.app = app_name("archive", service, table.name)
        delta = self.place.load()
        self.identity = "" if delta is None else str(delta.metadata().id)
        self.last = 0 if delta is None else self.place.last(delta, "archive", service)

    def enter(
        self,
        number: int,
        files: Iterable[LakeFile] = (),
        *,
        replaced: Iterable[LakeFile] = (),
        **metadata: Any,
    ) -> None:
        """Add the entry `number` to the log. Raises EnvironmentFault if another
        archiver has added an entry since `last`."""
        delta = self.unchanged()
        try:
            self.place.commit(
                delta, files, replaced=replaced,
                metadata={
                    "batch": number, "table": self.table.name,
                    "service": self.service, **metadata,
                },
                app=(self.app, number),
            )  # fmt: skip
        except Overtaken as error:
            raise self.taken_over(error) from error
        self.last = number

    def unchanged(self) -> DeltaTable:
        """Return the lake's table, which is created if it does not exist. Raises
        EnvironmentFault if another archiver has added an entry since `last`."""
        delta = self.place.ensure()
        found = self.place.last(delta, "archive", self.service)
        if found != self.last:
            raise self.taken_over(f"its log is at {found}, not at {self.last}")
        self.identity = str(delta.metadata().id)
        return delta

    def taken_over(self, why: object) -> EnvironmentFault:
        """Return the error to raise when another archiver has added an entry."""
        return EnvironmentFault(
            f"Another archive, sweep or erasure of {self.table.name} of "
            f"{self.service!r} has changed the lake meanwhile ({why}). This run has "
            "changed nothing more, and no row is lost or doubled. Wait for the end of "
            "the other run, and run again. If it works on another database of this "
            "service, let the two run one after the other. If both work on this "
            "database, this run has lost its lock: give the pipeline a direct "
            "connection, without a transaction-pooling proxy."
        )


class LostBatches(EnvironmentFault):
    """At least one batch that was archived into the lake is missing from it."""


def lost(marks: Sequence[Mark], uri: str, log: BatchLog | None) -> list[Mark]:
    """Return the marks whose batches are missing from the log of the lake at `uri`.
    Pass None as `log` if there is no lake. The caller must read the marks first and the
    log second. Otherwise an archive that runs between the two reads adds a batch, and
    the batch is in the marks but not in the older log."""
    if log is not None and any(one.lake_id == log.identity for one in marks):
        own = (one for one in marks if one.lake_id == log.identity)
        return [one for one in own if one.purged_through > log.last]
    here = [one for one in marks if _plain(one.lake) == _plain(uri)]
    return [one for one in here if one.purged_through]


def _plain(address: str) -> str:
    """Return a text that is the same for all spellings of the address of a lake."""
    path = re.sub("^file:(//(localhost)?)?", "", address).replace("s3a://", "s3://")
    return normpath(f"/./{unquote(path)}")


def lost_batches(
    marks: Sequence[Mark],
    source: SourceSpec,
    table: Table,
    uri: str,
    log: BatchLog | None,
) -> LostBatches:
    """Return the error that reports these marks. Their batches are missing from the
    lake."""
    why = "there is no lake"
    if log is not None:
        why = f"it ends with batch {log.last}"
        if log.identity != marks[0].lake_id:
            why = "a different lake is there"
    return LostBatches(
        f"The lake at {uri} has lost batches of {table.name} of {source.service!r}: "
        f"this database has archived {marks[0].rows:,} rows in batches up to "
        f"{marks[0].purged_through} into it, and {why}. Mount it, or bring its newest "
        "backup back, and run again: rows of the missing batches are nowhere else. If "
        "they are lost for good, continue with `archive --accept-loss`."
    )


def is_mounted(spec: JobSpec, *, insist: bool = False) -> bool:
    """Return whether a lake exists at the specified address. Raises LostBatches if
    the lake lacks a batch that one of the given services has archived into it. With
    `insist`, also if another service has archived into another lake at this address,
    on another host: a job that erases rows would leave those there."""
    uri, own = spec.lake_spec().uri, spec.service().service
    marks = [(source, *one) for source in spec.services for one in marks_of(source)]
    lake = None
    with suppress(NoLake):
        lake = Lake(spec.lake_spec())
    for source, table, known in marks:
        log = None if lake is None else BatchLog(lake, source.service, table)
        if source.service != own and not insist:
            # It may have a lake of its own, at the same path of another host.
            identity = log.identity if log else ""
            known = [one for one in known if one.lake_id == identity]
        if missing := lost(known, uri, log):
            raise lost_batches(missing, source, table, uri, log)
    return lake is not None


def marks_of(source: SourceSpec) -> list[tuple[Table, list[Mark]]]:
    """Return the tables that a database has archived, each with its marks. Tables that
    only newer code knows are left out. Returns [] if the marks cannot be read."""
    # The database is away, which the job will report, or the role may read only the
    # log.
    with suppress(EnvironmentFault), connect_plain(source) as connection:
        found = marks_in(connection).items()
        return [(TABLES[name], marks) for name, marks in found if name in TABLES]
    return []


def agreed(
    ledger: Ledger, lake: LakeSpec, *, accept_loss: bool
) -> tuple[BatchLog, Mark]:
    """Compare the log of a table in the lake with the marks in the database. Return the
    log, and the database's mark for this lake. If the log has batches above the mark,
    the caller must settle these batches. Raises EnvironmentFault if a batch is missing
    from the lake, or if a batch for another lake is in progress. The rows of such a
    batch would otherwise be archived into both lakes."""
    table, source = ledger.table, ledger.spec
    marks = ledger.marks()
    log = None
    with suppress(NoLake):
        log = BatchLog(Lake(lake), source.service, table)
    missing = lost(marks, lake.uri, log)
    if missing and not accept_loss:
        raise lost_batches(missing, source, table, lake.uri, log)
    for one in missing:
        gone = f"{one.lake} (lost)"[:1024]
        ledger.place(one.lake_id, gone, one.purged_through)
    if log is None:
        log = BatchLog(Lake(lake, create=True), source.service, table)
    known = next((one for one in marks if one.lake_id == log.identity), None)
    if known is None and not log.identity:
        # There is no lake, and perhaps nothing to archive.
        known = Mark("", lake.uri, 0, 0, 0)
    elif known is None or known in missing or known.lake != lake.uri:
        through = min(known.purged_through, log.last) if known else 0
        known = ledger.place(log.identity, lake.uri, through)
    for one in marks:
        if one.lake_id == known.lake_id or one.begun_through <= one.purged_through:
            continue
        if not accept_loss:
            raise EnvironmentFault(
                f"Batch {one.begun_through} of {table.name} is on its way into the "
                f"lake {one.lake}: finish it there before you archive into {lake.uri}. "
                "If that lake is lost, continue with --accept-loss."
            )
        ledger.place(one.lake_id, one.lake, one.begun_through)
    return log, known
