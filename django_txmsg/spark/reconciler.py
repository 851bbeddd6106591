"""The process in which `follow` runs `reconcile`: one Spark session for many runs.

Each line of its input is a specification, which may contain secrets: no file and no
list of processes shows it. For each, the process runs `reconcile` with its own
arguments and prints the run's facts. It ends when its input ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from .cli import add_jobs, execute
from .errors import EnvironmentFault
from .session import session
from .spec import JobSpec


def reconcile_each(lines: Iterable[str], words: Sequence[str]) -> None:
    """Run `reconcile` with these command-line arguments for each specification. Raises
    EnvironmentFault if Spark does not start."""
    parser = argparse.ArgumentParser(prog="follow")
    add_jobs(parser)
    words = ["reconcile", "--json", *words]
    with session("reconcile", dict(parser.parse_args(words).conf)):
        for line in lines:
            # Again for each run: an age such as --since 1d counts from now.
            execute(JobSpec.load(line), parser.parse_args(words))


if __name__ == "__main__":
    try:
        reconcile_each(sys.stdin, sys.argv[1:])
    except EnvironmentFault as error:
        sys.exit(str(error))
