"""Runs a job of the pipeline from its command-line arguments, in this process or in a
separate one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from argparse import Namespace
from typing import Any

from django_txmsg.spark import cli
from django_txmsg.spark.jobs.running import run_job
from django_txmsg.spark.runs import Run
from django_txmsg.spark.spec import JobSpec
from tests.spark.conftest import ROOT


def outcome(spec: JobSpec, *words: str) -> Run:
    """Run a job and return its result and output."""
    given = cli.parsed(words)
    return run_job(cli.complete(spec, given), given)


def but(given: Namespace, **changed: Any) -> Namespace:
    """Return the options of a job, with some of them changed."""
    return Namespace(**(vars(given) | changed))


def run(spec: JobSpec, *words: str) -> dict[str, Any]:
    """Run a job, and return the facts that it reports."""
    return outcome(spec, *words).facts


def start(spec: JobSpec, *words: str) -> subprocess.Popen[bytes]:
    """Start a job in its own process group."""
    text = json.dumps(dataclasses.asdict(spec))
    return subprocess.Popen(
        [sys.executable, "-m", "django_txmsg.spark", *words, "--spec", text],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a job has ended, and check that its exit code is 0."""
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()[-3_000:]
