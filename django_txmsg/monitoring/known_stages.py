"""Whether a name is that of a stage: a misspelt one must not be paused in silence."""

from __future__ import annotations

from ..models import DeadLetter, InboxMessage, Worker
from ..models.dead_letter import Resolution
from ..stages import all_stages


def is_known(name: str, using: str) -> bool:
    """Return whether a stage is declared here, is consumed by another process, or has
    rows."""
    consumed = Worker.objects.using(using).values_list("stages", flat=True)
    return bool(name) and (
        any(one.name == name for one in all_stages())
        or any(name in stages for stages in consumed)
        or InboxMessage.objects.using(using).filter(stage=name).exists()
        or DeadLetter.objects.using(using)
        .filter(stage=name, resolution=Resolution.OPEN)
        .exists()
    )
