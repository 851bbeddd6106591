"""Whether an operator has paused a stage.

A stage without a row runs.
"""

from __future__ import annotations

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
        return self._told(paused)

    def resume(self, stage: str) -> bool:
        """Let the stage's consumers go on. False if it was not paused."""
        resumed = self.filter(stage=stage, paused_at__isnull=False).update(
            paused_at=None, paused_by="", paused_why=""
        )
        return self._told(resumed)

    def _told(self, changed: int) -> bool:
        """Wake the consumers, which read the state."""
        if changed and conf.get().NOTIFY:
            notify(self.db, {notifications.WORK})
        return bool(changed)

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

    objects = StageStateManager()

    class Meta:
        verbose_name = "stage"
        permissions = [("pause_stage", "Can pause and resume stages")]

    def __str__(self) -> str:
        return self.stage
