"""Hop 2: a message stored with the business data, and the message's states.

States: `pending → dispatched | dead | cancelled`. A pending row is settled only by a
receipt, a definite rejection, the message's expiry, or a cancellation. No code deletes
a pending row. A cancelled row has both `cancelled_at` and `dead_at`, and the reason in
`last_error`.
"""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections, models
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import IsNull

from .. import conf
from ..rules import LEASED, NOT_LEASED, inbox
from ..rules import outbox as rules
from ..wire import format_instant
from .fields import OneOf, SqlManager, not_blank, not_null, read_uuid
from .inbox import InboxMessage
from .outbox_claim import ClaimingManager
from .outbox_store import StoringManager

#: `rules.outbox.PENDING`, for indexes and querysets.
PENDING = Q(dispatched_at__isnull=True, dead_at__isnull=True)
#: It may hold a unique key; a dispatched message has one until it is processed.
HOLDING = Q(dead_at__isnull=True)


#: Seconds for which `PendingManager.free()` waits until a relay has settled a row.
SETTLING = 1.0

#: The primary key and the broker of each changed row.
Changed = list[tuple[int, str]]


class PendingManager(SqlManager):
    """Changes pending rows by message id, and frees or holds unique keys.

    `cancel()` and `make_due()` never change a row that a relay has claimed, because the
    relay may be sending the row's message.
    """

    def cancel(self, messages: Collection[uuid.UUID], *, why: str) -> Changed:
        """Cancel rows. The rows get no dead letters, because no operator needs to act.
        A row that already has its place in the order of its key is not cancelled: the
        next message of the key will wait for the row's message."""
        now = self._sql.now
        assign = (
            f"dead_at = {now}, cancelled_at = {now}, last_error = %s,"
            " lease_until = NULL, lease_token = NULL"
        )
        note = f"cancelled: {why}"[:2000]
        return self._change(messages, assign, [note], also="linked_at IS NULL")

    def make_due(
        self, message_id: uuid.UUID, due: dt.datetime | dt.timedelta
    ) -> Changed:
        """Make rows due at a time, or after a duration from now."""
        value: Any
        if isinstance(due, dt.timedelta):
            at, value = self._sql.later(), due.total_seconds()
        else:
            at, value = "%s", connections[self.db].ops.adapt_datetimefield_value(due)
        # A relay whose lease has ended must not send it at its former time.
        return self._change([message_id], f"due_at = {at}, lease_token = NULL", [value])

    def free(self, keys: Collection[str], cause: uuid.UUID | None = None) -> None:
        """Clear the unique key of each row that has one of these `keys` and no longer
        needs it.

        A row with `unique_until="processed"` no longer needs its key if the message was
        processed or buried here, or if this transaction is processing the message
        (`cause`).

        In two more cases, a row no longer needs its key, whatever `unique_until` is:

        - The message has expired.
        - The message was dispatched so long ago that the inbox may have deleted its
          record of the message.

        These two cases have one exception. A row with `unique_until="processed"` needs
        its key as long as the message waits in the inbox. But if the message is not
        parked there, and was received that long ago, the broker may have lost it.

        If a relay is sending such a row, this method first waits for that relay, for
        `SETTLING` seconds at most. The relay settles its batch in one statement, which
        would wait for the row until the caller's transaction ends. In a transaction
        above READ COMMITTED, it does not wait.
        """
        table = self._table
        inbox_table = InboxMessage._meta.db_table
        having, values = self._sql.ids("unique_key", keys)
        received = (
            f"EXISTS (SELECT 1 FROM {inbox_table} i WHERE o.unique_until_processed"  # noqa: S608 - constants only
            f" AND i.message_id = o.message_id AND {{}})"
        )
        still = received.format(inbox.OPEN.sql("i"))
        ended = received.format((~inbox.OPEN).sql("i"))
        caused = ""
        if cause is not None:
            caused = " OR (o.unique_until_processed AND o.message_id = %s)"
            values = [*values, cause.hex]
        days, forgotten = conf.get().RETENTION.INBOX, ""
        if days is not None:
            since = self._sql.later()
            still_here = received.format(
                f"{inbox.OPEN.sql('i')} AND ({inbox.PARKED.sql('i')}"
                f" OR i.last_received_at >= {since})"
            )
            forgotten = f" OR (dispatched_at < {since} AND NOT {still_here})"
            values = [*values, -86_400 * days, -86_400 * days]
        needless = (
            f"{having} AND dead_at IS NULL AND ({ended}"
            f" OR (expires_at <= {self._sql.now} AND NOT {still})"
            f"{caused}{forgotten})"
        )
        sending = (
            f"SELECT 1 FROM {table} AS o WHERE {needless}"  # noqa: S608 - constants only
            f" AND dispatched_at IS NULL AND {LEASED.sql('o', now=self._sql.now)}"
            # Above that level, this transaction would not see the relay's mark, and
            # its UPDATE would fail because of it.
            " AND current_setting('transaction_isolation') = 'read committed'"
        )
        # On SQLite, no relay can write while this transaction is open.
        waits = connections[self.db].vendor == "postgresql"
        until = time.monotonic() + SETTLING * waits
        while time.monotonic() < until and self._row(sending, values):
            threading.Event().wait(0.05)
        self._changed(
            f"UPDATE {table} AS o SET unique_key = NULL WHERE {needless}",  # noqa: S608 - constants only
            values,
        )

    def give_up(self, messages: Collection[uuid.UUID]) -> None:
        """Clear the unique keys that these messages hold until they are processed. No
        stage has buried the messages, so no row of the inbox frees the keys. If a copy
        is parked there, the message will be processed and keeps its key."""
        parked = InboxMessage.objects.using(self.db).filter(due_at__isnull=False)
        parked = parked.filter(message_id=OuterRef("message_id"))
        held = self.filter(OneOf("message_id", messages), unique_until_processed=True)
        held.filter(~Exists(parked)).update(unique_key=None)

    def hold(self, wanted: Mapping[str, float | None]) -> list[int]:
        """Lock the pending rows with these unique keys until the open transaction ends.
        Returns the primary keys of all rows that hold the keys.

        The caller skips its own messages with these keys. `wanted` maps each key to the
        expiry of the caller's message, in seconds; `None` means never. If the pending
        row would expire sooner, it gets this later expiry.
        """
        if not wanted:
            return []
        connection, table = connections[self.db], self._table
        now, later = self._sql.now, self._sql.later("g.expiry")
        having, keys = self._sql.ids("unique_key", wanted)
        # By the index of the keys, whatever the statistics say of pending rows. Not
        # those that a relay is sending: its mark would wait for us.
        otherwise = rules.PENDING_OTHERWISE.sql()
        free = NOT_LEASED.sql(now=now)
        pending = f"{having} AND dead_at IS NULL AND {otherwise} AND {free}"
        # While the row is locked so, claims skip it, and a transaction that wants to
        # change it waits; another one that locks it like this does not.
        lock = "FOR SHARE" if connection.vendor == "postgresql" else ""
        source = self._sql.given("g", key="text", expiry="float8")
        given = [{"key": key, "expiry": expiry} for key, expiry in wanted.items()]
        self._changed(
            f"UPDATE {table} SET expires_at ="  # noqa: S608 - constants only
            f" CASE WHEN g.expiry IS NOT NULL THEN {later} END FROM {source}"
            f" WHERE {pending} AND unique_key = g.key AND expires_at IS NOT NULL"
            f" AND (g.expiry IS NULL OR expires_at < {later})",
            [json.dumps(given), *keys],
        )
        held = self._rows(
            f"SELECT id FROM {table} WHERE {pending} {lock}",  # noqa: S608 - constants only
            keys,
        )
        held += self._rows(
            f"SELECT id FROM {table} WHERE {having} AND dead_at IS NULL"  # noqa: S608 - constants only
            " AND unique_until_processed AND (dispatched_at IS NOT NULL"
            f" OR {LEASED.sql(now=now)})",
            keys,
        )
        return [pk for (pk,) in held]

    def _change(
        self,
        messages: Collection[uuid.UUID],
        assign: str,
        values: list[Any],
        also: str = "TRUE",
    ) -> Changed:
        if not messages:
            return []
        table = self._table
        pending = rules.PENDING_OTHERWISE.sql()
        free = NOT_LEASED.sql(now=self._sql.now)
        wanted, ids = self._sql.ids("message_id", messages)
        return self._rows(
            f"UPDATE {table} SET {assign} WHERE {wanted} AND {pending}"  # noqa: S608 - constants only
            f" AND {free} AND {also}"
            f" RETURNING id, broker",
            [*values, *ids],
        )


