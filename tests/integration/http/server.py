"""A real web server for the tests' views: gunicorn, whose workers the tests kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults import ROOT, wait_until
from tests.services import free_port
from tests.services.keeper import KEEPER

SETTINGS = "tests.integration.http.settings"


class WebServer:
    """gunicorn with `workers` worker processes. Its master replaces a killed worker."""

    def __init__(
        self,
        directory: Path,
        *,
        txmsg: Mapping[str, Any],
        hook: str | None = None,
        workers: int = 1,
        threads: int = 1,
        preload: bool = False,
        asgi: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._once = directory / f"once-{self.port}"
        self._log = (directory / f"web-{self.port}.log").open("w+")
        self.process = subprocess.Popen(
            _command(self.port, workers, threads, preload, asgi),
            cwd=ROOT,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": SETTINGS,
                "PYTHONPATH": str(ROOT),
                "TXMSG_TEST_HOOK": hook or "",
                "TXMSG_TEST_SETTINGS": json.dumps(dict(txmsg)),
                "TXMSG_TEST_ONCE": str(self._once),
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        KEEPER.watch(self.process.pid, signal.SIGKILL)
        wait_until(self._answers, deadline=60, message=self.log)

    def __enter__(self) -> WebServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, path: str, *, timeout: float = 60, **options: Any) -> httpx.Response:
        """Send one request, on a new connection."""
        return httpx.post(f"{self.url}/{path}", timeout=timeout, **options)

    def post_and_die(self, path: str) -> None:
        """Send a request, and check that the worker dies before it answers."""
        try:
            response = self.post(path)
        except httpx.TransportError:
            return
        raise AssertionError(f"it answered {response.status_code}:\n{self.log()}")

    def has_died_once(self) -> bool:
        """Whether the hook has killed a worker process."""
        return self._once.exists()

    def has_stopped_once(self) -> bool:
        """Whether the hook has suspended a worker process."""
        return Path(f"{self._once}.stopped").exists()

    def resume(self) -> None:
        """Resume suspended workers."""
        for pid in self.workers():
            os.kill(pid, signal.SIGCONT)

    def go_on(self) -> None:
        """Let all requests that wait before their commit continue."""
        Path(f"{self._once}.go").touch()

    def workers(self) -> list[int]:
        """The process ids of the current workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [one.pid for one in psutil.Process(self.process.pid).children()]
        return []

    def log(self) -> str:
        """The server's output."""
        return Path(self._log.name).read_text()

    def kill(self) -> None:
        """Kill the master and all workers with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        KEEPER.forget(self.process.pid)

    def close(self) -> None:
        """Kill the processes that are still running."""
        self.kill()
        self._log.close()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/without", timeout=10).status_code == 200
        except httpx.TransportError:
            return False


def _command(
    port: int, workers: int, threads: int, preload: bool, asgi: bool
) -> list[str]:
    if asgi:
        return [
            *[sys.executable, "-m", "uvicorn", "--host", "127.0.0.1"],
            *["--port", str(port), "tests.integration.http.asgi:application"],
        ]
    return [
        *[sys.executable, "-m", "gunicorn", "--bind", f"127.0.0.1:{port}"],
        *["--workers", str(workers), "--threads", str(threads)],
        *["--timeout", "120", "--graceful-timeout", "5"],
        *["--preload"] * preload,
        "--no-control-socket",
        "tests.integration.http.wsgi:application",
    ]
