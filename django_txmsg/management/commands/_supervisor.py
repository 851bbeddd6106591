"""`--processes N` and `--reload`: a parent that starts children, restarts those that
end, and forwards signals.

The parent keeps no connection open. A child is a new process of the same command, so it
imports the project's code as it is when the child starts.

SIGTERM and SIGINT drain and end all children. A second signal ends them immediately.
SIGHUP replaces the children one after the other: the parent stops the next child only
after the previous child's replacement has started to work.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.apps import apps

from ...monitoring import process_states
from ...runtime import liveness

# A child process: the same command again.
#
# SIGTERM ends it. It also ends when its parent is killed, which closes a pipe between
# them.

#: Tells a child that it is one; the value is the number of a pipe's end.
PIPE = "TXMSG_PARENT_PIPE"
# Removed from the environment: processes that a handler starts are not children of our
# parent.
_pipe = os.environ.pop(PIPE, "")


def is_child() -> bool:
    """Return whether a parent supervises this process."""
    return bool(_pipe)


def start(pipe: int, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start a child process that runs this process's command. Call this in the main
    thread.

    `pipe` is the read end of a pipe to which this process never writes. When this
    process dies, the pipe closes, and the child detects that. The child gets the
    environment variables of this process and those in `environment`.
    """
    # A terminal's Ctrl-C reaches both, and the child must get it only once, from its
    # parent. A process group of its own would keep a debugger from the keyboard. A
    # signal blocked here stays blocked in the child. This process gets it afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(  # noqa: S603 - what we were started with
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, **environment, PIPE: str(pipe)},
            pass_fds=(pipe,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parent_pipe() -> list[int]:
    """Return the end of the pipe that can be read from when the parent of this child
    process has ended. Return an empty list in a process that is not a child."""
    return [int(_pipe)] if _pipe else []


@contextmanager
def signals_read(signals: Collection[signal.Signals]) -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of these signals can be read, while the
    block runs. The signals have no other effect.

    While the main thread waits for a database, it cannot run a signal handler, but the
    number can already be read from the socket.
    """
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    before = {
        number: signal.signal(number, lambda one, frame: None) for number in signals
    }
    fd_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    _before.update(before)
    try:
        yield reading
    finally:
        _before.clear()
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        # A forked process has a copy of it, so closing it does not end the reading.
        writing.shutdown(socket.SHUT_RDWR)
        writing.close()
        reading.close()


#: What the signals did that `signals_read` handles now.
_before: dict[signal.Signals, Any] = {}


_mask = threading.local()


def _hold() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _before)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget() -> None:
    """Let a forked process obey signals as before `signals_read`. Its socket is also
    this process's: the SIGTERM by which `multiprocessing` ends a child of a handler
    would stop this process, and not the child."""
    if _before:
        signal.set_wakeup_fd(-1)
        for number, handler in _before.items():
            signal.signal(number, handler)
    _let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)

log = logging.getLogger("django_txmsg.supervisor")

#: Seconds between two checks of the children, if no signal arrives.
INTERVAL = 0.5
#: Shortest and longest pause, in seconds, before a failed child is restarted.
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
#: A child that runs for this many seconds has not failed at its start.
STEADY = 60.0


@dataclass
class Slot:
    """The state of one child, and later of the child that replaces it."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0
    started_at: float = 0.0
    #: How often in a row its children have failed.
    failures: int = 0
    #: Whether its child has been asked to end.
    leaving: bool = False

    @property
    def works(self) -> bool:
        """Whether the child has started to work."""
        state = None if self.process is None else process_states.read(self.process.pid)
        return state is not None and state.ready

    def __str__(self) -> str:
        assert self.process is not None
        return f"process {self.number} (pid {self.process.pid})"


class Supervisor:
    """Keeps `count` children running. Call `run()` in the main thread."""

    signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD,
    )  # fmt: skip
    #: The codes of a child that was asked to end, before it handles signals.
    asked: tuple[int, ...] = (-signal.SIGTERM,)

    def __init__(self, count: int, environment: Mapping[str, str] = {}):
        self.slots = [Slot(number) for number in range(1, count + 1)]
        self._environment = environment
        self._replacing: deque[Slot] = deque()
        self._stops = 0
        self._code = 0
        self._pipe, self._never_written = os.pipe()

    def run(self) -> int:
        """Keep children running until a signal has ended all of them. Return the
        highest of their exit codes."""
        liveness.begin("txmsg-supervisor", ready=False)
        # By the socket, so that no signal handler interrupts the loop's work.
        with signals_read(self.signals) as reading:
            while True:
                liveness.turned(ready=self.ready)
                for slot in self.slots:
                    self._look(slot)
                if self._stops and not any(slot.process for slot in self.slots):
                    break
                self._replace()
                if select.select([reading], [], [], INTERVAL)[0]:
                    for number in reading.recv(1024):
                        self._obey(number)
        liveness.ended()
        os.close(self._pipe)
        os.close(self._never_written)
        return self._code

    def alive(self, within: float) -> str:
        """Return a description of a child with a loop that has not run for `within`
        seconds. Return "" if every loop of every child has run within that time."""
        now = time.monotonic()
        for slot in self.slots:
            process = slot.process
            if process is None or process.returncode is not None:
                continue  # it is about to be started again
            state = process_states.read(process.pid)
            silent = now - slot.started_at
            silent = silent if state is None else min(silent, state.silent)
            if silent > within:
                loop = f": {state.loop}" if state else ""
                return f"{slot}{loop} has not run for {silent:.0f} s"
        return ""

    @property
    def ready(self) -> bool:
        """Whether a child works, and the parent is not stopping."""
        return not self._stops and any(slot.works for slot in self.slots)

    def _look(self, slot: Slot) -> None:
        if slot.process is None:
            if not self._stops and time.monotonic() >= slot.start_at:
                self._start(slot)
        elif slot.process.poll() is not None:
            self._note_end(slot)
            slot.process, slot.leaving = None, False
        elif time.monotonic() - slot.started_at > STEADY:
            slot.failures = 0

    def _start(self, slot: Slot) -> None:
        name = {"TXMSG_SLOT": f"{os.getpid()}-{slot.number}"}
        try:
            slot.process = start(self._pipe, {**self._environment, **name})
        except OSError as error:  # no memory, say: the others go on
            pause = self._failed(slot)
            log.error("process %d: %s; next try in %g s", slot.number, error, pause)
            return
        slot.started_at = time.monotonic()
        log.info("%s started", slot)

    def _failed(self, slot: Slot) -> float:
        """Count a failure of the child. Return the seconds until its replacement is
        started."""
        slot.failures += 1
        pause: float = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(slot.failures - 1, 10))
        slot.start_at = time.monotonic() + pause
        return pause

    def _note_end(self, slot: Slot) -> None:
        assert slot.process is not None
        code = slot.process.returncode
        if slot.leaving and code in self.asked:
            code = 0
        code = 128 - code if code < 0 else code
        lived = time.monotonic() - slot.started_at
        if self._stops:
            self._code = max(self._code, code)
        if code == 0:
            slot.failures = 0
            log.info("%s ended normally after %.0f s", slot, lived)
            return
        pause = self._failed(slot)
        then = "" if self._stops else f"; another one starts in {pause:g} s"
        log.error("%s ended with %d after %.0f s%s", slot, code, lived, then)

    def _replace(self) -> None:
        """During a rolling restart, end the next old child, but only if every child has
        started to work and none is stopping."""
        if not self._replacing:
            return
        if any(slot.failures for slot in self.slots):
            self._replacing.clear()
            log.error("the rolling restart stops: a process has failed")
        elif all(slot.works and not slot.leaving for slot in self.slots):
            slot = self._replacing.popleft()
            log.info("%s is replaced", slot)
            self._end(slot)

    def _obey(self, number: int) -> None:
        if number == signal.SIGHUP and not self._stops:
            self._replacing = deque(self.slots)
            for slot in self.slots:  # a failed one may work now
                slot.start_at, slot.failures = 0.0, 0
        elif number in (signal.SIGTERM, signal.SIGINT):
            self._stops += 1
            liveness.stopping()
            self._replacing.clear()
            running = [slot for slot in self.slots if slot.process]
            if self._stops == 1:
                log.info("stopping %d processes", len(running))
            for slot in running:
                # A child that is being replaced has had its first signal.
                if self._stops > 1 or not slot.leaving:
                    self._end(slot)

    def _end(self, slot: Slot) -> None:
        assert slot.process is not None
        slot.leaving = True
        slot.process.terminate()


