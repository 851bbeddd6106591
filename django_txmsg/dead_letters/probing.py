"""Redelivers one message first: is the cause mended?

A batch of a redelivery waits until the messages of the batch before were processed, or
have died again. Batches have 1, 10, 100 messages; then the rest follows, unwatched, but
still counted.
"""

from __future__ import annotations

from typing import Any

from ..models import BulkOperation, DeadLetter, InboxMessage, OutboxMessage
from ..models.dead_letter import Resolution
from . import selection
from .resolution import Tally

#: The sizes of the batches whose outcome is waited for.
STEPS = (1, 10, 100)
#: The filters that a message still matches when it dies of something else.
_KEPT = frozenset({"ids", "stage", "destination", "older", "search"})
#: Seconds between two looks at their outcome.
PAUSE = 0.5


def died_again(operation: BulkOperation, using: str) -> int:
    """Return how many messages have died again since the operation began, of those that
    it has redelivered. Another error of the same message counts too."""
    filters = {name: operation.filter[name] for name in operation.filter.keys() & _KEPT}
    letters = selection.filtered(filters, using=using).filter(
        pk__lte=operation.cursor,
        resolution=Resolution.OPEN,
        deaths__gt=1,
        created_at__gt=operation.created_at,
    )
    return letters.count()


def unsettled(operation: BulkOperation, using: str) -> bool:
    """Return whether a watched message is neither processed nor dead again."""
    letters = DeadLetter.objects.using(using).filter(
        pk__in=operation.watched, resolution=Resolution.REDELIVERED
    )
    for pk, message_id, stage in letters.values_list("pk", "message_id", "stage"):
        again: Any = OutboxMessage.objects.using(using).filter(
            message_id=message_id, replay_id__startswith=f"dead-letter-{pk}-"
        )
        if again.filter(dispatched_at=None, dead_at=None).exists():
            return True
        rows: Any = InboxMessage.objects.using(using).filter(
            message_id=message_id, stage=stage, processed_at=None, dead_at=None
        )
        if stage and rows.exists():
            return True
    return False


def most(operation: BulkOperation, back: int) -> int:
    """Return how many messages the next batch may have: before one has succeeded, no
    more than may die before the operation stops."""
    assert operation.tolerates is not None
    if operation.done > back:
        return STEPS[-1] * 10
    return operation.tolerates - back + 1


def next_step(step: int, batch: list[DeadLetter], tally: Tally) -> dict[str, Any]:
    """Return what an operation records after a batch: whose outcome it waits for, and
    the size of the next batch."""
    watched = [one.pk for one in batch if one.pk not in tally.skipped]
    if step > STEPS[-1]:
        return {"watched": []}
    return {"watched": watched, "batch_size": step * 10 if watched else step}
