"""An operator's request to stop a message while its handler runs.

In a table of its own: a running stage holds the lock on its inbox row. The consumer
that runs the message deletes the request when it obeys.
"""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import models
from django.db.models.functions import Now

from .. import conf
from ..runtime import notifications
from ..runtime.notifications import notify

#: How long a request holds: the message may be between two attempts.
HOLDS = dt.timedelta(minutes=1)


class StopRequestManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The one transition of a request."""

    def ask(self, stage: str, message_id: uuid.UUID, why: str) -> None:
        """Ask the consumer that runs a message at a stage to stop it."""
        self.create(stage=stage, message_id=message_id, why=why[:255])
        if conf.get().NOTIFY:
            notify(self.db, {notifications.WORK})

    def open(self) -> list[StopRequest]:
        """Return the requests that hold."""
        return list(self.filter(at__gt=Now() - HOLDS))


class StopRequest(models.Model):
    """One message that a stage should stop."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_default=Now())
    stage = models.CharField(max_length=255)
    message_id = models.UUIDField()
    why = models.CharField(max_length=255)

    objects = StopRequestManager()

    def __str__(self) -> str:
        return f"{self.message_id} at {self.stage}"