class OutboxManager(StoringManager, ClaimingManager, PendingManager):
    """Stores outbox rows, and changes their states."""


class OutboxMessage(models.Model):
    """A message that is sent if, and only if, the transaction that stored it
    commits."""

    message_id = models.UUIDField()
    #: Why this id was stored again: a redelivery, or a replay. With `rules.outbox.NEW`:
    #: the run of the pipeline that stored this new id.
    replay_id = models.CharField(max_length=64, default="")
    #: The service that stored this message, and whose relay sends it. Empty: stored by
    #: an earlier release, any relay sends it.
    service = models.CharField(max_length=100, default="", db_default="")
    broker = models.CharField(max_length=64, default="default")
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255, default="")
    correlation_id = models.CharField(max_length=255, default="")
    #: The HTTP session or the stage's run that stored this message.
    session_id = models.UUIDField(null=True)
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255)
    body = models.BinaryField()
    created_at = models.DateTimeField(db_default=Now())
    due_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    attempts = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    last_error = models.TextField(default="")
    dispatched_at = models.DateTimeField(null=True)
    dead_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)
    #: When it got its place in the order of its key.
    linked_at = models.DateTimeField(null=True)
    #: Held by this message until a relay claims it, or longer.
    unique_key = models.CharField(max_length=255, null=True)  # noqa: DJ001 - most rows have none, and no entry
    unique_until_processed = models.BooleanField(db_default=False)

    objects = OutboxManager()

    class Meta:
        permissions = [
            ("cancel_outboxmessage", "Can cancel pending messages"),
            ("reschedule_outboxmessage", "Can reschedule pending messages"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["message_id", "replay_id"], name="txmsg_outbox_message"
            ),
            models.UniqueConstraint(
                fields=["unique_key"],
                condition=HOLDING & Q(unique_key__isnull=False),
                name="txmsg_outbox_holds_key",
            ),
            models.CheckConstraint(
                condition=Q(dispatched_at__isnull=True) | Q(dead_at__isnull=True),
                name="txmsg_outbox_one_end",
            ),
            models.CheckConstraint(
                condition=Q(dead_at__isnull=True) | ~Q(last_error=""),
                name="txmsg_outbox_dead_says_why",
            ),
        ]
        indexes = [
            # The claim scans this index: only pending rows of its broker, in the order
            # of their due times.
            models.Index(
                fields=["broker", "due_at", "id"],
                condition=PENDING,
                name="txmsg_outbox_due",
            ),
            # Pending messages are counted by place.
            models.Index(
                fields=["service", "destination", "due_at"],
                condition=PENDING,
                name="txmsg_outbox_place",
            ),
            # Worded like `rules.outbox.PENDING_OTHERWISE`.
            models.Index(
                fields=["key", "id"],
                condition=~Q(key="")
                & Q(IsNull(Coalesce("dispatched_at", "dead_at"), True)),
                name="txmsg_outbox_key",
            ),
            models.Index(
                fields=["session_id"],
                condition=PENDING & Q(session_id__isnull=False),
                name="txmsg_outbox_session",
            ),
            not_blank("correlation_id", "txmsg_outbox_correlation"),
            not_null("dead_at", "txmsg_outbox_dead"),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} to {self.destination}"

    @property
    def state(self) -> str:
        """The state, computed from the instants: pending, dispatched, dead or
        cancelled."""
        if self.dispatched_at is not None:
            return "dispatched"
        if self.dead_at is None:
            return "pending"
        return "dead" if self.cancelled_at is None else "cancelled"


