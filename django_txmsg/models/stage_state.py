"""Whether an operator has paused a stage, or changed its rate for a while.

A stage without a row runs as it is declared.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import models
from django.db.models.functions import Now

from .. import conf
from ..runtime import notifications
from ..runtime.notifications import notify


class StageStateManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The transitions of a stage."""

    def pause(self, stage: str, *, by: str = "", why: str = "") -> bool:
        """Make the stage's consumers take no new messages. False if it was paused."""
        self.get_or_create(stage=stage)
        paused = self.filter(stage=stage, paused_at=None).update(
            paused_at=Now(), paused_by=by[:255], paused_why=why[:255]
        )
        return self._notified(paused)

    def resume(self, stage: str) -> bool:
        """Let the stage's consumers go on. False if it was not paused."""
        resumed = self.filter(stage=stage, paused_at__isnull=False).update(
            paused_at=None, paused_by="", paused_why=""
        )
        return self._notified(resumed)

    def _notified(self, changed: int) -> bool:
        """Wake the consumers, which read the state."""
        if changed and conf.get().NOTIFY:
            notify(self.db, {notifications.WORK})
        return bool(changed)

    def limit(self, stage: str, rate: str, period: dt.timedelta, *, by: str) -> None:
        """Give a stage another rate for a while."""
        self.get_or_create(stage=stage)
        changed = self.filter(stage=stage).update(
            rate=rate, rate_until=Now() + period, rate_by=by[:255]
        )
        self._notified(changed)

    def unlimit(self, stage: str) -> bool:
        """Give a stage its declared rate back. False if it has it."""
        changed = self.filter(stage=stage, rate_until__gt=Now()).update(
            rate="", rate_until=None, rate_by=""
        )
        return self._notified(changed)

    def rates(self) -> dict[str, tuple[str, float]]:
        """Return the changed rates that hold now, each with the seconds left."""
        rows = self.filter(rate_until__gt=Now()).annotate(now=Now())
        return {
            row.stage: (row.rate, (row.rate_until - row.now).total_seconds())
            for row in rows
        }

    def ordered(self, stage: str) -> None:
        """Record when the stage first ran in order in this database."""
        if not self.filter(stage=stage, ordered_since__isnull=False).exists():
            self.get_or_create(stage=stage)
            self.filter(stage=stage, ordered_since=None).update(ordered_since=Now())

    def full(self, stage: str, full: bool) -> None:
        """Record since when a stage has no room for more waiting messages, or that it
        has room again."""
        if full:
            self.get_or_create(stage=stage)
        self.filter(stage=stage, full_since__isnull=full).update(
            full_since=Now() if full else None
        )

    def paused(self) -> set[str]:
        """Return the names of all stages that are paused now."""
        rows: Any = self.filter(paused_at__isnull=False).values_list("stage", flat=True)
        return set(rows)


class StageState(models.Model):
    """Whether one stage is paused, since when, by whom and why; and the state of its
    order."""

    id = models.BigAutoField(primary_key=True)
    stage = models.CharField(max_length=255, unique=True)
    paused_at = models.DateTimeField(null=True, blank=True)
    paused_by = models.CharField(max_length=255, default="", blank=True)
    paused_why = models.CharField(max_length=255, default="", blank=True)
    ordered_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When the stage was first ordered in this database.",
    )
    full_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when it receives nothing, because too many messages wait.",
    )

    rate = models.CharField(
        max_length=32,
        default="",
        db_default="",
        blank=True,
        help_text="The rate that an operator has set, while it holds.",
    )
    rate_until = models.DateTimeField(null=True, blank=True)
    rate_by = models.CharField(max_length=255, default="", db_default="", blank=True)

    objects = StageStateManager()

    class Meta:
        verbose_name = "stage"
        permissions = [
            ("pause_stage", "Can pause and resume stages"),
            ("limit_stage", "Can change the rate of a stage for a while"),
        ]

    def __str__(self) -> str:
        return self.stage
