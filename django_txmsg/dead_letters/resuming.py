"""Dead letters of `resume()`. While a run waits for the message of a `resume()`, no
other `resume()` may continue the run: the run would drop the second value."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from contextlib import suppress

from .. import wire
from ..models import DeadLetter, InboxMessage, Run
from ..models.dead_letter import Resolution
from ..models.run import WaitsFor

#: The runs that wait for dead letters, by the ids of the dead letters.
Waiting = Mapping[int, Run | None]


def waiting_runs(batch: Iterable[DeadLetter], using: str) -> Waiting:
    """Lock the runs that still wait for the `resume()` of a dead letter, and return
    them. The value is None if another transaction has locked the run. Do not wait for
    it: a run that continues may close this dead letter, which the caller has locked."""
    tickets = {}
    for one in batch:
        # A time-out and an operator's answer have types of this package.
        ours = one.headers.get(wire.TYPE, "").startswith("txmsg.")
        if wire.continues_run(one.headers) and not ours:
            with suppress(ValueError):
                tickets[one.pk] = wire.read_ticket(one.headers.get(wire.TICKET, ""))
    runs = Run.objects.using(using).filter(
        waits_for=WaitsFor.RESUME, run_id__in={run_id for run_id, _ in tickets.values()}
    )
    free = {
        (one.run_id, one.turn): one for one in runs.select_for_update(skip_locked=True)
    }
    known = set(runs.values_list("run_id", "turn"))
    return {pk: free.get(one) for pk, one in tickets.items() if one in known}


def let_resume_again(
    discarded: Iterable[DeadLetter], waiting: Waiting, using: str
) -> None:
    """Let runs be resumed again whose `resume()` is discarded. Leave a run as it is if
    a copy of the message may still continue it: a stage has received the copy, or the
    copy is another dead letter, which is open."""
    resumed = {one.message_id: waiting.get(one.pk) for one in discarded}
    ids = [message_id for message_id, run in resumed.items() if run is not None]
    letters = DeadLetter.objects.using(using).filter(resolution=Resolution.OPEN)
    rows = InboxMessage.objects.using(using).filter(processed_at=None, dead_at=None)
    for copies in (letters, rows):
        found = copies.filter(message_id__in=ids).values_list("message_id", flat=True)
        for message_id in found:
            resumed[message_id] = None
    runs = [run.pk for run in resumed.values() if run is not None]
    Run.objects.using(using).filter(pk__in=runs).update(resumed_at=None)


def resumes(letter: DeadLetter, waiting: Waiting, now: dt.datetime, using: str) -> bool:
    """Let no further `resume()` continue the run for which a discarded message waits.
    Return False if a `resume()` has done so since the message was discarded, or if the
    run is locked."""
    if letter.pk not in waiting:
        return True
    run = waiting[letter.pk]
    if run is None:
        return False
    discarded, resumed = letter.resolved_at, run.resumed_at
    if discarded and resumed and resumed >= discarded:
        return False
    run.resumed_at = now
    run.save(using=using, update_fields=["resumed_at"])
    return True
