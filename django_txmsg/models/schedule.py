"""The last tick of a recurring message, and whether the message is paused.

The row ensures that each tick has one message: only one process can advance the row
from the previous tick, and this process stores the message in the same transaction.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import F
from django.db.models.functions import Now


class ScheduleManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Changes the states of recurring messages."""

    def begin(self, rows: Iterable[Schedule]) -> None:
        """Add a row for each recurring message that has none yet."""
        # `ignore_conflicts` would also ignore that a new primary key exists already.
        place = ["service", "name"]
        self.bulk_create(
            rows, update_conflicts=True, update_fields=["name"], unique_fields=place
        )

    def advance(self, row: Schedule, tick: dt.datetime, timing: str) -> bool:
        """Advance a row to a tick. Returns False if the row was advanced or paused
        after the caller read it."""
        return bool(
            self.filter(pk=row.pk, moves=row.moves, paused_at=None).update(
                last_tick=tick, timing=timing, moves=row.moves + 1
            )
        )

    def go_on(self, row: Schedule, instant: dt.datetime, timing: str) -> None:
        """Set the last tick of a recurring message to `instant`, so that only later
        ticks have messages. Does nothing if the row was changed after the caller read
        it."""
        self.filter(pk=row.pk, moves=row.moves).update(
            last_tick=instant, timing=timing, moves=row.moves + 1
        )

    def adopt(self, service: str, former: Iterable[str]) -> None:
        """Move the recurring messages of former names of a service to this service,
        with their last ticks and pauses. Leave a message whose name the service uses
        itself."""
        own = self.filter(service=service).values("name")
        for one in former:
            rows: Any = self.filter(service=one)
            rows.exclude(name__in=own).update(service=service)

    def pause(self, service: str, name: str, *, by: str = "", why: str = "") -> bool:
        """Pause a recurring message: its ticks are skipped. Returns False if the
        message was already paused."""
        self.begin([self.model(service=service, name=name)])
        return bool(
            self.filter(service=service, name=name, paused_at=None).update(
                paused_at=Now(), paused_by=by[:255], paused_why=why[:255]
            )
        )

    def make(self, service: str, name: str, given: dict[str, Any], timing: str) -> None:
        """Store the arguments and the timing of a recurring message that is made at run
        time."""
        self.begin([self.model(service=service, name=name)])
        self.filter(service=service, name=name).update(
            made=given, timing=timing, last_tick=Now(), moves=F("moves") + 1
        )

    def unmake(self, service: str, name: str) -> bool:
        """Remove a recurring message that was made at run time. Returns False if there
        is no such message."""
        rows: Any = self.filter(service=service, name=name, made__isnull=False)
        return bool(rows.delete()[0])

    def resume(self, service: str, name: str) -> bool:
        """Resume a recurring message at its next tick. Ticks of the pause are not
        caught up. Returns False if the message was not paused."""
        paused: Any = self.filter(service=service, name=name, paused_at__isnull=False)
        return bool(
            paused.update(
                paused_at=None,
                paused_by="",
                paused_why="",
                last_tick=Now(),
                moves=F("moves") + 1,
            )
        )


class Schedule(models.Model):
    """The last tick of one recurring message of one service."""

    service = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    timing = models.CharField(
        max_length=255,
        default="",
        help_text="The expression and time zone of the last tick.",
    )
    last_tick = models.DateTimeField(db_default=Now())
    moves = models.PositiveBigIntegerField(
        default=0, help_text="How often the last tick was advanced."
    )
    made = models.JSONField(
        null=True, help_text="The arguments of a message that was made at run time."
    )
    paused_at = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=255, default="")
    paused_why = models.CharField(max_length=255, default="")

    objects = ScheduleManager()

    class Meta:
        verbose_name = "recurring message"
        constraints = [
            models.UniqueConstraint(
                fields=["service", "name"], name="txmsg_schedule_name"
            )
        ]
        permissions = [
            ("pause_schedule", "Can pause and resume recurring messages"),
            ("make_schedule", "Can make and remove recurring messages"),
        ]

    def __str__(self) -> str:
        return self.name
