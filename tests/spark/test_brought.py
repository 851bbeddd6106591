"""A run of `reconcile` reads the lake's logs, and decides whether it extends the
journeys or rebuilds them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from deltalake import DeltaTable

from django_txmsg.spark.jobs.journeys import (
    NAME,
    Looked,
    brought,
    log_entry,
    looked_at,
    stands,
)
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import SMALL, archive, path_of
from tests.spark.log import Log
from tests.spark.running import run


def joined(log: Log, lake: LakeSpec) -> None:
    done = run(JobSpec((log.spec,), lake), "sweep")
    assert done["counts"]["outbox"]["compacted"] == 3


def more_archived(log: Log, lake: LakeSpec) -> None:
    log.send_many(5)
    assert archive(None, log, lake).rows == 5


def behind(log: Log, lake: LakeSpec) -> None:
    log.execute("UPDATE django_txmsg_archivemark SET purged_through = 2")


def restored(log: Log, lake: LakeSpec) -> None:
    table = DeltaTable(path_of(lake))
    table.restore(table.version() - 1)


def deleted_by_others(log: Log, lake: LakeSpec) -> None:
    DeltaTable(path_of(lake)).delete("id = 1")


def left_the_lake(log: Log, lake: LakeSpec) -> None:
    shutil.copy(f"{log.spec.path}.backup", log.spec.path)
    log.execute("UPDATE django_txmsg_outboxmessage SET last_error = 'x' WHERE id = 7")
    assert "id 7." in "".join(archive(None, log, lake).refused)
    assert log.count() == 0


@pytest.mark.parametrize(
    ("change", "stand"),
    [
        (joined, True), (more_archived, True), (behind, None), (restored, False),
        (deleted_by_others, False), (left_the_lake, False),
    ],
)  # fmt: skip
def test_journeys_stand_while_no_batch_of_theirs_has_changed(
    make_log: Callable[..., Log], lake: LakeSpec, change: Any, stand: bool | None
) -> None:
    log = make_log("sqlite")
    log.send_many(30)
    shutil.copy(log.spec.path, f"{log.spec.path}.backup")
    archive(None, log, lake, options=replace(SMALL, batch_rows=10))

    whole: Any = WholeLog
    spec = JobSpec((log.spec,), lake)
    # No row is read: it needs no Spark.
    with whole(None, spec) as logs:
        known = {"outbox": looked_at(logs, "outbox")}
    assert known["outbox"].batches == {"shop": 3}

    change(log, lake)

    with whole(None, spec) as logs:
        present = {"outbox": looked_at(logs, "outbox")}
        expected = {True: known, False: {}, None: None}[stand]
        assert stands(logs, known, present) == expected


def test_last_batches_are_read_from_the_newest_entries_alone(lake: LakeSpec) -> None:
    place = Lake(lake, create=True).table(NAME, OUTBOX.lake_struct())
    for number in range(1, 13):
        tables = {"outbox": Looked("id", number, number, {"shop": number})}
        entry = {NAME: log_entry("shop", tables)}
        place.commit(place.ensure(), (), metadata=entry)
    delta = place.ensure()
    # A history of years is not read: its beginning need not even be readable.
    oldest = path_of(lake).with_name(NAME) / "_delta_log" / f"{0:020}.json"
    oldest.write_text("{")

    assert brought(delta, "shop")["outbox"].batches == {"shop": 12}
