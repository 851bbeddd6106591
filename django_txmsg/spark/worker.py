"""The process in which `follow` runs the jobs that need Spark: one session for many
runs.

Each line of its input starts a run. The line contains a job's command line and its
specification. The specification may contain secrets, so it is passed neither in a file
nor in a process's arguments. The process prints the facts of each run. It ends when its
input ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from .cli import add_jobs, execute
from .errors import EnvironmentFault
from .session import session
from .spec import JobSpec


def run_each(lines: Iterable[str], words: Sequence[str]) -> None:
    """Run the jobs. `words` are the settings of Spark, `--conf KEY=VALUE`. Raises
    EnvironmentFault if Spark does not start."""
    parser = argparse.ArgumentParser(prog="follow")
    add_jobs(parser)
    given = parser.parse_args(["verify", *words])
    with session("follow", dict(given.conf)):
        for line in lines:
            asked = json.loads(line)
            given = parser.parse_args([*asked["words"], "--json"])
            execute(JobSpec.load(asked["spec"]), given)


if __name__ == "__main__":
    try:
        run_each(sys.stdin, sys.argv[1:])
    except EnvironmentFault as error:
        sys.exit(str(error))
