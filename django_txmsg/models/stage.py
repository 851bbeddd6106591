"""Operators' requests to a stage (pause it, change its rate, stop a message), and the
slots of a stage with a rate."""

from __future__ import annotations

import datetime as dt
import uuid
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections, models
from django.db.models.functions import Now

from .. import conf, rules
from ..rules.inbox import OPEN
from ..runtime import notifications
from ..runtime.notifications import notify
from .fields import SqlManager, no_wait_sql
from .inbox import InboxMessage

# Whether an operator has paused a stage, or changed its rate for a while.
#
# A stage without a row runs as it is declared.


class StageStateManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Changes the states of stages: paused, full, ordered, or with a changed rate."""

    def pause(self, stage: str, *, by: str = "", why: str = "") -> bool:
        """Pause a stage, so that its consumers take no new messages. Returns False if
        the stage was already paused."""
        self.get_or_create(stage=stage)
        paused = self.filter(stage=stage, paused_at=None).update(
            paused_at=Now(), paused_by=by[:255], paused_why=why[:255]
        )
        return self._notified(paused)

    def resume(self, stage: str) -> bool:
        """Resume a paused stage. Returns False if the stage was not paused."""
        resumed = self.filter(stage=stage, paused_at__isnull=False).update(
            paused_at=None, paused_by="", paused_why=""
        )
        return self._notified(resumed)

    def _notified(self, changed: int) -> bool:
        """Return whether `changed`, the number of changed rows, is not 0. If so, also
        wake the consumers, which then read the stage's state."""
        if changed and conf.get().NOTIFY:
            notify(self.db, {notifications.WORK})
        return bool(changed)

    def limit(self, stage: str, rate: str, period: dt.timedelta, *, by: str) -> None:
        """Change the rate of a stage for the time `period`."""
        self.get_or_create(stage=stage)
        changed = self.filter(stage=stage).update(
            rate=rate, rate_until=Now() + period, rate_by=by[:255]
        )
        self._notified(changed)

    def unlimit(self, stage: str) -> bool:
        """Restore a stage's declared rate. Returns False if the rate was not
        changed."""
        changed = self.filter(stage=stage, rate_until__gt=Now()).update(
            rate="", rate_until=None, rate_by=""
        )
        return self._notified(changed)

    def rates(self) -> dict[str, tuple[str, float]]:
        """Return the changed rates that apply now, each with the seconds until it
        ends."""
        rows = self.filter(rate_until__gt=Now()).annotate(now=Now())
        return {
            row.stage: (row.rate, (row.rate_until - row.now).total_seconds())
            for row in rows
        }

    def ordered(self, stage: str) -> bool:
        """Record that a stage is ordered in this database, and since when. Returns
        False, and does nothing, if that is recorded already."""
        if self.filter(stage=stage, ordered_since__isnull=False).exists():
            return False
        self.get_or_create(stage=stage)
        self.filter(stage=stage, ordered_since=None).update(ordered_since=Now())
        return True

    def unordered(self, stage: str) -> None:
        """Record that a stage is not ordered any more."""
        rows = self.filter(stage=stage, ordered_since__isnull=False)
        if rows.exists():  # SQLite locks the database for an UPDATE of nothing, too
            rows.update(ordered_since=None)

    def full(self, stage: str, full: bool) -> None:
        """Record whether a stage is full, which means that it receives no messages
        because too many messages wait there."""
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
    """Whether a stage is paused, since when, by whom and why. Also the stage's changed
    rate, and the state of its order."""

    stage = models.CharField(max_length=255, unique=True)
    paused_at = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=255, default="")
    paused_why = models.CharField(max_length=255, default="")
    ordered_since = models.DateTimeField(
        null=True, help_text="Since when the stage is ordered in this database."
    )
    full_since = models.DateTimeField(
        null=True,
        help_text="Since when it receives nothing, because too many messages wait.",
    )

    rate = models.CharField(
        max_length=32,
        default="",
        db_default="",
        help_text="The rate that an operator has set, while it holds.",
    )
    rate_until = models.DateTimeField(null=True)
    rate_by = models.CharField(max_length=255, default="", db_default="")

    objects = StageStateManager()

    class Meta:
        verbose_name = "stage"
        permissions = [
            ("pause_stage", "Can pause and resume stages"),
            ("limit_stage", "Can change the rate of a stage for a while"),
        ]

    def __str__(self) -> str:
        return self.stage


