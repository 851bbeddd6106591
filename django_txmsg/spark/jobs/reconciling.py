"""Runs `reconcile` beside the archive, in a process of its own, because it needs a JVM.

Its specification goes through a pipe, including secrets, so that none are in a file or
in a list of processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..spec import JobSpec

#: Only the end of its output is kept.
SAID = 500


class Reconciling:
    """A run of `reconcile` with these command-line arguments."""

    def __init__(self, spec: JobSpec, words: Sequence[str]) -> None:
        self.spec, self.words = spec, words
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a run is in progress."""
        return self._process is not None

    def start(self) -> None:
        """Start a run."""
        home = str(Path(__file__).resolve().parents[3])
        known = os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join(filter(None, [home, known]))
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - poll() closes them
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "django_txmsg.spark", "reconcile", "--spec",
             "/dev/stdin", "--json", *self.words],
            stdin=subprocess.PIPE, stdout=self._out, stderr=self._errors,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(dataclasses.asdict(self.spec)).encode())

    def poll(self) -> dict[str, Any] | None:
        """Return its result, once it has ended: its facts, or its `error`."""
        if self._process is None or self._process.poll() is None:
            return None
        code, out, errors = self._process.returncode, self._out, self._errors
        self._process = None
        assert out is not None
        assert errors is not None
        with out, errors:
            out.seek(0)
            lines = out.read().decode(errors="replace").splitlines()
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-SAID:].strip()
        try:
            facts: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            facts = {"error": f"it ended with exit code {code}: {said}"}
        return facts

    def stop(self) -> None:
        """End it, if it is running: it has changed nothing that another run would
        miss."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
