"""`sweep`: removes files of failed attempts, joins small files, drops old days."""

from __future__ import annotations

import datetime as dt
from contextlib import closing
from dataclasses import dataclass

from pyspark.sql import types as t

from ..connection import connect_plain
from ..errors import EnvironmentFault
from ..lake import Lake
from ..lakelog import touched
from ..laketable import CommitFailedError, LakeTable
from ..ledger import Ledger
from ..lock import Taken, keeping
from ..progress import Progress
from ..runs import Run
from ..schemas import TABLES
from ..spec import JobSpec
from .joining import join

#: Not history: the subscribers of a topic are valid until they change.
FOR_GOOD = frozenset(["subscriptions"])


@dataclass(frozen=True)
class SweepOptions:
    """The age of files to remove, and how long the lake keeps which rows."""

    orphans_older_than: dt.timedelta = dt.timedelta(days=1)
    """Longer than any job runs: the log names its files only at its end."""
    replaced_older_than: dt.timedelta = dt.timedelta(days=7)
    """Longer than any reader reads."""
    keep: dt.timedelta | None = None
    compact: bool = True
    dry_run: bool = False


@dataclass
class Swept:
    """What was removed from one table, or in a dry run would be."""

    orphans: int = 0
    replaced: int = 0
    dropped_days: int = 0
    compacted: int = 0


def run_sweep(
    spec: JobSpec, options: SweepOptions, run: Run, bar: Progress | None = None
) -> dict[str, Swept]:
    """Sweep the service's part of each table of the lake, including results."""
    lake_spec = spec.lake_spec()
    lake = Lake(lake_spec)
    service = spec.service()
    swept: dict[str, Swept] = {}
    bar = bar or Progress.silent()
    names = lake.names()
    bar.start(len(names))
    for name in names:
        bar.say(name)
        place = lake.table(name, t.StructType([]))
        if place.load() is None:
            continue
        try:
            if name in TABLES:
                with closing(Ledger(service, TABLES[name])) as ledger, ledger.lock():
                    swept[name] = _sweep(place, service.service, options)
            elif name == "journeys":
                with closing(connect_plain(service)) as held, keeping(held, service):
                    swept[name] = _sweep(place, service.service, options)
            else:
                swept[name] = _sweep(place, service.service, options)
        except Taken:
            continue  # `reconcile` uses them: the next run sweeps
        except CommitFailedError as error:
            raise EnvironmentFault(
                f"{name} was changed by another process meanwhile ({error}). Run again."
            ) from error
        bar.advance(1)
    bar.stop()
    run.counts = {name: one.__dict__ for name, one in swept.items()}
    run.rows = sum(one.orphans + one.replaced for one in swept.values())
    return swept


def _sweep(place: LakeTable, service: str, options: SweepOptions) -> Swept:
    done = Swept()
    delta = place.load()
    assert delta is not None
    now = dt.datetime.now(dt.timezone.utc)
    if options.keep is not None and place.name not in FOR_GOOD:
        oldest = (now - options.keep).date()
        old = [
            one
            for one in place.named(delta)
            if one.service == service and one.day < oldest
        ]
        done.dropped_days = len({one.day for one in old})
        if old and not options.dry_run:
            place.commit(
                delta,
                (),
                replaced=old,
                metadata={
                    "dropped_before": oldest.isoformat(),
                    "touched": touched(old),
                },
            )
    # Journeys are joined by the run that maintains them, into files with counts.
    if options.compact and not options.dry_run and place.name != "journeys":
        done.compacted = join(place, service)
    hours = int(options.replaced_older_than.total_seconds() // 3600)
    done.replaced = len(place.vacuum(hours, dry_run=options.dry_run))
    orphans = place.orphans(service, now - options.orphans_older_than)
    done.orphans = len(orphans)
    if not options.dry_run:
        for path in orphans:
            place.files.delete_file(path)
    return done


__all__ = ["SweepOptions", "Swept", "run_sweep"]
