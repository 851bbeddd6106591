"""Runs a job of the pipeline in this process, like the command line."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_txmsg.spark import cli
from django_txmsg.spark.jobs.outcome import Outcome
from django_txmsg.spark.jobs.running import run_job
from django_txmsg.spark.spec import JobSpec


def outcome(spec: JobSpec, *words: str) -> Outcome:
    """Run a job and return its result and output."""
    parser = ArgumentParser()
    cli.add_jobs(parser)
    given = parser.parse_args(words)
    return run_job(cli.complete(spec, given), given)


def run(spec: JobSpec, *words: str) -> dict[str, Any]:
    """Run a job, and return the facts that it reports."""
    return outcome(spec, *words).facts
