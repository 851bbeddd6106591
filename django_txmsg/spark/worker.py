"""The process in which `follow` runs Spark jobs. It uses one session for many runs.

Each line on its standard input starts a run. The line contains the arguments and the
specification of a job. The specification may contain secrets, so it is not passed in a
file or in the process's arguments. The process prints the facts of each run, and ends
at the end of its input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from .cli import execute, parsed
from .errors import EnvironmentFault
from .session import session
from .spec import JobSpec


def run_each(lines: Iterable[str], words: Sequence[str]) -> None:
    """Run one job for each line of the standard input. `words` are settings of Spark:
    `--conf KEY=VALUE`. Raises EnvironmentFault if Spark does not start."""
    with session("follow", dict(parsed(["verify", *words]).conf)):
        for line in lines:
            asked = json.loads(line)
            given = parsed([*asked["words"], "--json"])
            execute(JobSpec.load(asked["spec"]), given)


if __name__ == "__main__":
    try:
        run_each(sys.stdin, sys.argv[1:])
    except EnvironmentFault as error:
        sys.exit(str(error))