# `--reload`: a child that is restarted when a file changes.

#: Seconds that the child then has to finish its messages.
GRACE = 10.0
_FOREIGN = ("site-packages", "dist-packages", "node_modules", "__pycache__")


class Reloader(Supervisor):
    """The parent process of `--reload`. It restarts its child when a file changes. A
    child that does not end in time is then killed. After SIGTERM, the child may finish
    its messages, however long that takes."""

    # Without SIGHUP: the processes end with their terminal.
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    asked = (-signal.SIGTERM, -signal.SIGKILL)

    def __init__(self, environment: Mapping[str, str]):
        super().__init__(1, environment)
        self._seen = dict(files())
        self._kill_at = math.inf

    def _look(self, slot: Slot) -> None:
        now = dict(files())
        changed = sorted(set(now.items()) ^ set(self._seen.items()))
        self._seen = now
        if slot.process is None:
            self._kill_at = math.inf
        # A second signal would abort the messages of a child that is already draining.
        if changed and not (self._stops or slot.leaving):
            log.warning("%s changed: starting again", changed[0][0])
            slot.start_at, slot.failures = 0.0, 0
            if slot.process is not None:
                self._kill_at = time.monotonic() + GRACE
                self._end(slot)
        if slot.process is not None and time.monotonic() >= self._kill_at:
            self._kill_at = math.inf
            log.warning("%s is killed: it has not ended within %g s", slot, GRACE)
            slot.process.kill()
        super()._look(slot)


def files() -> Iterator[tuple[str, float]]:
    """Yield the path and the modification time of each of the project's own Python
    files: those of its applications, those beside its settings, and those of its other
    imported modules."""
    found: set[str] = set()
    roots = {config.path for config in apps.get_app_configs()}
    settings = sys.modules.get(os.environ.get("DJANGO_SETTINGS_MODULE", ""))
    if file := getattr(settings, "__file__", None):
        roots.add(str(Path(file).parent))
    for root in filter(_own, roots):
        for folder, folders, names in os.walk(root):
            folders[:] = [
                one for one in folders if one[0] != "." and one not in _FOREIGN
            ]
            found |= {f"{folder}/{name}" for name in names if name.endswith(".py")}
    found |= {
        file
        for module in list(sys.modules.values())
        if (file := str(getattr(module, "__file__", None))).endswith(".py")
        and _own(file)
    }
    for path in sorted(found):
        with suppress(OSError):
            yield path, os.stat(path).st_mtime


def _own(path: str) -> bool:
    foreign = any(part in _FOREIGN for part in Path(path).parts)
    return not foreign and not path.startswith(str(Path(os.__file__).parent))


def cores() -> int:
    """Return the number of processor cores that this process may use. Its CPU affinity
    and its container's quota can limit them."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return count  # no such quota
