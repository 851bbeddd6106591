"""Pauses and resumes stages and recurring messages, for the admin and the commands."""

from __future__ import annotations

from django.db import router
from django.db.models import Model

from .. import conf
from ..envelope.serializers import is_storable
from ..errors import ConfigurationError
from ..models import DeadLetter, InboxMessage, Schedule, StageState, Worker
from ..models.dead_letter import Resolution
from ..models.monitoring import Deed, Done
from ..scheduling.timetable import recurring
from ..stages import all_stages
from . import schedule


def set_stage(name: str, *, paused: bool, by: str, why: str) -> Done | None:
    """Pause or resume a stage. The consumers of a paused stage finish the messages in
    progress and take no new ones. Returns None if nothing changed.

    Raises ConfigurationError for an unknown stage, because its name may be misspelt.
    """
    using = router.db_for_write(StageState)
    states = StageState.objects.db_manager(using)
    if not is_known(name, using):
        raise ConfigurationError(f"There is no stage {name!r} here.")
    changed = states.pause(name, by=by, why=why) if paused else states.resume(name)
    if not changed:
        return None
    return _done(states.get(stage=name), f"stage {name}", paused, why)


def set_recurring(name: str, *, paused: bool, by: str, why: str) -> Done | None:
    """Pause a recurring message, or resume it. After it is resumed, its first message
    is stored at its next tick. Returns None if nothing changed. Raises
    ConfigurationError for an unknown name."""
    service = conf.get().SERVICE
    rows = Schedule.objects.db_manager(schedule.database_of(name))
    own = rows.filter(service=service, name=name)
    declared = any(one.name == name for one in recurring())
    if not (declared or (is_storable(name) and own.exists())):
        raise ConfigurationError(f"There is no recurring message {name!r} here.")
    changed = (
        rows.pause(service, name, by=by, why=why)
        if paused
        else rows.resume(service, name)
    )
    if not changed:
        return None
    return _done(own.get(), f"recurring message {name}", paused, why)


def _done(row: Model, what: str, paused: bool, why: str) -> Done:
    because = f": {why}" if why and paused else "."
    if paused:
        return row, Deed.PAUSE, f"Paused {what}{because}"
    return row, Deed.RESUME, f"Resumed {what}{because}"


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
