"""A process's row in the table of workers, with its heartbeat."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence

from django.db import transaction
from django.db.models.functions import Now

from .. import conf
from ..errors import ConfigurationError
from ..models import AuditEntry, Worker
from ..models.fields import clock
from ..models.monitoring import Deed
from ..models.worker import silent_after
from ..runtime import breaker, database_health
from . import attendance, outages, running


class Presence:
    """Writes the worker row of this process. A failed write is logged and not raised,
    because the worker must continue."""

    def __init__(
        self, kind: str, using: str, stages: Sequence[str] = (), *, name: str = ""
    ) -> None:
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.name = name or f"{self.host}:{self.pid}:{uuid.uuid4().hex[:6]}"
        self._kind, self._using, self._stages = kind, using, list(stages)
        self._service = conf.get().SERVICE

    def beat(self, in_flight: int) -> None:
        """Write a heartbeat, with the number of messages in progress, the running
        handlers and the outages."""
        workers = Worker.objects.using(self._using)

        def beat() -> None:
            own = workers.filter(name=self.name)
            columns = {
                "host": self.host,
                "pid": self.pid,
                "in_flight": in_flight,
                "silent_after": silent_after(conf.get().CONSUME.HEARTBEAT),
                "outages": outages.as_json(breaker.outages()),
                "running": running.as_json(),
            }
            if not own.update(heartbeat_at=Now(), **columns):
                version = conf.get().VERSION[:255]
                with transaction.atomic(using=self._using):
                    workers.create(
                        name=self.name,
                        kind=self._kind,
                        service=self._service,
                        version=version,
                        stages=self._stages,
                        **columns,
                    )
                    if version:
                        self._announce(version)

        self._quietly(beat)

    def _announce(self, version: str) -> None:
        """Record in the audit that this version of the code has begun. Do nothing if
        the service's latest such entry names the same version."""
        entries = AuditEntry.objects.db_manager(self._using)
        by, began = f"service: {self._service}"[:255], f"Version {version} began on "
        known = entries.filter(deed=Deed.DEPLOY, by=by).order_by("-pk").first()
        if known is None or not known.text.startswith(began):
            entries.record(by, f"{began}{self.host}.", deed=Deed.DEPLOY, count=None)

    def refuse_rivals(self) -> None:
        """Raise ConfigurationError if another service runs a stage of the same name in
        this database. The inbox distinguishes stages only by name. So one stage would
        drop the messages that the other stage has processed. Only the process that
        started later raises the error."""
        workers = Worker.objects.using(self._using)
        found: list[tuple[Worker, set[str]]] = []

        def look() -> None:
            living = attendance.read_living(self._using, clock(self._using))
            own = workers.filter(name=self.name).first()
            for one in living.workers:
                shared = set(one.stages) & set(self._stages)
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

    def leave(self) -> None:
        """Delete the row. A process calls this when it stops normally."""
        workers = Worker.objects.using(self._using)
        self._quietly(lambda: workers.filter(name=self.name).delete())

    def _quietly(self, action: Callable[[], object]) -> None:
        what = f"worker {self.name} cannot write its heartbeat"
        database_health.retry(self._using, what).run(action)
