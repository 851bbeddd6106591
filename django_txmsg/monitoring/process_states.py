"""The states of the worker processes on this host, one file for each process.

A worker writes its file once a second. `manage.py txmsg alive` reads the files of all
processes. The parent process of `--processes` reads the files of its children. If the
states were in the database, all workers would seem dead during an outage of the
database, and a supervisor would kill them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

from .. import conf
from ..runtime import liveness
from ..runtime.liveness import State
from ..runtime.thread_group import start_daemon

#: Seconds between two writes of a process's state.
INTERVAL = 1.0
#: Seconds without a run of its loops after which a process does not count as alive.
WITHIN = 300.0
#: Characters to which a state is padded.
LENGTH = 1024


def directory() -> Path:
    """Return the directory for the state files of this service and this user."""
    folder = Path(tempfile.gettempdir()) / f"txmsg-{os.getuid()}"
    return folder / conf.get().SERVICE.replace("/", "_")


def read(pid: int) -> State | None:
    """Return the last state that a process has written, with `silent` increased by the
    age of the state. Return None if the file cannot be read. If the process has ended,
    remove the file and return None."""
    path = directory() / str(pid)
    try:
        with path.open() as file:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
                return None
            # A shorter state does not overwrite all of a longer one than LENGTH.
            written, _ = json.JSONDecoder().raw_decode(file.read())
        # Another version of the code may have written others.
        known = State(*(written["state"][one.name] for one in fields(State)))
        # The system's clock is the same for all its processes.
        since = max(0.0, time.monotonic() - written["at"] - INTERVAL)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(known, silent=known.silent + since)


def running() -> dict[int, State]:
    """Return the states of the running processes, by process id."""
    try:
        names = os.listdir(directory())
    except FileNotFoundError:
        return {}
    found = {int(name): read(int(name)) for name in names if name.isdigit()}
    return {pid: state for pid, state in found.items() if state is not None}


@contextmanager
def written() -> Iterator[None]:
    """Write this process's state file once a second while the block runs.

    Raises OSError if the file cannot be written.
    """
    folder = directory()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # lstat: another user's link may lead to a directory of ours.
    if folder.parent.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder.parent} belongs to another user")
    folder.mkdir(mode=0o700, exist_ok=True)
    running()  # removes what killed processes have left
    path, done = folder / str(os.getpid()), threading.Event()
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w") as file:
        # A process that gets this lock knows that the owner has ended: process ids are
        # reused.
        fcntl.flock(file, fcntl.LOCK_EX)

        def keep_writing() -> None:
            while not done.wait(INTERVAL):
                with contextlib.suppress(OSError):  # no room: it counts as silent
                    _write(file.fileno())

        _write(file.fileno())
        draft.replace(path)
        writer = start_daemon("txmsg-state", keep_writing)
        try:
            yield
        finally:
            done.set()
            writer.join()
            path.unlink(missing_ok=True)


def _write(file: int) -> None:
    known = {"at": time.monotonic(), "state": asdict(liveness.state())}
    # Written at once, and with the same length: no reader sees half of it.
    os.pwrite(file, json.dumps(known).ljust(LENGTH).encode(), 0)
