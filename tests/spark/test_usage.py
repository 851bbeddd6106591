"""The report shows what each service costs: its size, its growth, and the time of its
runs."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from django_txmsg.spark.jobs.analyze import in_lake, run_analyze
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.report import render
from django_txmsg.spark.runs import Run
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import archive, path_of
from tests.spark.conftest import analyzes
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import run


def bytes_of(directory: Path) -> int:
    return sum(one.stat().st_size for one in directory.rglob("*.parquet"))


def test_size_and_growth_are_counted_by_service(make_log, lake: LakeSpec) -> None:
    for service, days in (("shop", 10), ("payments", 2)):
        log: Log = make_log("sqlite", service)
        for day in range(days):
            at = LONG_AGO + dt.timedelta(days=day)
            log.send_many(5 if day else 500, created_at=at)
        archive(None, log, lake)
    shop, payments = in_lake(Lake(lake))

    assert (shop["service"], payments["service"]) == ("shop", "payments")
    outbox = path_of(lake)
    assert shop["bytes"] == bytes_of(outbox / "service=shop")
    assert shop["files"] == len(list((outbox / "service=shop").rglob("*.parquet")))
    # The first day of ten, which is the largest, is not in the average of seven.
    by_day = [bytes_of(one) for one in sorted((outbox / "service=shop").iterdir())]
    assert shop["growth"][-10:] == by_day
    assert not any(shop["growth"][:-10])
    assert shop["a_day"] == sum(by_day[-7:]) / 7
    # There are two days in all.
    assert payments["a_day"] == payments["bytes"] / 2
    assert shop["results"] == payments["results"] == 0


@analyzes
@pytest.mark.matrix
def test_report_shows_what_each_service_costs(spark, make_log, lake: LakeSpec) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    now = dt.datetime.now(dt.timezone.utc)
    none = run_analyze(spark, spec, now, Run("analyze", {}), keep=False)
    assert "There is no lake" in render(none)
    log.send_many(5)
    took = run(spec, "archive", "--older-than", "1d", "--engine", "local")["seconds"]

    found = run_analyze(spark, spec, now, Run("analyze", {}), keep=False)

    [shop] = found.usage
    assert 0 < shop["seconds"] <= took
    assert shop["bytes"] > shop["results"] > 0
    page = render(found)
    assert f">{shop['bytes'] / 1000:.1f} kB</td>" in page
    assert f">{shop['a_day'] / 1000:.1f} kB</td>" in page
