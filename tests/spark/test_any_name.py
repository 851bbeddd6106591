"""No archived row is lost, whatever the service's name and the lake's address."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.lakefile import directory_of
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from tests.spark.archives import archive, delta_rows, path_of
from tests.spark.log import Log
from tests.spark.running import run

#: What a file system takes as one name, and the log of a Delta table as well.
PATHS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\%"),
    min_size=1,
    max_size=20,
).filter(lambda name: name.strip(". ") and len(name.encode()) < 100)
SERVICES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=24
).filter(lambda name: len(name.encode()) < 60)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example("online shop", "lake")
@example("a%20b/c", "lake[1] {a,b} *?#")
@example("café", "100% ü+&=:")
@example("a~b", "lake~")
@given(SERVICES, PATHS)
@pytest.mark.matrix
def test_archived_swept_and_joined_all_rows_are_read_back(
    spark: Any, sqlite_template: Path, service: str, place: str
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="txmsg-name-"))
    try:
        shutil.copy(sqlite_template, directory / "db.sqlite3")
        log = Log(SourceSpec(service, f"sqlite:///{directory}/db.sqlite3"))
        lake = LakeSpec(f"{directory}/{place}")
        spec = JobSpec(services=(log.spec,), lake=lake)

        for _ in range(2):
            log.send_many(150)
            assert archive(spark, log, lake).rows == 150
            joined = run(spec, "sweep")["counts"]["outbox"]["compacted"]
            assert joined >= 2
            for _ in range(2):
                run(spec, "sweep", "--orphans-older-than", "0s",
                    "--replaced-older-than", "0s")  # fmt: skip

        assert log.count() == 0
        table = Lake(lake).table("outbox", OUTBOX.lake_struct())
        rows = table.read(spark, services=[service]).select("message_id", "service")
        found = rows.collect()
        assert len({row.message_id for row in found}) == len(found) == 300
        assert {row.service for row in found} == {service}
        assert delta_rows(lake).num_rows == 300
        # Joined into one, and nothing else is there.
        files = list(path_of(lake).rglob("*.parquet"))
        assert len(files) == 1
    finally:
        shutil.rmtree(directory)


def test_no_two_services_share_a_directory() -> None:
    names = ["a/b", "a_b", "a b", "a:b", "A_b", "ä_b", "a%2Fb"]

    assert len({directory_of(name) for name in names}) == len(names)
    assert directory_of("a_b") == "service=a_b"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://bucket/lake?endpoint_override=localhost:9000", "query"),
        ("file:///var/lake?x=1", "query"),
        ("s3://KEY:SECRET@bucket/lake", "credentials"),
        ("/var/lake%20x", "percent sign"),
        ("file:///var/lake%2520x", "percent sign"),
        ("/var/a\\b", "backslash"),
        ("var/lake", "absolute path"),
        ("nowhere://var/lake", "not understood"),
        ("file://var/lake", "look like file:///var/lake"),
        ("s3:/bucket/lake", "or s3://bucket/lake"),
    ],
)
def test_an_address_that_two_clients_may_read_differently_is_refused(
    spark: Any, make_log: Callable[..., Log], address: str, said: str
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(3)

    with pytest.raises(EnvironmentFault, match=said) as told:
        archive(spark, log, LakeSpec(address))

    assert "SECRET" not in str(told.value)
    assert log.count() == 3


def test_a_sweep_leaves_what_another_service_is_about_to_name(
    spark: Any, make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    ours, other = make_log("sqlite", "ours"), make_log("sqlite", "other shop")
    for log in (ours, other):
        log.send_many(50)
    archive(spark, ours, lake)
    swept: list[dict[str, Any]] = []

    def sweep(step: str) -> None:
        if step == "written":
            spec = JobSpec(services=(ours.spec,), lake=lake)
            swept.append(
                run(spec, "sweep", "--orphans-older-than", "0s")["counts"]["outbox"]
            )

    assert archive(spark, other, lake, on_step=sweep).rows == 50
    assert [one["orphans"] for one in swept] == [0]
    assert delta_rows(lake).num_rows == 100


def test_a_file_that_is_gone_before_it_is_named_deletes_no_row(
    spark: Any, log: Log, lake: LakeSpec
) -> None:
    log.send_many(50)

    def remove(step: str) -> None:
        if step == "committing":
            for file in path_of(lake).rglob("*.parquet"):
                file.unlink()

    with pytest.raises(EnvironmentFault, match="is gone"):
        archive(spark, log, lake, on_step=remove)

    assert log.count() == 50
    assert archive(spark, log, lake).rows == 50
    assert delta_rows(lake).num_rows == 50
