"""Creates Spark sessions. Only this module contains Spark settings.

An active session is used as it is. A master that `spark-submit --master` or the
environment sets takes precedence.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from . import register
from .errors import EnvironmentFault
from .spec import hidden

#: Settings that the jobs need, wherever they run.
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A file named by the log is checked here, not in a task for each file.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
}


#: The settings for one machine: no port is open to the network, shuffles have few
#: partitions, and Spark keeps no history of queries.
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    # Kept for a page that is not there.
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def session(
    job: str, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield a Spark session with the data source registered. A session that this
    function creates is stopped at the end. An active session keeps its settings.

    Raises EnvironmentFault if Spark does not start, for example because Java is
    missing.
    """
    active = SparkSession.getActiveSession()
    spark = active or build(f"txmsg {job}", settings)
    before = {name: spark.conf.get(name, None) for name in SETTINGS}
    try:
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        register(spark)
        yield spark
    finally:
        if active is None:
            spark.stop()
        else:
            for name, known in before.items():
                if known is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, known)


def build(name: str, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start a session. It runs locally on all cores, unless the environment sets a
    master."""
    builder = SparkSession.builder.appName(name)
    chosen = dict(SETTINGS)
    remote = (settings or {}).get("spark.remote") or os.environ.get("SPARK_REMOTE", "")
    if remote:
        return _connected(builder.remote(remote), remote, settings or {})
    master = (settings or {}).get("spark.master", "")
    if not master and not _submitted():
        master = "local[*]"
        builder = builder.master(master)
    if master.startswith("local"):
        chosen |= LOCAL
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ["PYTHONPATH"] = python_path()
    chosen |= settings or {}
    for key, value in chosen.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        raise EnvironmentFault(
            f"Spark does not start: {error}. It needs Java 17 or newer: install one "
            "(on Debian, openjdk-17-jre-headless) or set JAVA_HOME."
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _connected(
    builder: SparkSession.Builder, remote: str, settings: Mapping[str, str]
) -> SparkSession:
    """Return a session of a Spark Connect server. Static settings are those of the
    server."""
    server = remote.partition(";")[0].rstrip("/")  # what follows may be a token
    parts = urlsplit(server)
    try:
        # Spark itself would retry for minutes.
        socket.create_connection((parts.hostname, parts.port or 15002), 10).close()
        spark = builder.getOrCreate()
        for key, value in settings.items():
            if key != "spark.remote":
                spark.conf.set(key, value)
    except Exception as error:
        why = str(error).partition("\n")[0].replace(remote, server)
        if isinstance(error, ImportError):
            why += ". Run pip install 'pyspark[connect]'"
        raise EnvironmentFault(
            f"The Spark Connect server at {hidden(server)} cannot be used: {why}."
        ) from error
    return spark


def running() -> bool:
    """Return True if a session is active in this process, or if spark-submit or the
    environment determines where Spark runs."""
    known = SparkSession.getActiveSession() is not None
    return known or _submitted() or bool(os.environ.get("SPARK_REMOTE"))


def _submitted() -> bool:
    """Return True if spark-submit started this process, or if the environment contains
    a master for spark-submit."""
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    return "--master" in arguments or "PYSPARK_GATEWAY_PORT" in os.environ


def python_path() -> str:
    """Return PYTHONPATH with the package's directory. Local workers and other processes
    inherit the environment, but not `sys.path`."""
    home = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([home, *filter(None, paths)]))
