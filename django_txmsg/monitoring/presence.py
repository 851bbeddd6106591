"""A process's row in the table of workers, and its sign of life."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence

from django.db import Error as AnyDatabaseError
from django.db.models.functions import Now

from ..models import Worker
from ..upkeep import outage

log = logging.getLogger("django_txmsg.worker")


class Presence:
    """Says in the database that this process lives. Never fails: a worker works on
    when nobody can be told."""

    def __init__(
        self, kind: str, using: str, stages: Sequence[str] = (), *, name: str = ""
    ) -> None:
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.name = name or f"{self.host}:{self.pid}:{uuid.uuid4().hex[:6]}"
        self._kind, self._using, self._stages = kind, using, list(stages)

    def beat(self, in_flight: int) -> None:
        """Tell that the process lives and how many messages it has in hand."""
        workers = Worker.objects.using(self._using)
        self._quietly(
            lambda: workers.update_or_create(
                name=self.name,
                defaults={
                    "heartbeat_at": Now(),
                    "in_flight": in_flight,
                    "host": self.host,
                    "pid": self.pid,
                },
                create_defaults={
                    "kind": self._kind,
                    "host": self.host,
                    "pid": self.pid,
                    "stages": self._stages,
                    "in_flight": in_flight,
                },
            )
        )

    def leave(self) -> None:
        """Take the row away: the process stops in good order."""
        workers = Worker.objects.using(self._using)
        self._quietly(lambda: workers.filter(name=self.name).delete())

    def _quietly(self, action: Callable[[], object]) -> None:
        if not outage.usable(self._using):
            return
        try:
            action()
        except AnyDatabaseError as error:
            outage.note(self._using, error)
            log.warning("worker %s cannot tell that it lives: %s", self.name, error)
