"""The embedded broker's tables: queues, and the subscriptions of its topics."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from .claiming import Room, bounds, claim_sql
from .fields import Later, SqlManager

#: Messages of a removed subscription deleted in one transaction.
REMOVED_TOGETHER = 1000


def queue_name(destination: str, subscriber: str | None) -> str:
    """Return the queue for a destination's messages. Each subscriber of a topic has its
    own queue."""
    return f"{destination}@{subscriber}" if subscriber else destination


def due_in(seconds: float) -> models.Func:
    """Return an expression for the time at which a message sent with this delay becomes
    available."""
    return Later(seconds) if seconds else Now()


class QueueManager(SqlManager):
    """The claims of queued messages. Statements that change a claimed message check the
    token of its lease."""

    def claim(
        self,
        queue: str,
        token: uuid.UUID,
        *,
        limit: int,
        lease: float,
        room: Room,
        which: str = "TRUE",
        rank: str = "",
    ) -> list[tuple[int, str, bytes, int]]:
        """Claim at most `limit` due messages of a queue, in order. `room` limits the
        total size of their bodies. `which` is a condition on the rows. With `rank`,
        rows with the highest values of this column come first.

        Returns the id, headers as JSON, body and number of deliveries of each message.
        """
        sql = self._sql
        statement = claim_sql(
            sql,
            _TABLE,
            due="available_at",
            where=f"c.queue = %s AND c.available_at <= {sql.began}"
            f" AND {which}{' AND length(c.body) <= %s' if room.skips else ''}",
            assign=f"available_at = {sql.later()},"
            " lease_token = %s, deliveries = deliveries + 1",
            returning="id, headers, body, deliveries, priority",
            rank=rank,
        )
        rows = self._rows(
            statement,
            [
                queue,
                *([room.largest] if room.skips else []),
                *bounds(limit, room.total, alone=room.alone),
                lease,
                token.hex,
            ],
        )
        return [
            (pk, headers, bytes(body), deliveries)
            for pk, headers, body, deliveries, _ in sorted(
                rows, key=lambda row: (-row[4], row[0])
            )
        ]

    def claim_by_priority(
        self,
        queue: str,
        token: uuid.UUID,
        *,
        limit: int,
        lease: float,
        room: Room,
    ) -> list[tuple[int, str, bytes, int]]:
        """Claim due messages like `claim()`, but messages of higher priority first."""
        claim = partial(self.claim, queue, token, lease=lease)
        due = self.filter(queue=queue, available_at__lte=Now())
        if not due.exclude(priority=0).exists():
            return claim(limit=limit, room=room)
        found: list[tuple[int, str, bytes, int]] = []
        # Each group is read by its index: ordinary rows need not be sorted to find the
        # others.
        for which, rank in (
            ("c.priority > 0 AND c.priority <> 0", "priority"),
            ("c.priority = 0", ""),
            ("c.priority < 0 AND c.priority <> 0", "priority"),
        ):
            left = limit - len(found)
            if left > 0:
                found += claim(limit=left, room=room, which=which, rank=rank)
                size = sum(len(body) for _, _, body, _ in found)
                room = Room(max(0, room.total - size), 0) if found else room
        return found

    def extend(self, ids: Sequence[int], token: uuid.UUID, lease: float) -> None:
        """Extend the lease of messages to `lease` seconds from now."""
        later = self._sql.later()
        sql = f"UPDATE {_TABLE} SET available_at = {later}"  # noqa: S608 - constants only
        self._change(sql, ids, token, lease)

    def release(self, ids: Sequence[int], token: uuid.UUID) -> None:
        """Release messages, which are then due immediately."""
        now = self._sql.now
        sql = f"UPDATE {_TABLE} SET available_at = {now}, lease_token = NULL"  # noqa: S608 - constants only
        self._change(sql, ids, token)

    def remove(self, ids: Sequence[int], token: uuid.UUID) -> int:
        """Delete acknowledged messages. Returns the number of messages that still
        belonged to this lease."""
        return self._change(f"DELETE FROM {_TABLE}", ids, token)  # noqa: S608 - constants only

    def _change(
        self, statement: str, ids: Sequence[int], token: uuid.UUID, *values: Any
    ) -> int:
        condition, id_values = self._sql.ids("id", ids)
        return self._changed(
            f"{statement} WHERE {condition} AND lease_token = %s",
            [*values, *id_values, token.hex],
        )


class QueueMessage(models.Model):
    """A message in a queue. The row is deleted when the message is acknowledged."""

    queue = models.CharField(max_length=511)
    headers = models.JSONField(default=dict)
    body = models.BinaryField()
    enqueued_at = models.DateTimeField(db_default=Now())
    available_at = models.DateTimeField(db_default=Now())
    deliveries = models.PositiveIntegerField(default=0)
    lease_token = models.UUIDField(null=True)
    #: The priority of a task; higher ones run first.
    priority = models.SmallIntegerField(db_default=0)

    objects: ClassVar[QueueManager] = QueueManager()

    class Meta:
        indexes = [
            models.Index(
                fields=["queue", "available_at", "id"], name="txmsg_queue_due"
            ),
            models.Index(
                fields=["queue", "-priority", "available_at", "id"],
                condition=~Q(priority=0),
                name="txmsg_queue_priority",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} in {self.queue}"


class SubscriptionManager(SqlManager):
    """Starts and ends subscriptions, and finds the queues of a topic."""

    def add(self, topic: str, subscriber: str) -> None:
        """Subscribe: from now on, the subscriber's queue gets a copy of each message of
        the topic."""
        self.get_or_create(topic=topic, subscriber=subscriber)

    def queues(self, topics: Collection[str]) -> dict[str, list[str]]:
        """Return the queues to which each topic's messages are delivered. Locks the
        subscriptions until the caller's transaction ends, so that a concurrent
        `remove()` also deletes the copies that this transaction inserts."""
        found: dict[str, list[str]] = {topic: [] for topic in topics}
        connection = connections[self.db]
        condition, values = self._sql.ids("topic", list(found))
        # On SQLite, the transaction excludes all other writers.
        lock = " FOR KEY SHARE" if connection.vendor == "postgresql" else ""
        for topic, subscriber in self._rows(
            f"SELECT topic, subscriber FROM {self._table} WHERE {condition}{lock}",  # noqa: S608 - constants only
            values,
        ):
            found[topic].append(queue_name(topic, subscriber))
        return found

    def remove(self, topic: str, subscriber: str) -> int:
        """End a subscription, and delete the messages in its queue in transactions of
        limited size. Returns the number of deleted messages."""
        self.filter(topic=topic, subscriber=subscriber).delete()
        rows = QueueMessage.objects.db_manager(self.db).filter(
            queue=queue_name(topic, subscriber)
        )
        removed = 0
        while ids := list(rows.values_list("pk", flat=True)[:REMOVED_TOGETHER]):
            removed += rows.filter(pk__in=ids).delete()[0]
        return removed


class QueueSubscription(models.Model):
    """A durable subscriber of a topic: its queue gets a copy of every message."""

    topic = models.CharField(max_length=255)
    subscriber = models.CharField(max_length=255)

    objects: ClassVar[SubscriptionManager] = SubscriptionManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["topic", "subscriber"], name="txmsg_queue_subscription"
            )
        ]

    def __str__(self) -> str:
        return f"{self.subscriber} on {self.topic}"


_TABLE = QueueMessage._meta.db_table
