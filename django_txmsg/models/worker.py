"""The table of the processes that relay or consume, with their heartbeats."""

from __future__ import annotations

import datetime as dt

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now


def silent_after(heartbeat: float) -> dt.timedelta:
    """Return how long after its last heartbeat a worker counts as dead.

    `heartbeat` is the worker's interval between heartbeats, in seconds. Two heartbeats
    may be late or lost, and a slow database may need 15 seconds to store a heartbeat.
    """
    return dt.timedelta(seconds=3 * heartbeat + 15)


def living() -> Q:
    """Return a condition that is true for a worker that is alive, according to the
    database's clock."""
    length = F("silent_after")
    return Q(heartbeat_at__range=(Now() - length, Now() + length))


class Worker(models.Model):
    """A running process. A process deletes its row when it stops normally.

    A worker is alive until its last heartbeat is older than `silent_after`. This value
    is stored in the worker's row, so that all processes agree, even if their settings
    differ. A heartbeat that is as far in the future does not count either: the worker
    has written none since the database's clock was set back.
    """

    name = models.CharField(max_length=255, unique=True)
    kind = models.CharField(max_length=16)
    service = models.CharField(max_length=255, default="", db_default="")
    version = models.CharField(max_length=255, default="", db_default="")
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    stages = models.JSONField(default=list)
    outages = models.JSONField(
        default=list,
        db_default=models.Value([], output_field=models.JSONField()),
        help_text="What the process cannot use: brokers, destinations, subscriptions, "
        "databases, each with the error.",
    )
    running = models.JSONField(
        default=list,
        db_default=models.Value([], output_field=models.JSONField()),
        help_text="What handlers of the process were processing at the heartbeat.",
    )
    in_flight = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    silent_after = models.DurationField(
        default=silent_after(5.0),
        db_default=silent_after(5.0),
        help_text="Age of the last heartbeat at which the worker counts as dead.",
    )

    def __str__(self) -> str:
        return self.name

    def lives(self, now: dt.datetime) -> bool:
        """Return whether the worker is alive at `now`, a time of the database's
        clock."""
        return abs(now - self.heartbeat_at) <= self.silent_after
