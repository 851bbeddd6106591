"""`spark.read.format("txmsg").option("lake", …)` reads exactly the files that the log
names."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pyspark.sql.functions as sf
import pytest
from pyspark.errors import PySparkException

from django_txmsg.spark.engine import installed
from django_txmsg.spark.spec import LakeSpec
from tests.spark.archives import archive, path_of
from tests.spark.log import LONG_AGO, Log

DAY = dt.timedelta(days=1)


def test_a_lake_is_read_through_its_log(spark: Any, make_log, lake: LakeSpec) -> None:
    sent: dict[str, list[uuid.UUID]] = {}
    for service in ("shop", "online shop"):
        log: Log = make_log("sqlite", service)
        sent[service] = [uuid.uuid4() for _ in range(3)]
        log.send(
            [
                {"message_id": one, "created_at": LONG_AGO + day * DAY}
                for day, one in enumerate(sent[service])
            ]
        )
        archive(spark, log, lake)
    # What a failed attempt has left is no part of the table.
    some = next(path_of(lake).glob("*/*/*.parquet"))
    some.with_name("left.parquet").write_bytes(some.read_bytes())

    def read(table: str) -> Any:
        source = spark.read.format("txmsg").option("lake", lake.uri)
        return source.option("table", table).load()

    frame = read("outbox")
    found = frame.select("service", "message_id").collect()
    assert sorted(map(tuple, found)) == sorted(
        (service, str(one)) for service, ids in sent.items() for one in ids
    )
    # Files of other services and days are not opened, since Spark tells its filters.
    narrow = frame.where("service = 'online shop' and day >= date'2026-03-02'")
    assert narrow.rdd.getNumPartitions() == (2 if installed() >= (4, 1) else 6)
    assert narrow.agg(sf.count("*"), sf.max("destination")).first() == (
        2, "orders.place",
    )  # fmt: skip
    assert [row.body for row in narrow.select("body").collect()] == [b'{"a": 1}'] * 2
    with pytest.raises(PySparkException, match="There is no table 'inbox'"):
        read("inbox").count()
