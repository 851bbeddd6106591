"""The costs of each service: bytes and files in the lake, growth, and the time of
runs."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import types as t

from ..lake import Lake
from ..results import result_struct
from ..runs import RUN
from ..schemas import TABLES
from ..transforms.normalise import timestamp
from .reading import WholeLog

#: Days whose bytes the report shows, and days over which it averages them.
SHOWN, AVERAGED = 30, 7


def usage(log: WholeLog, since: dt.datetime) -> list[dict[str, Any]]:
    """Return the usage of each service, the largest first. `seconds` is the total time
    that the service's runs have taken since an instant. The runs of `follow` itself are
    left out, because they never end. The runs that `follow` starts are included."""
    if log.lake is None:
        return []
    found = in_lake(log.lake)
    kept = log.lake.table("runs", result_struct(RUN)).read(log.spark)
    seconds = (sf.unix_micros("finished_at") - sf.unix_micros("started_at")) / 1e6
    runs = kept.where(
        (sf.col("job") != "follow") & (sf.col("started_at") >= timestamp(since))
    )
    spent = {
        row.service: row.seconds
        for row in runs.groupBy("service")
        .agg(sf.sum(seconds).alias("seconds"))
        .collect()
    }
    return [one | {"seconds": spent.get(one["service"]) or 0.0} for one in found]


def in_lake(lake: Lake) -> list[dict[str, Any]]:
    """Return the bytes and files of each service, from the logs of all tables.

    `growth` lists the archived bytes of each of the SHOWN days up to the newest
    archived day. `a_day` is the average over the last AVERAGED of these days. A message
    counts for the day on which it was stored, so the latest days may not be archived
    yet.
    """
    services: dict[str, dict[str, Any]] = {}
    days: dict[str, dict[dt.date, int]] = {}
    for name in lake.names():
        for file in lake.table(name, t.StructType()).named():
            new = {"service": file.service, "bytes": 0, "files": 0, "results": 0}
            one = services.setdefault(file.service, new)
            one["files"] += 1
            one["bytes"] += file.size
            if name in TABLES:
                day = days.setdefault(file.service, {})
                day[file.day] = day.get(file.day, 0) + file.size
            else:
                one["results"] += file.size
    for service, one in services.items():
        one |= _growth(days.get(service, {}))
    return sorted(services.values(), key=lambda one: (-one["bytes"], one["service"]))


def _growth(days: dict[dt.date, int]) -> dict[str, Any]:
    if not days:
        return {"growth": [], "a_day": 0.0}
    newest = max(days)
    growth = [
        days.get(newest - dt.timedelta(days=ago), 0) for ago in reversed(range(SHOWN))
    ]
    counted = min(AVERAGED, (newest - min(days)).days + 1)
    return {"growth": growth, "a_day": sum(growth[-counted:]) / counted}
