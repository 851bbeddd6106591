"""Hop 3's record: for each key, the last message that was sent to a destination. The
relay links each new message of the key to this last message (`relaying/lane.py`)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from django.db import models

from .fields import SqlManager, read_uuid

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
