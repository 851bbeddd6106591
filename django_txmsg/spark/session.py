"""Creates Spark sessions, in this process or in a separate one. Only this module
contains Spark settings.

An active session is used as it is. A master that `spark-submit --master` or the
environment sets takes precedence. `follow` runs its Spark jobs in a separate process,
because they need a JVM.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from . import register
from .errors import EnvironmentFault
from .spec import JobSpec, hidden

#: Settings that the jobs need, wherever they run.
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
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
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
    "spark.ui.showConsoleProgress": "false",
    # It records the caller of each expression for error messages: thousands of calls.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}

#: The JVM's option for a run of seconds: it would spend most of its time on optimising
#: code that it then hardly executes.
SHORT = "-XX:TieredStopAtLevel=1"

#: A run that has not ended after this time hangs, or was killed.
LONGEST_RUN = dt.timedelta(days=1)
#: Only the end of the process's error output is kept.
LONGEST_ERROR = 500
#: Runs after which the process is replaced, so that its memory cannot grow for ever.
RUNS = 20


@contextmanager
def session(
    job: str, settings: Mapping[str, str] = {}, **how: bool
) -> Iterator[SparkSession]:
    """Yield a Spark session with the data source registered. A session that this
    function creates is stopped at the end. An active session keeps its settings. `how`
    are keyword arguments of `build()`.
    """
    active = SparkSession.getActiveSession()
    spark = active or build(f"txmsg {job}", settings, **how)
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


def build(
    name: str,
    settings: Mapping[str, str] = {},
    *,
    short: bool = False,
    progress: bool = False,
) -> SparkSession:
    """Start a session. It runs locally on all cores, unless the environment sets a
    master. Pass short=True for a run of seconds. With `progress`, Spark draws the
    progress of its stages if the error stream is a terminal.

    Raises EnvironmentFault if Spark does not start, for example because Java is
    missing.
    """
    builder = SparkSession.builder.appName(name)
    chosen = dict(SETTINGS)
    remote = settings.get("spark.remote") or os.environ.get("SPARK_REMOTE", "")
    if remote:
        return _connected(builder.remote(remote), remote, settings)
    master = settings.get("spark.master", "")
    if not master and not _submitted():
        master = "local[*]"
        builder = builder.master(master)
    if master.startswith("local"):
        chosen |= LOCAL
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ["PYTHONPATH"] = python_path()
        if short:
            # The user's options come later, and so take precedence.
            own = os.environ.get("SPARK_SUBMIT_OPTS", "")
            os.environ["SPARK_SUBMIT_OPTS"] = f"{SHORT} {own}"
    if progress and sys.stderr.isatty():
        chosen["spark.ui.showConsoleProgress"] = "true"
    chosen |= settings
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


class SparkProcess:
    """A process that runs one job after the other in the same Spark session. `settings`
    are settings of Spark.

    The process ends when a run fails. A Spark Connect server closes idle sessions, so
    if the failed run was not the first in its session, the run is tried again in a new
    process. A run that was killed because it had not ended after a day is not tried
    again: it would block the other jobs for another day.
    """

    def __init__(self, spec: JobSpec, settings: Sequence[tuple[str, str]] = ()) -> None:
        self.spec, self.settings = spec, settings
        #: The job of the run in progress.
        self.job = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._words: tuple[str, ...] = ()
        self._runs = 0
        self._since, self._error = 0.0, ""

    def start(self, job: str, *words: str) -> None:
        """Start a job with these command-line arguments."""
        self._error = ""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            try:
                self._launch()
            except OSError as error:
                self._error = f"it cannot be started: {error}"
        self.job, self._words, self._since = job, words, time.monotonic()
        if self._process is None:
            return  # poll() reports the error
        assert self._process.stdin is not None
        self._runs += 1
        spec = json.dumps(dataclasses.asdict(self.spec))  # with its secrets
        line = json.dumps({"spec": spec, "words": [job, *words]})
        with suppress(OSError):  # if it has just ended, poll() reports it
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _launch(self) -> None:
        words = [f"--conf={name}={value}" for name, value in self.settings]
        with NamedTemporaryFile() as out, NamedTemporaryFile() as errors:
            # Reading must not move the position at which the process writes. If a file
            # cannot be opened, no process starts.
            self._out = open(out.name, "rb")  # noqa: SIM115 - stop() closes them
            self._errors = open(errors.name, "rb")  # noqa: SIM115
            self._process = subprocess.Popen(  # noqa: S603 - our own words
                [sys.executable, "-m", "django_txmsg.spark.worker", *words],
                stdin=subprocess.PIPE, stdout=out, stderr=errors,
                env=os.environ | {"PYTHONPATH": python_path()},
            )  # fmt: skip

    def poll(self) -> dict[str, Any] | None:
        """Return the result of the run if it has ended: the name of the `job`, and its
        facts or an `error`. Returns None if the run has not ended."""
        if not (job := self.job):
            return None
        code = facts = None
        hangs = False
        if self._process is not None:
            code, facts = self._process.poll(), self._answer()
            hangs = facts is None and code is None
            if hangs and time.monotonic() - self._since < LONGEST_RUN.total_seconds():
                return None
        if facts is None:
            error = self._error or "it had not ended after a day, and was killed"
            if code is not None:
                assert self._errors is not None
                last = self._errors.read()[-LONGEST_ERROR:].decode(errors="replace")
                error = f"it ended with exit code {code}: {last.strip()}"
            facts = {"job": job, "error": error}
        self.job, failed, was_new = "", "error" in facts, self._runs <= 1
        if failed or self._runs >= RUNS:
            self.stop()
        if failed and not (was_new or hangs):
            self.start(job, *self._words)
            return None
        return facts

    def _answer(self) -> dict[str, Any] | None:
        """Return the facts of the run. The process prints them as one line of JSON.
        Returns None if that line has not been printed yet."""
        assert self._out is not None
        while line := self._out.readline():
            if not line.endswith(b"\n"):
                self._out.seek(-len(line), os.SEEK_CUR)  # its end comes later
                break
            with suppress(ValueError):  # another library's
                facts: dict[str, Any] = json.loads(line)
                return facts
        return None

    def stop(self) -> None:
        """End the process. This is safe during a run: the next run repeats its work."""
        files = [self._out, self._errors]
        if self._process is not None:
            files.append(self._process.stdin)
            self._process.kill()  # SIGTERM would not end a suspended process
            self._process.wait()
        for one in filter(None, files):
            with suppress(OSError):  # what the ended process has not read
                one.close()
        self._process, self.job = None, ""
        self._runs = 0
