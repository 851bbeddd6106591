"""A real server in a process, which tests start, stop, kill and restart with its
data."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil

from .keeper import KEEPER
from .root import Root

#: So many ports a process takes for itself at a time.
BLOCK = 100


class ServerFailedError(RuntimeError):
    """A server did not start, or did not stop."""


class Server:
    """A server with its own directory, and with ports that stay the same after a
    restart."""

    name: ClassVar[str]
    #: What `missing()` says to install where a program is not there.
    debian_packages: ClassVar[str]
    #: The signal that means "finish and exit".
    stop_signal: ClassVar[int] = signal.SIGTERM
    #: Seconds to come up: a slow machine with two busy cores is normal.
    deadline: ClassVar[float] = 90.0

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"txmsg-{self.name}-"))
        KEEPER.remove(self.directory)
        atexit.register(self.remove)
        self.process: subprocess.Popen[bytes] | None = None
        #: As the running server says it; "" before, and where it does not.
        self.version = ""

    @classmethod
    def root(cls) -> Root:
        """Return the root that contains this server's programs."""
        return Root.of(cls.name)

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        """Return each needed program with its path, or None if it is missing."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return what has to be installed, or None if everything is there."""
        absent = [name for name, place in cls.programs().items() if place is None]
        if not absent:
            return None
        if cls.root().name:
            return (
                f"{cls.name} is not in {cls.root().folder} (no {', '.join(absent)}). "
                "Make it: scripts/servers_of_today.sh"
            )
        return (
            f"{cls.name} is not installed (no {', '.join(absent)}). "
            f"Install it: apt-get install {cls.debian_packages}"
        )

    def prepare(self) -> None:
        """Write the configuration, and create the data directory. Called only before
        the first start."""
        raise NotImplementedError

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process with `spawn`."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether the server works. It is not enough that the server listens."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Return whether the process exists."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        if self.running:
            return
        if self.process is not None:
            # The report of a failed test shows it.
            code = self.process.returncode
            sys.stderr.write(f"{self.name} ended by itself, {code}:\n{self.log()}\n")
            self._settle()
        absent = self.missing()
        if absent:
            raise ServerFailedError(absent)
        if not (self.directory / "prepared").exists():
            self.prepare()
            (self.directory / "prepared").touch()
        self.process = self.launch()
        end = time.monotonic() + self.deadline
        pause = threading.Event()
        while not self.ready() or not self.running:
            code = self.process.poll()
            if code is not None:
                self._settle()
                raise ServerFailedError(f"{self.name} ended with {code}:\n{self.log()}")
            if time.monotonic() > end:
                self.kill()
                raise ServerFailedError(
                    f"{self.name} not ready in {self.deadline:.0f} s:\n{self.log()}"
                )
            pause.wait(0.1)

    def stop(self) -> None:
        """Stop the server in the normal way. If that takes too long, kill the server
        and raise ServerFailedError."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailedError(
                f"{self.name} did not stop in 60 s and was killed:\n{self.log()}"
            ) from None
        self._settle()

    def kill(self) -> None:
        """Send SIGKILL to the server and to all processes that it started. This
        simulates a power cut."""
        if self.process is None:
            return
        if self.running:  # otherwise another process may have its id by now
            leader = psutil.Process(self.process.pid)
            family = [leader, *leader.children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=30)
        self.process.wait(30)
        self._settle()

    def restart(self) -> None:
        """Stop the server, and start it again with the same data and port."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """Stop the server, and delete its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, lines: int = 40) -> str:
        """Return the end of the server's output."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.directory / "log").read_text(errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def spawn(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in its own process group, which the keeper ends if the tests
        are killed."""
        command, user = self.root().command(command, user)
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **(env or {})},
                user=user,
                group=user,
                extra_groups=[] if user else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        KEEPER.watch(process.pid, self.stop_signal)
        return process

    def run(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the server's own tools until it ends."""
        command, user = self.root().command(command, user)
        return subprocess.run(
            command,
            cwd=self.directory,
            env={**os.environ, **(env or {})},
            user=user,
            group=user,
            extra_groups=[] if user else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def _settle(self) -> None:
        """End the remaining processes of the server's process group."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        KEEPER.forget(self.process.pid)
        self.process = None


def free_port() -> int:
    """Return a free port that no other server gets.

    A server binds its port seconds after this call. After a kill and a restart, it
    binds the same port again. Meanwhile no other server may get the port, in this test
    run or in a parallel one.
    """
    return next(_PORTS)


def _ports() -> Iterator[int]:
    """Yield free ports, each once, from blocks that this process reserves.

    To reserve a block, the process keeps the block's first port bound until it ends.
    The blocks are below the ports that the kernel assigns to clients. Otherwise a
    client that retries a dead port could connect to itself.
    """
    blocks = random.SystemRandom()  # the tests' own seed may be that of another run
    while True:
        first = blocks.randrange(15000, 32000, BLOCK)
        lock = _bound(first)
        if lock is None:
            continue
        atexit.register(lock.close)
        for port in range(first + 1, first + BLOCK):
            probe = _bound(port)
            if probe is not None:
                probe.close()
                yield port


def _bound(port: int) -> socket.socket | None:
    """Return a socket that is bound to the port on loopback, or None if the port is in
    use."""
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        return None
    return bound


_PORTS = _ports()
