"""Pauses and resumes stages and recurring messages, for the admin and the commands."""

from __future__ import annotations

from django.db import router

from .. import conf
from ..errors import ConfigurationError
from ..models import DeadLetter, InboxMessage, Schedule, StageState, Worker
from ..models.dead_letter import Resolution
from ..models.monitoring import Deed
from ..stages import all_stages
from . import schedule


def set_stage(name: str, *, paused: bool, by: str, why: str) -> StageState | None:
    """Pause or resume a stage. The consumers of a paused stage finish the messages in
    progress and take no new ones. Returns the stage's row, or None if nothing changed.

    Raises ConfigurationError for an unknown stage, because its name may be misspelt.
    """
    using = router.db_for_write(StageState)
    states = StageState.objects.db_manager(using)
    if not is_known(name, using):
        raise ConfigurationError(f"There is no stage {name!r} here.")
    changed = states.pause(name, by=by, why=why) if paused else states.resume(name)
    return states.get(stage=name) if changed else None


def set_recurring(name: str, *, paused: bool, by: str, why: str) -> Schedule | None:
    """Pause a recurring message, or resume it. After it is resumed, its first message
    is stored at its next tick. Returns the recurring message's row, or None if nothing
    changed. Raises ConfigurationError for an unknown name."""
    if name not in {one.name for one in schedule.read()}:
        raise ConfigurationError(f"There is no recurring message {name!r} here.")
    service = conf.get().SERVICE
    rows = Schedule.objects.db_manager(schedule.database_of(name))
    changed = (
        rows.pause(service, name, by=by, why=why)
        if paused
        else rows.resume(service, name)
    )
    return rows.get(service=service, name=name) if changed else None


def entry(what: str, *, paused: bool, why: str) -> tuple[Deed, str]:
    """Return the deed and the text of the audit entry for pausing or resuming an
    object."""
    because = f": {why}" if why and paused else "."
    if paused:
        return Deed.PAUSE, f"Paused {what}{because}"
    return Deed.RESUME, f"Resumed {what}{because}"


def is_known(name: str, using: str) -> bool:
    """Return True if a stage with this name is declared here, is consumed by another
    process, or has rows."""
    consumed = Worker.objects.using(using).values_list("stages", flat=True)
    return bool(name) and (
        any(one.name == name for one in all_stages())
        or any(name in stages for stages in consumed)
        or StageState.objects.using(using).filter(stage=name).exists()
        or InboxMessage.objects.using(using).filter(stage=name).exists()
        or DeadLetter.objects.using(using)
        .filter(stage=name, resolution=Resolution.OPEN)
        .exists()
    )
