"""Stores recurring messages when they are due, in a thread of each `relay` process.

Any number of processes may do this. For each tick, only one process can advance the
message's row. This process stores the tick's message in the same transaction, so each
tick has one message.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from django.db import OperationalError, connections, router, transaction
from django.db.models import Q

from .. import conf
from ..errors import DuplicateMessage
from ..models import Schedule
from ..models.fields import clock, limit_waits
from ..runtime import database_health, liveness
from ..sending.outbox import send_message
from . import timetable
from .time_loop import AFTER_REFUSAL, TimeLoop
from .timetable import Recurring, recurring

log = logging.getLogger("django_txmsg.timekeeper")

#: Longest time, in seconds, between two checks, in case a process was stopped or a
#: clock was set.
LONGEST_WAIT = 60.0
#: Seconds until the next check after a message could not be stored.
AFTER_FAILURE = 10.0
#: Seconds that a recurring message waits for its row, which a transaction has locked.
LOCK_WAIT = 1.0
#: Ticks that are caught up before other messages have their turn.
AT_ONCE = 100
#: If the last tick is further ahead, a clock was wrong when it was stored. A repeated
#: tick has the same id, and is dropped.
AHEAD = dt.timedelta(minutes=1)


class Timekeeper(TimeLoop):
    """Stores the messages of due ticks in the databases `using`, until stopped.

    `now` takes the alias of a database, and returns the current time of this database.
    """

    refused = "recurring messages cannot be stored"

    def __init__(
        self, using: Sequence[str], *, now: Callable[[str], dt.datetime] = clock
    ) -> None:
        super().__init__(using)
        self._now = now
        #: Since when this process has known the recurring messages, by database.
        self._began: dict[str, dt.datetime] = {}
        #: Expressions that this process found to be new, with alias and name.
        self._known: set[tuple[str, str, str]] = set()
        #: Messages stored so far.
        self.stored = 0

    def is_idle(self, using: str) -> bool:
        """Return True if the database cannot contain a recurring message. Then the code
        declares no recurring message for this database, and the database is not the
        outbox's database. (A recurring message that is created at run time is always
        stored in the outbox's database.)"""
        aliases = {one.alias for one in recurring()} | {router.db_for_write(Schedule)}
        return using not in aliases

    def _keep(self, using: str) -> float:
        """Store the messages of due ticks. Return the seconds until the next tick."""
        own = {one.name: one for one in recurring() if one.alias == using}
        service = conf.get().SERVICE
        if conf.get().FORMER_SERVICES:
            with _changing(using):
                timetable.adopt(using)
        rows = Schedule.objects.using(using).filter(
            Q(name__in=own) | Q(made__isnull=False), service=service
        )
        found = {row.name: row for row in rows}
        own |= timetable.read_made(found.values())
        if not own:
            return LONGEST_WAIT
        now = self._now(using)  # read after the rows: not before their ticks
        began = self._began.setdefault(using, now)
        waits = [self._keep_one(own[name], found.get(name), began, now) for name in own]
        return max(0.0, min(LONGEST_WAIT, *waits))

    def _keep_one(
        self, one: Recurring, row: Schedule | None, began: dt.datetime, now: dt.datetime
    ) -> float:
        """Do what is due for one recurring message. Returns the seconds until the next
        check. An error that concerns only this message does not delay the others."""
        liveness.turned()  # it may wait for a lock
        try:
            if row is not None:
                return self._store_due(one, row, began, now)
            new = Schedule(
                service=conf.get().SERVICE,
                name=one.name,
                timing=str(one.cron),
                last_tick=now,
            )
            with _changing(one.alias):
                Schedule.objects.db_manager(one.alias).begin([new])
        except Exception as error:
            if database_health.is_away(error):
                raise
            what = f"recurring message {one.name!r} could not be stored"
            if isinstance(error, OperationalError):  # a locked row, say: it passes
                database_health.report(f"{what}; it is tried again", error)
                return AFTER_REFUSAL
            log.exception("%s after %s; it is tried again", what, row and row.last_tick)
            return AFTER_FAILURE
        return 0.0

    def _store_due(
        self, one: Recurring, row: Schedule, began: dt.datetime, now: dt.datetime
    ) -> float:
        """Store the messages for all ticks of one recurring message up to now. Returns
        the seconds until the next tick."""
        cron, after = one.cron, row.last_tick
        rows = Schedule.objects.db_manager(one.alias)
        if row.paused_at is None:
            if after > now + AHEAD:
                log.warning(
                    "recurring message %r: its last tick, %s, is in the future, so "
                    "the clock was set back. It continues from now",
                    one.name,
                    after.isoformat(),
                )
                with _changing(one.alias):
                    rows.go_on(row, now, row.timing)
                return 0.0
            if row.timing != str(cron):
                # The ticks of another expression are not missed. While old and new code
                # run side by side, each keeps its own. Noted once in each process:
                # ticks it misses from now on are caught up by the next process.
                after = max(after, began)
                if (one.alias, str(cron), one.name) not in self._known:
                    with _changing(one.alias):
                        rows.go_on(row, after, str(cron))
                    self._known.add((one.alias, str(cron), one.name))
                    return 0.0
            due = self._due(one, after, now)
            for number, tick in enumerate(islice(due, AT_ONCE + 1)):
                if self._stop.is_set() or number == AT_ONCE:
                    return 0.0
                if not self._store(one, row, tick):
                    return 0.0  # another process was first: read again
                row.last_tick = after = tick
                row.moves += 1
        coming = cron.after(after)
        if coming is not None and coming <= now:  # paused
            coming = cron.after(now)
        return LONGEST_WAIT if coming is None else (coming - now).total_seconds()

    def _due(
        self, one: Recurring, after: dt.datetime, now: dt.datetime
    ) -> Iterator[dt.datetime]:
        first = one.cron.after(after)
        if first is None or first > now:
            return
        if one.makes_up_all:
            yield from one.cron.between(after, now)
            return
        latest = one.cron.last(after, now)
        if latest is None:
            return
        if first < latest:
            log.warning(
                "recurring message %r: ticks were missed from %s on, and only the "
                "latest is caught up, that of %s",
                one.name,
                first.isoformat(),
                latest.isoformat(),
            )
        yield latest

    def _store(self, one: Recurring, row: Schedule, tick: dt.datetime) -> bool:
        rows = Schedule.objects.db_manager(one.alias)
        with _changing(one.alias):
            if not rows.advance(row, tick, str(one.cron)):
                return False
            # Stored already only if the row was lost or set back.
            with suppress(DuplicateMessage):
                sent = send_message(**one.arguments(tick))
                if sent.id == one.message_id(tick):
                    self.stored += 1
                else:
                    log.info(
                        "recurring message %r: the tick of %s is skipped, because "
                        "message %s has the unique key %r",
                        *(one.name, tick.isoformat(), sent.id, one.unique),
                    )
        return True


@contextmanager
def _changing(using: str) -> Iterator[None]:
    """Run the block in a transaction whose statements do not wait long for a lock."""
    with transaction.atomic(using=using):
        limit_waits(connections[using], LOCK_WAIT)
        yield
