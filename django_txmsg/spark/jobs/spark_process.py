"""Runs the Spark jobs of `follow` in a separate process, because they need a JVM."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from ..session import python_path
from ..spec import JobSpec

#: Only the end of the process's error output is kept.
LONGEST_ERROR = 500
#: Runs after which the process is replaced, so that its memory cannot grow for ever.
RUNS = 20


class SparkProcess:
    """A process that runs one job after the other in the same Spark session. `settings`
    are settings of Spark.

    The process ends when a run fails. A Spark Connect server closes idle sessions, so
    if the failed run was not the first in its session, the run is tried again in a new
    process.
    """

    def __init__(self, spec: JobSpec, settings: Sequence[tuple[str, str]] = ()) -> None:
        self.spec, self.settings = spec, settings
        self.job = ""
        """The job of the run in progress."""
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._words: tuple[str, ...] = ()
        self._read = self._runs = 0

    def start(self, job: str, *words: str) -> None:
        """Start a job with these command-line arguments."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._launch()
        assert self._process is not None
        assert self._process.stdin is not None
        self.job, self._words = job, words
        self._runs += 1
        spec = json.dumps(dataclasses.asdict(self.spec))  # with its secrets
        line = json.dumps({"spec": spec, "words": [job, *words]})
        with suppress(OSError):  # if it has just ended, poll() reports it
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _launch(self) -> None:
        words = [f"--conf={name}={value}" for name, value in self.settings]
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes them
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "django_txmsg.spark.worker", *words],
            stdin=subprocess.PIPE, stdout=self._out, stderr=self._errors,
            env=os.environ | {"PYTHONPATH": python_path()},
        )  # fmt: skip

    def poll(self) -> dict[str, Any] | None:
        """Return the result of the run if it has ended: the name of the `job`, and its
        facts or an `error`. Returns None if the run has not ended."""
        if self._process is None or not self.job:
            return None
        code = self._process.poll()
        facts = self._answer()
        if facts is None and code is None:
            return None
        job, self.job = self.job, ""
        if facts is None:
            facts = {
                "job": job,
                "error": f"it ended with exit code {code}: {self._last_words()}",
            }
        was_new = self._runs == 1
        if "error" in facts or self._runs >= RUNS:
            self.stop()
        if "error" in facts and not was_new:
            self.start(job, *self._words)
            return None
        return facts

    def _answer(self) -> dict[str, Any] | None:
        """Return the facts of the run. The process prints them as one line of JSON.
        Returns None if that line has not been printed yet."""
        assert self._out is not None
        # The process writes where the file's position is: reading must not move it.
        text = os.pread(self._out.fileno(), 1 << 24, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                facts: dict[str, Any] = json.loads(line)
            except ValueError:
                continue  # another library's
            return facts
        return None

    def _last_words(self) -> str:
        assert self._errors is not None
        size = os.fstat(self._errors.fileno()).st_size
        start = max(0, size - LONGEST_ERROR)
        text = os.pread(self._errors.fileno(), LONGEST_ERROR, start)
        return text.decode(errors="replace").strip()

    def stop(self) -> None:
        """End the process. This is safe during a run: the next run repeats its work."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            for one in (self._process.stdin, self._out, self._errors):
                assert one is not None
                with suppress(OSError):  # what the ended process has not read
                    one.close()
        self._process, self.job = None, ""
        self._read = self._runs = 0
