"""With an earlier PySpark, missing features are replaced, or refused with a one-line
error. The same applies to a job without the extra `[spark]`."""

from __future__ import annotations

import subprocess
import sys

import pyspark
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from django_txmsg.spark.engine import insist_on, installed
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.source.datasource import TxmsgDataSource
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.log import Log
from tests.spark.running import run

ID = StructType([StructField("id", LongType())])


def test_versions_compare_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.10.1.dev0")

    assert installed() == (4, 10, 1)
    insist_on("4.9", "This")
    with pytest.raises(EnvironmentFault, match=r"4\.10\.1\.dev0 is .*sql\]>=4\.11'"):
        insist_on("4.11", "This")


def test_an_analysis_without_sketches_is_refused_before_anything_starts(
    make_log, lake: LakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Log = make_log("sqlite")
    monkeypatch.setattr(pyspark, "__version__", "4.1.1")

    with pytest.raises(
        EnvironmentFault, match=r"analyze needs PySpark 4\.1\.2 or newer"
    ):
        run(JobSpec((log.spec,), lake), "analyze")

    assert log.rows("SELECT state FROM django_txmsg_pipelinerun") == [("failed",)]


def test_a_stream_without_limits_says_which_version_has_them(
    make_log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Log = make_log("sqlite")
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")

    with pytest.raises(EnvironmentFault, match=r"maxRowsPerBatch.* needs PySpark 4\.2"):
        TxmsgDataSource({"url": log.spec.url, "maxRowsPerBatch": "5"}).streamReader(ID)


def test_a_stream_without_a_start_detects_another_cluster(
    make_log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(3)
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    stream = TxmsgDataSource({"url": log.spec.url}).streamReader(ID)

    start = stream.initialOffset()
    end = stream.latestOffset()  # type: ignore[call-arg]  # as 4.1 asks
    [part] = stream.partitions(start, end)
    [batch] = stream.read(part)
    assert batch.column(0).to_pylist() == [1, 2, 3]
    assert list(stream.partitions(end, end)) == []
    # Nothing is read again where the highest rows have left.
    log.execute("DELETE FROM django_txmsg_outboxmessage")
    assert stream.latestOffset() == end  # type: ignore[call-arg]  # as 4.1 asks
    with pytest.raises(EnvironmentFault, match="Start with a new checkpoint"):
        stream.partitions(start | {"cluster": "1"}, end)


def reconcile_without(module: str) -> tuple[int, str]:
    """Run a job in a Python that cannot import a module. Return the exit code and the
    error output."""
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from django_txmsg.spark.cli import main\n"
        "sys.exit(main(['reconcile', '--service', 'shop=sqlite:////nowhere',"
        " '--lake', 'file:///nowhere']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow", "deltalake"])
def test_without_the_extra_a_job_says_what_to_install(missing: str) -> None:
    assert reconcile_without(missing) == (
        3,
        f"reconcile: The pipeline needs {missing}, which is not installed. "
        'Run: pip install "django_txmsg[spark]"\n',
    )


def test_a_missing_module_that_is_not_in_the_extra_keeps_its_traceback() -> None:
    missing = "django_txmsg.spark.jobs.running"
    code, errors = reconcile_without(missing)
    assert code == 3
    assert "Traceback (most recent call last)" in errors
    assert f"ModuleNotFoundError: import of {missing} halted" in errors
    assert "pip install" not in errors
