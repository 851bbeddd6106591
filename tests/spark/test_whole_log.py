"""The lake and the live databases are read as one log. Each row is read once. Files and
rows that are not needed are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as t
from pyspark.testing import assertDataFrameEqual

from django_txmsg.spark.transforms import whole_log

ROWS = t.StructType(
    [
        t.StructField("service", t.StringType()),
        t.StructField("id", t.LongType()),
        t.StructField("message_id", t.StringType()),
        t.StructField("destination", t.StringType()),
    ]
)


def test_a_row_on_its_way_into_the_lake_is_seen_once(spark: Any) -> None:
    lake = spark.createDataFrame([("a", 1, "m1", "q"), ("a", 2, "m2", "q")], ROWS)
    live = spark.createDataFrame([("a", 2, "m2", "q"), ("a", 3, "m2", "q")], ROWS)
    wanted = t.StructType(ROWS.fields[1:])
    assertDataFrameEqual(
        whole_log([lake, live], wanted),
        [(1, "m1", "q"), (2, "m2", "q"), (3, "m2", "q")],
    )


def test_a_row_that_differs_in_the_database_is_read_from_there(spark: Any) -> None:
    rows = [("a", number, f"m{number}", None) for number in range(50)]
    changed = [(*row[:3], "q") for row in rows]
    frames = [spark.createDataFrame(one, ROWS) for one in (changed, rows)]
    assertDataFrameEqual(whole_log(frames, ROWS), changed)
    assertDataFrameEqual(whole_log(frames[::-1], ROWS), rows)


def test_a_condition_on_the_lake_alone_is_left_to_its_files(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "rows")
    rows = [("a", number, f"m{number}", "qp"[number % 2]) for number in range(4)]
    spark.createDataFrame(rows, ROWS).write.parquet(path)
    chosen = whole_log([spark.read.parquet(path)], ROWS).where("destination = 'p'")
    chosen.explain()
    plan = capsys.readouterr().out
    assert "EqualTo(destination,p)" in plan
    assert "Exchange" not in plan
    assertDataFrameEqual(chosen, [rows[1], rows[3]])
