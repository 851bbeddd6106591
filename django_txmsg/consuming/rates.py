"""Limits the rate of a stage: `@stage(..., rate="900/m", per="header-name")`.

Before the stage runs, each message takes a slot in the line of its key. A message whose
slot is not due is parked until then, without counting an attempt. The slot is taken in
a separate transaction. In the stage's transaction, the line would stay locked while the
handler runs.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.db import router

from .. import wire
from ..envelope.stage_options import Rate
from ..errors import ConfigurationError, DecodeError
from ..models import RateLine, StageState
from ..models.fields import clock
from ..models.monitoring import Deed, Done
from ..models.stage import NO_SLOT
from ..monitoring.lengths import duration
from ..stages import all_stages
from . import batch, decoding
from .arrival import Arrival, Outcome
from .failure import postpone
from .protocol import despite_conflicts

#: Most slots that a thread takes with one statement, and the seconds in which it may
#: use them.
AHEAD, KEPT = 8, 0.1


def process(arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Process arrivals with `batch.process()`, and park the arrivals that exceed the
    stage's rate."""
    if arrivals[0].stage.rate is None:
        return batch.process(arrivals)
    (arrival,) = arrivals  # no batches
    waiting = _waiting(arrival) if _takes_slot(arrival) else None
    return batch.process(arrivals) if waiting is None else [waiting]


def limit(stage: str, text: str, period: dt.timedelta, *, by: str) -> Done:
    """Change the rate of a stage for the time `period`. The stage's consumers apply the
    rate, and reschedule the messages that wait for a slot.

    Raises ConfigurationError in three cases: the text is not a rate; this service
    declares no stage with this name; the stage is declared without a rate.
    """
    if not any(one.name == stage and one.rate for one in all_stages()):
        raise ConfigurationError(f"No stage {stage!r} here has a rate= to change.")
    states().limit(stage, str(Rate.parse(text)), period, by=by)
    said = f"Stage {stage} has a rate of {text} for {duration(period)}."
    return states().get(stage=stage), Deed.LIMIT, said


def reset(stage: str) -> Done | None:
    """Restore the declared rate of a stage. Returns None if its rate is not changed."""
    if not states().unlimit(stage):
        return None
    said = f"Stage {stage} has its own rate again."
    return states().get(stage=stage), Deed.LIMIT, said


def states() -> Any:
    """Return the manager of the states that operators have set for stages."""
    return StageState.objects.db_manager(router.db_for_write(StageState))


def _takes_slot(arrival: Arrival) -> bool:
    """Return whether an arrival must take a slot. A recorded arrival has taken its slot
    at an earlier try. An arrival without a stable id, or whose id or headers cannot be
    stored, needs no slot, because the stage does not process it. An arrival that the
    stage cannot read for another reason takes a slot, for example one of a wrong
    content type."""
    if arrival.record is not None or not arrival.has_identity:
        return False
    try:
        decoding.checked(arrival.delivery, arrival.stage)
    except DecodeError:
        return False
    return True


def _waiting(arrival: Arrival) -> Outcome | None:
    """Take a slot. If the slot is not due, park the message and return the outcome.
    Returns None if the slot is due.

    A message that has expired takes no slot, and None is returned. A message that
    expires before its slot takes no slot either, and is parked until it expires.
    Otherwise a long queue would use up the slots with messages that never run. An
    expired message may use a slot that this thread has reserved: a thread reserves
    slots only if far more of them are due.
    """
    stage, key, parked = arrival.stage, _key(arrival), arrival.parked
    assert stage.rate is not None
    lines = RateLine.objects.db_manager(arrival.using)
    # After a change of `per` a message has another line, which knows no such slot.
    before = parked.slot if parked is not None and parked.key == key else None
    before = None if before == NO_SLOT else before
    until = wire.expires(arrival.delivery.headers)
    place = partial(_held().place, lines, stage.name, key, stage.rate, before, until)
    placed = despite_conflicts(place, arrival.stop)
    why = f"over the rate of {stage.rate}"
    if placed is None:
        assert until is not None
        # The instant by which a claimed message is later judged to be expired.
        now = clock(arrival.using) if parked is None else parked.record.now
        left = (until - now).total_seconds()
        if left <= 0:
            return None
        why = f"{why}: it expires before its slot"
        return postpone(arrival, why, delay=left, slot=NO_SLOT, key=key)
    slot, delay = placed
    if delay > 0:
        if before is not None:
            # The line has moved since; do not claim its messages one by one.
            lines.move_overdue(stage.name, key)
        return postpone(arrival, why, delay=delay, slot=slot, key=key)
    if parked is not None and parked.slot is not None:
        # Used: if the worker is killed now, the message takes another slot.
        # Nor does it stand in a line: a later key would be its place in an order.
        arrival.inbox.filter(pk=parked.record.id).update(slot=None, key="")
    return None


class Held:
    """The slots of one line that a thread has taken and not used yet.

    A busy thread takes several slots with one statement, but at most a quarter of the
    slots that are already due. If many slots are due, the stage is far below its rate.
    So it does not matter if the thread leaves some of its slots unused.
    """

    def __init__(self) -> None:
        self._line: tuple[str, str, str, float] | None = None
        self._slot, self._left, self._spare = 0, 0, 1
        self._due = self._until = 0.0  # of the slot, and of all; by time.monotonic()

    def place(
        self,
        lines: Any,
        stage: str,
        key: str,
        rate: Rate,
        before: int | None,
        until: dt.datetime | None,
    ) -> tuple[int, float] | None:
        """Return a slot, and the seconds until the slot is due: 0 or less if it is due
        now. Returns None if the slot is not due before `until`."""
        place: Callable[..., tuple[int, float] | None] = partial(
            lines.place,
            *(stage, key, rate.period, rate.tolerance),
            until=None if until is None else until.timestamp(),
        )
        if before is not None:
            return place(slot=before)
        line, now = (lines.db, stage, key, rate.period), time.monotonic()
        busy = line == self._line and now < self._until
        if not busy or not self._left:
            count = self._spare if busy else 1
            if (placed := place(count=count)) is None:
                return None
            slot, delay = placed
            now = time.monotonic()
            self._line, self._slot, self._left = line, slot, count
            self._due, self._until = now + delay, now + KEPT
            self._spare = max(1, min(AHEAD, int(-delay / rate.period / 4)))
        found = self._slot, self._due - now
        self._slot, self._left = self._slot + 1, self._left - 1
        self._due += rate.period
        return found


_of_thread = threading.local()


def _held() -> Held:
    """Return the slots that this thread has taken."""
    if not hasattr(_of_thread, "held"):
        _of_thread.held = Held()
    held: Held = _of_thread.held
    return held


def _key(arrival: Arrival) -> str:
    """Return the name of a message's line: a digest, which has a fixed length and does
    not reveal the header's value."""
    per = arrival.stage.per
    value = "" if per is None else arrival.delivery.headers.get(per, "")
    given = value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(given, digest_size=16).hexdigest()
