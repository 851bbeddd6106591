"""`reconcile` beside `follow`, in a process of its own, because it needs a JVM."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..spec import JobSpec

#: Only the end of the process's error output is kept.
LONGEST_ERROR = 500
#: Runs after which the process is replaced, so that its memory cannot grow for ever.
RUNS = 50


class Reconciling:
    """Runs of `reconcile` with these command-line arguments. The process, and the Spark
    session in it, stay for the next run. A run that fails ends them."""

    def __init__(self, spec: JobSpec, words: Sequence[str]) -> None:
        self.spec, self.words = spec, words
        self.under_way = False
        """Whether a run is in progress."""
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._read = self._runs = 0

    def start(self) -> None:
        """Start a run."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._launch()
        assert self._process is not None
        assert self._process.stdin is not None
        self.under_way = True
        self._runs += 1
        line = json.dumps(dataclasses.asdict(self.spec)).encode()
        with suppress(OSError):  # if it has just ended, poll() reports it
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _launch(self) -> None:
        home = str(Path(__file__).resolve().parents[3])
        known = os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join(filter(None, [home, known]))
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes them
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "django_txmsg.spark.reconciler", *self.words],
            stdin=subprocess.PIPE, stdout=self._out, stderr=self._errors,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip

    def poll(self) -> dict[str, Any] | None:
        """Return the run's result once it has ended: its facts, or its `error`."""
        if self._process is None or not self.under_way:
            return None
        code = self._process.poll()
        facts = self._answer()
        if facts is None and code is None:
            return None
        self.under_way = False
        if facts is None:
            facts = {"error": f"it ended with exit code {code}: {self._last_words()}"}
        if "error" in facts or self._runs >= RUNS:
            self.stop()
        return facts

    def _answer(self) -> dict[str, Any] | None:
        """Return the facts of the run, if they are there: the next line of JSON."""
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
        """End the process. A run in progress has changed nothing that another run would
        miss."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            for one in (self._process.stdin, self._out, self._errors):
                assert one is not None
                with suppress(OSError):  # what the ended process has not read
                    one.close()
        self._process, self.under_way = None, False
        self._read = self._runs = 0
