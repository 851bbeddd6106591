"""A process that relays or consumes, and its heartbeat."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Worker(models.Model):
    """A running process. It deletes its row when it stops in good order."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=255, unique=True)
    kind = models.CharField(max_length=16)
    service = models.CharField(max_length=255, default="", db_default="", blank=True)
    host = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    stages = models.JSONField(default=list, blank=True)
    in_flight = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.name