# Hop 6's record of the slots of a stage with a rate: one line for each key.
#
# Slot n of a line is due at `origin + n * period`. Slots are numbers and not
# instants, so a changed rate moves the messages that wait. A line that falls behind
# (it was idle, or its consumers were down) moves its origin, so overdue slots are not
# used all at once.

#: Most waiting messages that one statement moves to the instants of their slots.
MOVED = 1000
#: Seconds by which a waiting message may be due after its slot.
LATE = 1.0
#: In place of the slot of a message that expires before a slot would be due. Such a
#: message waits for its expiry, and a changed rate makes it due.
NO_SLOT = -1
#: The slot that is due now, which stays due now at another period.
_ORIGIN = "{now} - ({now} - l.origin) / l.period * %s"


class RateLineManager(SqlManager):
    """Changes the slots of stages with a rate. Each change is committed separately."""

    def place(
        self,
        stage: str,
        key: str,
        period: float,
        tolerance: float,
        slot: int | None = None,
        count: int = 1,
        until: float | None = None,
    ) -> tuple[int, float] | None:
        """Take the next `count` slots of a line. If `slot` is given, take no new slot:
        `slot` was taken earlier, and only its due time is computed again.

        Returns the first slot, and the seconds until it is due: 0 or less if it is due
        now. If the slot is not due before `until`, in Unix time, or if that time has
        passed, changes nothing and returns None. On PostgreSQL the commit does not wait
        for the disk, so a crash may free the last slots.
        """
        connection = connections[self.db]
        now = self._sql.epoch()
        number, taken = ("l.taken", count) if slot is None else (str(int(slot)), 0)
        no_wait, waits_not = no_wait_sql(connection)
        first = slot or 0
        origin = (
            f"{self._sql.greatest}(CASE WHEN l.period = excluded.period THEN l.origin"
            f" ELSE {_ORIGIN.format(now=now)} END,"
            f" {now} - %s - {number} * excluded.period)"
        )
        new, due, early, in_time = "", "", [], []
        if until is not None:
            new, early = f" AND {now} < %s", [until]
            due = f" WHERE {origin} + {number} * excluded.period < %s"
            in_time = [period, tolerance, until]
        row = self._row(
            f"{no_wait} INSERT INTO {self._table} AS l"
            f" (stage, key, origin, period, taken) SELECT %s, %s, {now} - %s,"
            f" CAST(%s AS float8), CAST(%s AS bigint) WHERE {waits_not}{new}"
            " ON CONFLICT (stage, key) DO UPDATE SET period = excluded.period,"
            f" taken = l.taken + {taken}, origin = {origin}{due}"
            f" RETURNING taken, origin - {now}",
            [
                *(stage, key, tolerance + first * period, period, first + count),
                *(*early, period, tolerance, *in_time),
            ],
        )
        if row is None:
            return None
        after, wait = row
        place = after - count if slot is None else slot
        return place, wait + place * period

    def changed(self, stage: str, period: float, between: Callable[[], object]) -> None:
        """Apply a stage's rate to all its lines. Then reschedule the messages that are
        not due at the time of their slot. The rate may have changed, or a process with
        another rate may have parked them. A message without a slot is made due only if
        the next free slot is due before the message expires: else each start of a
        consumer would try all of them. `between` is called after each MOVED
        messages."""
        now = self._sql.epoch()
        self._changed(
            f"UPDATE {self._table} AS l SET period = %s,"  # noqa: S608 - constants only
            f" origin = {_ORIGIN.format(now=now)}"
            " WHERE stage = %s AND period <> %s",
            [period, period, stage, period],
        )
        early, late = self._due(-LATE), self._due(LATE)
        for part in self._waiting(stage, between):
            self._move(
                f"i.id IN ({', '.join(map(str, part))}) AND i.lease_token IS NULL"
                f" AND NOT i.due_at BETWEEN {early} AND {late}"
                f" AND (i.slot > {NO_SLOT} OR i.due_at > {self._due(slot='l.taken')})",
                [],
            )

    def no_more(self, stage: str, between: Callable[[], object]) -> None:
        """Release all messages that wait for a slot of a stage. Call this if the stage
        no longer has a rate. Skip claimed messages: the row of a message stays locked
        while its handler runs. `between` is called after each MOVED messages."""
        for part in self._waiting(stage, between):
            InboxMessage.objects.using(self.db).filter(
                pk__in=part, slot__isnull=False, due_at__isnull=False, lease_token=None
            ).update(due_at=Now(), slot=None, key="")

    def _waiting(
        self, stage: str, between: Callable[[], object]
    ) -> Iterator[array[int]]:
        """Yield the ids of the messages that wait for a slot of a stage, in parts of at
        most MOVED. All ids are read first, so that no part searches for its rows."""
        waiting = InboxMessage.objects.using(self.db).filter(
            stage=stage, slot__isnull=False, due_at__isnull=False, lease_token=None
        )
        ids = array("q", waiting.values_list("pk", flat=True).iterator())
        for first in range(0, len(ids), MOVED):
            yield ids[first : first + MOVED]
            between()

    def move_overdue(self, stage: str, key: str) -> None:
        """Set the due times of a line's parked messages to the times of their slots
        again. Only messages that are due now are changed, at most MOVED of them. A
        message can be due before its slot if the line's slots moved to later times
        after the message was parked."""
        table, now = InboxMessage._meta.db_table, self._sql.began
        self._move(
            f"i.id IN (SELECT id FROM {table} WHERE stage = %s AND due_at <= {now}"  # noqa: S608 - constants only
            f" AND key = %s AND slot > {NO_SLOT} AND {OPEN.sql()}"
            f" AND {rules.NOT_LEASED.sql(now=now)}"
            f" ORDER BY due_at, id LIMIT {MOVED} {self._sql.skip_locked})",
            [stage, key],
        )

    def _move(self, which: str, parameters: list[Any]) -> None:
        self._changed(
            f"UPDATE {InboxMessage._meta.db_table} AS i SET due_at = {self._due()}"  # noqa: S608 - constants only
            f" FROM {self._table} AS l WHERE l.stage = i.stage AND l.key = i.key"
            f" AND i.slot IS NOT NULL AND i.due_at IS NOT NULL AND {which}",
            parameters,
        )

    def _due(self, late: float = 0.0, slot: str = "i.slot") -> str:
        """Return SQL for the instant `late` seconds after a slot in line `l`, by
        default the slot of row `i`."""
        return self._sql.at(f"l.origin + {slot} * l.period + {late}")