# Hop 3's record: for each key, the last message that was sent to a destination. The
# relay links each new message of the key to this last message (`relaying/lane.py`).

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)

#: A destination, and a key there.
Chain = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joint:
    """The place of a new message in the chain of its key, and the message's
    predecessor, if any.

    Instants are microseconds since 1970 by the database's clock. Within a chain, later
    messages have later instants, even if that clock is set back.
    """

    previous_id: uuid.UUID | None
    previous_at: int | None
    last_at: int

    def links(self, ids: Sequence[str]) -> Iterator[str | None]:
        """Yield the link of each new message of the chain to its predecessor, in the
        form of the header, or None for the first message of a key. `ids` are those of
        the new messages."""
        before: uuid.UUID | str | None = self.previous_id
        at = self.previous_at
        for place, one in enumerate(ids, self.last_at - len(ids) + 1):
            if before is None or at is None:
                yield None
            else:
                instant = _EPOCH + dt.timedelta(microseconds=at)
                yield f"{before};at={format_instant(instant)}"
            before, at = one, place


class KeyTailManager(SqlManager):
    """Changes key tails. A tail only ever advances."""

    def advance(
        self, broker: str, ends: Mapping[Chain, uuid.UUID], longest: int
    ) -> dict[Chain, Joint]:
        """Make these messages the last messages of their chains. `longest` is the
        largest number of messages that this call adds to any one chain. The tails stay
        locked until the transaction ends, so that no other relay extends these chains
        meanwhile. The tails are always locked in the same order, so that relays do not
        deadlock."""
        given = [
            {"destination": place, "key": key, "id": last.hex}
            for (place, key), last in ends.items()
        ]
        sql = self._sql
        source = sql.given("g", destination="text", key="text", id="uuid")
        now = f"CAST({sql.epoch()} * 1000000 AS bigint)"
        rows = self._rows(
            f"INSERT INTO {self._table} AS t"  # noqa: S608 - constants only
            " (broker, destination, key, last_id, last_at)"
            f" SELECT %s, g.destination, g.key, g.id, {now} FROM {source}"
            " WHERE TRUE ORDER BY g.destination, g.key"
            " ON CONFLICT (broker, destination, key) DO UPDATE SET"
            " previous_id = t.last_id, previous_at = t.last_at,"
            " last_id = excluded.last_id,"
            f" last_at = {sql.greatest}(excluded.last_at, t.last_at + %s)"
            " RETURNING destination, key, previous_id, previous_at, last_at",
            [broker, json.dumps(given), longest],
        )
        return {
            (destination, key): Joint(read_uuid(previous), at, last_at)
            for destination, key, previous, at, last_at in rows
        }


class KeyTail(models.Model):
    """The last of the messages that relays have claimed for one destination and key."""

    broker = models.CharField(max_length=64)
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255)
    last_id = models.UUIDField()
    #: In microseconds since 1970.
    last_at = models.BigIntegerField()
    previous_id = models.UUIDField(null=True)
    previous_at = models.BigIntegerField(null=True)

    objects = KeyTailManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["broker", "destination", "key"], name="txmsg_key_tail"
            )
        ]

    def __str__(self) -> str:
        return f"{self.key} to {self.destination}"
