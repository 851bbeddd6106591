"""Runs a real Celery worker in its own process, with a real broker and the test's
database."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery.backends.redis import RedisBackend
from kombu import pools

from django_txmsg.celery import following
from tests.celery_shop import app
from tests.faults import ROOT, wait_until
from tests.services.keeper import KEEPER

#: Started without what workers tell each other, which takes a second.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
BROKERS = {
    "default": {"URL": "database://"},
    "celery": {"URL": "celery://tests.celery_shop:app"},
}


def environment(url: str, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses `tests.celery_shop`."""
    txmsg = {"SERVICE": "tests", "BROKERS": BROKERS, "DISPATCH_ON_COMMIT": "off"}
    return {
        **os.environ,
        "C_FORCE_ROOT": "1",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TXMSG_TEST_CELERY_URL": url,
        "TXMSG_TEST_SETTINGS": json.dumps(txmsg),
        **more,
    }


def forget_connections() -> None:
    """Close the open connections of this process's app, so that its settings are read
    again."""
    following.close()
    backend = vars(app._local).pop("backend", None)
    app._backend_cache = None
    if isinstance(backend, RedisBackend):
        # A result that is deleted later would open a connection that nobody closes.
        for results in backend._pending_results:
            results.clear()
        gc.collect()
        backend.result_consumer.stop()
        backend.client.close()
        backend.client.connection_pool.disconnect()
    pools.reset()
    app._after_fork()


class CeleryWorker:
    """A worker process. At the end of the `with` block, its remaining processes are
    killed."""

    def __init__(self, directory: Path, url: str, **more: str) -> None:
        self.log = directory / f"worker-{len(list(directory.iterdir()))}.log"
        command = ["-m", "celery", "-A", "tests.celery_shop", "worker", *QUIET]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--concurrency", "1", "--loglevel", "INFO"],
                cwd=ROOT,
                env=environment(url, **more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        KEEPER.watch(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> CeleryWorker:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        KEEPER.forget(self.process.pid)

    def said(self) -> str:
        """Return the worker's output."""
        return self.log.read_text(errors="replace")

    def wait_for_end(self) -> None:
        """Wait until the worker has ended."""
        wait_until(lambda: self.process.poll() is not None, message=self.said)
