"""`sweep`: removes what failed attempts left, joins small files, drops old days."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from ..errors import EnvironmentFault
from ..lake import Lake, LakeTable
from ..ledger import Ledger
from ..runs import Run, run_by
from ..schemas import TABLES, Table
from ..spec import JobSpec


@dataclass(frozen=True)
class SweepOptions:
    """How old a file must be, and how long the lake keeps what."""

    orphans_older_than: dt.timedelta = dt.timedelta(days=1)
    """Longer than any job runs: its files have no name in the log before its end."""
    replaced_older_than: dt.timedelta = dt.timedelta(days=7)
    """Longer than any reader reads."""
    keep: dt.timedelta | None = None
    compact: bool = True
    dry_run: bool = False


@dataclass
class Swept:
    """What was removed from one table, or would be."""

    orphans: int = 0
    replaced: int = 0
    dropped_days: int = 0
    compacted: int = 0


def run_sweep(spec: JobSpec, options: SweepOptions, run: Run) -> dict[str, Swept]:
    """Sweep the service's part of each table of the lake."""
    lake_spec = spec.lake_spec()
    lake = Lake(lake_spec)
    swept: dict[str, Swept] = {}
    for table in TABLES.values():
        place = lake.table(table.name, table.lake_struct())
        if place.load() is None:
            continue
        ledger = Ledger(spec.service(), table, lake_spec.uri, run_by())
        try:
            with ledger.lock():
                swept[table.name] = _sweep(
                    place, table, spec.service().service, ledger, options
                )
        finally:
            ledger.close()
    run.counts = {name: one.__dict__ for name, one in swept.items()}
    run.rows = sum(one.orphans + one.replaced for one in swept.values())
    return swept


def _sweep(
    place: LakeTable,
    table: Table,
    service: str,
    ledger: Ledger,
    options: SweepOptions,
) -> Swept:
    done = Swept()
    delta = place.load()
    assert delta is not None
    now = dt.datetime.now(dt.timezone.utc)
    if options.keep is not None:
        oldest = (now - options.keep).date()
        old = [
            one
            for one in place.named(delta)
            if one.service == service and one.day < oldest
        ]
        done.dropped_days = len({one.day for one in old})
        if old and not options.dry_run:
            place.commit(
                delta, (), replaced=old, metadata={"dropped_before": oldest.isoformat()}
            )
    # A refused batch is withdrawn by its files' names: compact when none is left.
    if options.compact and not options.dry_run:
        if ledger.unfinished():
            raise EnvironmentFault(
                f"Batches of {table.name} are unfinished: run `archive` before `sweep`."
            )
        done.compacted = place.compact(service)
    hours = int(options.replaced_older_than.total_seconds() // 3600)
    done.replaced = len(place.vacuum(hours, dry_run=options.dry_run))
    orphans = place.orphans(now - options.orphans_older_than)
    done.orphans = len(orphans)
    if not options.dry_run:
        for path in orphans:
            place.lake.files.delete_file(path)
    return done


__all__ = ["SweepOptions", "Swept", "run_sweep"]
