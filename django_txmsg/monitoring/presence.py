"""A process's row in the table of workers, with its heartbeat, its outages and the
messages that its handlers were processing at the heartbeat."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from .. import conf
from ..errors import ConfigurationError
from ..models import AuditEntry, Worker
from ..models.fields import clock
from ..models.monitoring import Deed
from ..models.worker import silent_after
from ..runtime import breaker, database_health, liveness
from ..runtime.connections import recycle
from ..runtime.thread_group import ThreadGroup
from . import attendance

#: Most messages that a process writes into its row: those that have run longest; and
#: most outages.
MOST_RUNNING, MOST_OUTAGES = 100, 50


class Presence:
    """Writes the worker row of this process. If a write fails, the error is only
    logged, because the worker must continue."""

    def __init__(
        self, kind: str, using: str, stages: Sequence[str] = (), *, name: str = ""
    ) -> None:
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.name = name or f"{self.host}:{self.pid}:{uuid.uuid4().hex[:6]}"
        self._kind, self._using, self._stages = kind, using, list(stages)
        self._service = conf.get().SERVICE
        self._version = conf.get().VERSION[:255]
        #: Whether the audit has the version that began with this process.
        self._announced = not self._version
        #: The other processes that ran stages of this process at the last look, with
        #: these stages.
        self._peers: dict[str, set[str]] = {}

    def beat(self, in_flight: int) -> None:
        """Write a heartbeat, with the number of messages in progress, the running
        handlers and the outages."""
        workers = Worker.objects.using(self._using)

        def beat() -> None:
            columns = {
                "host": self.host,
                "pid": self.pid,
                "version": self._version,
                "in_flight": in_flight,
                "silent_after": silent_after(conf.get().CONSUME.HEARTBEAT),
                "outages": _outages_as_json(),
                # A relay may share its process with a consumer, whose row has them.
                "running": _running_as_json() if self._kind == "consumer" else [],
            }
            own = workers.filter(name=self.name)
            if not own.update(heartbeat_at=Now(), **columns):
                workers.create(
                    name=self.name,
                    kind=self._kind,
                    service=self._service,
                    stages=self._stages,
                    **columns,
                )
            if not self._announced:
                self._announce()

        self._quietly(beat)

    @contextmanager
    def beating(
        self,
        in_flight: Callable[[], int],
        stop: Callable[[], None],
        *,
        stays: bool = False,
    ) -> Iterator[None]:
        """Write heartbeats in a thread while the block runs, and then delete the row.
        If the thread fails, `stop` is called, and the error is raised. With `stays`,
        the caller has written the first heartbeat, and the row is not deleted."""
        done = threading.Event()

        def beat() -> None:
            pause = conf.get().CONSUME.HEARTBEAT if stays else 0.0
            liveness.turned(pause)
            while not done.wait(pause):
                self.beat(in_flight())
                recycle()
                pause = conf.get().CONSUME.HEARTBEAT
                liveness.turned(pause)
            if not stays:
                self.leave()

        group = ThreadGroup(stop)
        group.add("txmsg-heartbeat", beat)
        group.start()
        try:
            yield
        finally:
            done.set()
            group.join()

    def _announce(self) -> None:
        """Record in the audit that this version of the code has begun. Do nothing if
        the service's latest entry about a version names the same version."""
        entries = AuditEntry.objects.db_manager(self._using)
        by, began = f"service: {self._service}"[:255], f"Version {self._version} began "
        with transaction.atomic(using=self._using):
            # A lock: the service's processes may all start at once.
            workers = Worker.objects.using(self._using).filter(service=self._service)
            workers.update(service=self._service)
            known = entries.filter(deed=Deed.DEPLOY, by=by).order_by("-pk").first()
            if known is None or not known.text.startswith(f"{began}on "):
                text = f"{began}on {self.host}."
                entries.record(by, text, deed=Deed.DEPLOY, count=None)
        self._announced = True

    def refuse_rivals(self) -> set[str]:
        """Return the stages of this process that another process ran at the last call,
        if that process has ended since then. Raise ConfigurationError if another
        service runs a stage of the same name in this database. Only the process that
        started later raises the error.

        The inbox distinguishes stages only by name. So each of the two stages would
        drop the messages that the other has processed.
        """
        workers = Worker.objects.using(self._using)
        found: list[tuple[Worker, set[str]]] = []
        before = self._peers

        def look() -> None:
            living = attendance.read_living(self._using, clock(self._using))
            own = workers.filter(name=self.name).first()
            self._peers = {}
            for one in living.workers:
                shared = set(one.stages) & set(self._stages)
                if shared:
                    self._peers[one.name] = shared
                other = one.service not in ("", self._service)
                if own and other and shared and one.pk < own.pk:
                    found.append((one, shared))

        if self._stages:
            self._quietly(look)
        for other, shared in found:
            raise ConfigurationError(
                f"Service {other.service!r} (process {other.pid} on {other.host}) "
                f"runs stage {min(shared)!r} in the same database as this service, "
                f"{self._service!r}: a message that one of them has processed, the "
                "other would drop as a copy. Give one of the stages another name=, "
                "or each service a database of its own."
            )
        ended = before.keys() - self._peers.keys()
        return {stage for name in ended for stage in before[name]}

    def leave(self) -> None:
        """Delete the row. A process calls this when it ends normally."""
        workers = Worker.objects.using(self._using)
        self._quietly(lambda: workers.filter(name=self.name).delete())

    def _quietly(self, action: Callable[[], object]) -> None:
        what = f"worker {self.name} cannot write its heartbeat"
        database_health.retry(self._using, what).run(action)


def _running_as_json() -> list[dict[str, Any]]:
    """Return the messages that handlers of this process are processing, as JSON for the
    worker's row. Each has its duration so far, in seconds.

    The time of the heartbeat comes from the database's clock. To get a start time, the
    reader subtracts the duration from the time of the heartbeat.
    """
    now = time.monotonic()
    return [
        {
            "thread": one.thread,
            "stage": one.stage,
            "message": str(one.message_id),
            "attempt": one.attempt,
            "seconds": round(now - one.since, 1),
        }
        for one in liveness.now_running()[:MOST_RUNNING]
    ]


def _outages_as_json() -> list[dict[str, Any]]:
    """Return the outages of this process as JSON for its row, each with its duration so
    far, in seconds."""
    return [
        {
            "kind": one.kind,
            "name": one.name,
            "seconds": round(one.seconds, 1),
            # PostgreSQL cannot store NUL.
            "error": one.error.replace("\0", ""),
        }
        for one in breaker.outages()[:MOST_OUTAGES]
    ]
