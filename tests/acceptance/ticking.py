"""Ten processes that run the schedule and are killed at random. `test_ticks.py` runs
it.

`python -m tests.acceptance.ticking PROCESSES TICKS SEED`. The processes are forks of a
process that has already set up Django, so that many can be killed in little time. Their
clock is faked: a minute takes `PACE` seconds. The database is real. Prints the first
and the last instant: every tick between them was due.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import sys
import threading
import time
from typing import NoReturn

#: Seconds that a minute takes for the processes.
PACE = 0.1
NOON = dt.datetime(2026, 6, 1, 12, tzinfo=dt.timezone.utc)


class Clock:
    """A fast clock that starts at noon. It shows the same time in every process."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self, using: str) -> dt.datetime:
        """Return the current time."""
        return NOON + (time.monotonic() - self.began) / PACE * dt.timedelta(minutes=1)


class Hurried(threading.Event):
    """An event whose wait() uses the faked clock."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds of the faked clock."""
        return super().wait(None if timeout is None else timeout * PACE / 60)


def keep_time(clock: Clock) -> NoReturn:
    """Run the schedule in this process until the process is killed."""
    from django_txmsg.scheduling.timekeeper import Timekeeper

    timekeeper = Timekeeper(["default"], now=clock)
    timekeeper._stop = Hurried()
    try:
        timekeeper.run("default")
    finally:
        os._exit(1)  # nothing but a kill ends it


def main(processes: int, ticks: int, seed: int) -> None:
    """Kill and start processes until `ticks` ticks have passed."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.db import connections

    from django_txmsg import every
    from django_txmsg.scheduling.timekeeper import Timekeeper

    every("* * * * *", "tests.soaked", tz="UTC", missed="all")
    clock, dice = Clock(), random.Random(seed)
    Timekeeper(["default"], now=lambda using: NOON).tick()
    connections.close_all()

    def start() -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            keep_time(clock)
        return pid

    alive = [start() for _ in range(processes)]
    killed, pause = 0, threading.Event()
    until = NOON + dt.timedelta(minutes=ticks)
    while killed < processes or clock("default") < until:
        pause.wait(dice.expovariate(processes / 2))
        place = dice.randrange(processes)
        os.kill(alive[place], signal.SIGKILL)
        _, status = os.waitpid(alive[place], 0)
        assert os.WIFSIGNALED(status), "a process ended by itself"
        killed += 1
        alive[place] = start()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # What the last of them would have done, had they lived.
    now = clock("default")
    Timekeeper(["default"], now=lambda using: now).tick()
    print(killed, now.isoformat(), flush=True)  # noqa: T201 - for the test


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
