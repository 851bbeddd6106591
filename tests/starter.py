"""Starts `manage.py` commands as forks of a process that has already imported Django.

An interpreter needs a second of processor time to import Django and this package, and
the tests start several hundred processes. A fork is a separate process, with its own
environment, session and output. Each fork reads the settings itself. A test can stop
and kill each fork alone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
MANAGE = ROOT / "tests" / "manage.py"

#: Large, used by nearly every command, and the same under all settings.
IMPORTED = (
    "django.contrib.admin.views.main",
    "django.core.management.commands.migrate",
    "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base",
    "django.test",
    "django.views.debug",
    "django_txmsg.brokers",
    "django_txmsg.conf",
    "stomp",
)
#: What an interpreter or a library reads of the environment before the first line.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "COVERAGE", "PSYCOPG_")
#: What a fork takes over itself.
TAKEN_OVER = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}


class Started:
    """A process that the starter has forked. It has the methods of `subprocess.Popen`
    that tests use."""

    def __init__(self, starter: Starter, pid: int, stdout: IO[str]) -> None:
        self._starter = starter
        self.pid = pid
        self.stdout = stdout

    @property
    def returncode(self) -> int | None:
        """The exit code, or None. After a signal, it is the negative number of the
        signal."""
        status = self._starter.ended.get(self.pid)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit code. Raises
        `subprocess.TimeoutExpired`."""
        with self._starter.changed:
            self._starter.changed.wait_for(
                lambda: self.returncode is not None, timeout=timeout
            )
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)

    def pause(self, timeout: float = 30.0) -> None:
        """Send SIGSTOP, and wait until all threads of the process have stopped."""
        with self._starter.changed:
            self._starter.stopped.discard(self.pid)
        self.send_signal(signal.SIGSTOP)
        with self._starter.changed:
            assert self._starter.changed.wait_for(
                lambda: self.pid in self._starter.stopped, timeout=timeout
            ), self.pid


class Starter:
    """The test process's side of the connection. It requests forks, and receives their
    exit codes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        #: Wait statuses by process id.
        self.ended: dict[int, int] = {}
        self.stopped: set[int] = set()
        self._started: list[int] = []
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._starting = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> Started:
        """Start `manage.py` with these arguments. The output can be read from `stdout`
        of the result."""
        reading, writing = os.pipe()
        changed = {name for name in env if env[name] != os.environ.get(name)}
        changed -= TAKEN_OVER
        anew = any(name.startswith(READ_AT_START) for name in changed)
        request = json.dumps([[str(MANAGE), *arguments], dict(env), anew]).encode()
        with self._starting:
            size = len(request).to_bytes(8, "big")
            socket.send_fds(self._socket, [size], [writing])
            self._socket.sendall(request)
            os.close(writing)
            with self.changed:
                assert self.changed.wait_for(lambda: self._started, timeout=60.0)
                pid = self._started.pop()
        return Started(self, pid, open(reading, encoding="utf-8", errors="replace"))

    def _read(self) -> None:
        with self._socket.makefile(encoding="utf-8") as lines:
            for line in lines:
                what, pid, status = line.split()
                with self.changed:
                    if what == "started":
                        self._started.append(int(pid))
                    elif os.WIFSTOPPED(int(status)):
                        self.stopped.add(int(pid))
                    else:
                        self.ended[int(pid)] = int(status)
                    self.changed.notify_all()


_starter: Starter | None = None


def start(arguments: Sequence[str], env: Mapping[str, str]) -> Started:
    """Start `manage.py` with these arguments and this environment."""
    global _starter
    if _starter is None:
        _starter = Starter()
    return _starter.start(arguments, env)


def serve(connection: socket.socket) -> bool:
    """Fork a process for each request. Return True in each fork. In the starter, return
    False when the connection is closed."""
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakes:
                    with suppress(BlockingIOError):
                        wakes.recv(4096)
                    _report(connection)
                    continue
                size, descriptors, *_ = socket.recv_fds(connection, 8, 1)
                if not size:
                    return False
                request = b""
                while len(request) < int.from_bytes(size, "big"):
                    request += connection.recv(65536)
                ready, leads = os.pipe()
                pid = os.fork()
                if not pid:
                    # The session is there before anybody signals it.
                    os.setsid()
                    os.close(leads)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for one in (connection, wakes, woken):
                        one.close()
                    _become(*json.loads(request), descriptors[0])
                    return True
                os.close(leads)
                os.close(descriptors[0])
                os.read(ready, 1)
                os.close(ready)
                connection.sendall(f"started {pid} 0\n".encode())


def _report(connection: socket.socket) -> None:
    """Tell the test process which of its forks have ended or stopped."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not pid:
                return
            connection.sendall(f"status {pid} {status}\n".encode())


def _become(arguments: list[str], env: dict[str, str], anew: bool, output: int) -> None:
    """Make this fork look like a new interpreter. Pass anew=True to start a real new
    interpreter instead."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if anew:
        os.execve(sys.executable, [sys.executable, "-u", *arguments], env)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    main_module: Any = sys.modules["__main__"]
    main_module.__file__ = arguments[0]
    # What a supervisor starts its children by.
    sys.orig_argv = [sys.executable, "-u", *arguments]


def main() -> None:
    """Import Django and the package, fork for each request, and run the command in the
    fork."""
    # In place of tests/: `tests` is a package, its modules are no top-level names.
    sys.path[0] = str(ROOT)
    for name in IMPORTED:
        importlib.import_module(name)
    # A fork's collections leave these pages shared.
    gc.collect()
    gc.freeze()
    if serve(socket.socket(fileno=int(sys.argv[1]))):
        importlib.import_module("tests.manage").main()


if __name__ == "__main__":
    main()