class RateLine(models.Model):
    """The slots of a stage with a rate, for one key."""

    stage = models.CharField(max_length=255)
    #: A digest of the header's value.
    key = models.CharField(max_length=32)
    #: When slot 0 is due, in seconds since 1970.
    origin = models.FloatField()
    #: Seconds from one slot to the next.
    period = models.FloatField()
    taken = models.BigIntegerField()

    objects = RateLineManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["stage", "key"], name="txmsg_rate_line")
        ]

    def __str__(self) -> str:
        return f"{self.stage}: {self.key}"


# An operator's request to stop a message while its handler runs.
#
# In a table of its own: a running stage holds the lock on its inbox row. The consumer
# that runs the message deletes the request when it obeys.

#: How long a request holds: the message may be between two attempts.
HOLDS = dt.timedelta(minutes=1)


class StopRequestManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Creates and reads requests to stop messages."""

    def ask(self, stage: str, message_id: uuid.UUID, why: str) -> None:
        """Request that consumers stop a message that they are processing at a stage. A
        second request takes the place of the first."""
        given, rows = {"at": Now(), "why": why[:255]}, self.using(self.db)
        same = {"stage": stage, "message_id": message_id}
        if not rows.filter(**same).update(**given):
            rows.create(**same, **given)
        if conf.get().NOTIFY:
            notify(self.db, {notifications.WORK})

    def open(self) -> list[StopRequest]:
        """Return the requests that still apply: those that are younger than HOLDS."""
        return list(self.filter(at__gt=Now() - HOLDS))


class StopRequest(models.Model):
    """A request to stop one message at one stage."""

    at = models.DateTimeField(db_default=Now())
    stage = models.CharField(max_length=255)
    message_id = models.UUIDField()
    why = models.CharField(max_length=255)

    objects = StopRequestManager()

    def __str__(self) -> str:
        return f"{self.message_id} at {self.stage}"
