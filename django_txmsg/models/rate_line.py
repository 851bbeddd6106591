"""Hop 6's record of the slots of a stage with a rate: one line for each key.

Slot n of a line is due at `origin + n * period`. Slots are numbers and not instants, so
a changed rate moves the messages that wait. A line that falls behind (it was idle, or
its consumers were down) moves its origin, so overdue slots are not used all at once.
"""

from __future__ import annotations

from typing import Any

from django.db import connections, models, transaction
from django.db.models.functions import Now

from ..rules import rule
from ..rules.inbox import OPEN
from .fields import began_sql, no_wait_sql, now_sql, skip_locked_sql
from .inbox import InboxMessage

#: Most waiting messages that one statement moves to the instants of their slots.
MOVED = 1000
#: The slot that is due now, which stays due now at another period.
_ORIGIN = "{now} - ({now} - l.origin) / l.period * %s"


class RateLineManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The transitions of lines, each in one statement with its own commit."""

    def place(
        self,
        stage: str,
        key: str,
        period: float,
        tolerance: float,
        slot: int | None = None,
    ) -> tuple[int, float]:
        """Take the line's next slot, or return to a `slot` taken before.

        Returns the slot, and in how many seconds it is due: 0 or less if it is due. On
        PostgreSQL the commit does not wait for the disk: a crash may free the last
        slots.
        """
        connection = connections[self.db]
        native = connection.vendor == "postgresql"
        now, greatest = _epoch_sql(connection), "greatest" if native else "max"
        number, taken = ("l.taken", 1) if slot is None else (str(int(slot)), 0)
        no_wait, waits_not = no_wait_sql(connection)
        source = f"VALUES (%s, %s, {now} - %s, %s, %s)"
        if no_wait:
            no_wait = f"WITH {no_wait} "
            source = (
                f"SELECT %s, %s, {now} - %s, %s::float8, %s::bigint WHERE {waits_not}"
            )
        first = slot or 0
        with connection.cursor() as cursor:
            cursor.execute(
                f"{no_wait}INSERT INTO {self._table} AS l"
                f" (stage, key, origin, period, taken) {source}"
                " ON CONFLICT (stage, key) DO UPDATE SET period = excluded.period,"
                f" taken = l.taken + {taken}, origin = {greatest}(CASE"
                " WHEN l.period = excluded.period THEN l.origin"
                f" ELSE {_ORIGIN.format(now=now)} END,"
                f" {now} - %s - {number} * excluded.period)"
                f" RETURNING taken, origin - {now}",
                [
                    *(stage, key, tolerance + first * period, period, first + 1),
                    *(period, tolerance),
                ],
            )
            after, origin = cursor.fetchone()
        place = after - 1 if slot is None else slot
        return place, origin + place * period

    def changed(self, stage: str, period: float) -> None:
        """Move all lines of a stage whose rate has changed, and what waits in them."""
        connection = connections[self.db]
        now = _epoch_sql(connection)
        # Both or none: a second try would not find that the rate has changed.
        with transaction.atomic(using=self.db), connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} AS l SET period = %s,"  # noqa: S608 - constants only
                f" origin = {_ORIGIN.format(now=now)}"
                " WHERE stage = %s AND period <> %s",
                [period, period, stage, period],
            )
            if cursor.rowcount:
                self._move(cursor, "i.stage = %s", [stage])

    def no_more(self, stage: str) -> None:
        """Release the messages that wait in the lines of a stage, which has no rate any
        more."""
        waiting = InboxMessage.objects.using(self.db).filter(
            stage=stage, slot__isnull=False, due_at__isnull=False
        )
        waiting.update(due_at=Now(), slot=None, key="")

    def move_overdue(self, stage: str, key: str) -> None:
        """Move waiting messages of a line whose origin has moved to the new instants of
        their slots: those that would be claimed too early, a bounded number."""
        connection = connections[self.db]
        table, now = InboxMessage._meta.db_table, began_sql(connection)
        with connection.cursor() as cursor:
            self._move(
                cursor,
                f"i.id IN (SELECT id FROM {table} WHERE stage = %s AND due_at <= {now}"  # noqa: S608 - constants only
                f" AND key = %s AND slot IS NOT NULL AND {OPEN.sql()}"
                f" AND {rule.NOT_LEASED.sql(now=now)}"
                f" ORDER BY due_at, id LIMIT {MOVED} {skip_locked_sql(connection)})",
                [stage, key],
            )

    def _move(self, cursor: Any, which: str, parameters: list[Any]) -> None:
        native = connections[self.db].vendor == "postgresql"
        instant = "l.origin + i.slot * l.period"
        at = (
            f"to_timestamp({instant})"
            if native
            else f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', {instant}, 'unixepoch')"
        )
        cursor.execute(
            f"UPDATE {InboxMessage._meta.db_table} AS i SET due_at = {at}"  # noqa: S608 - constants only
            f" FROM {self._table} AS l WHERE l.stage = i.stage AND l.key = i.key"
            f" AND i.slot IS NOT NULL AND i.due_at IS NOT NULL AND {which}",
            parameters,
        )

    @property
    def _table(self) -> str:
        table: str = self.model._meta.db_table
        return table


def _epoch_sql(connection: Any) -> str:
    """Return SQL for the database's present instant as Unix time in seconds."""
    if connection.vendor == "postgresql":
        return f"extract(epoch FROM {now_sql(connection)})::float8"
    return "((julianday('now') - 2440587.5) * 86400.0)"


class RateLine(models.Model):
    """The slots of one key at one stage."""

    id = models.BigAutoField(primary_key=True)
    stage = models.CharField(max_length=255)
    key = models.CharField(max_length=32, help_text="A digest of the header's value.")
    origin = models.FloatField(help_text="When slot 0 is due, in seconds since 1970.")
    period = models.FloatField(help_text="Seconds from one slot to the next.")
    taken = models.BigIntegerField(help_text="Slots taken so far.")

    objects = RateLineManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["stage", "key"], name="txmsg_rate_line"),
        ]

    def __str__(self) -> str:
        return f"{self.stage}: {self.key}"
