"""Hop 2: a message stored with the business data, and how it leaves.

States: `pending → dispatched | dead | cancelled`. A pending row is settled only by a
receipt, a definite rejection, its own expiry, or a cancellation. Nothing deletes it
before. A cancelled row is dead by intent: it has `cancelled_at` beside `dead_at`, and
the reason in its `last_error`.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import IsNull

from .outbox_claim import ClaimingManager
from .outbox_pending import PendingManager
from .outbox_store import StoringManager

#: `rules.outbox.PENDING`, for indexes and querysets.
PENDING = Q(dispatched_at__isnull=True, dead_at__isnull=True)
#: It may hold a unique key; a dispatched message has one until it is processed.
HOLDING = Q(dead_at__isnull=True)


class OutboxState(models.TextChoices):
    """The state of a stored message, computed from its instants."""

    PENDING = "pending", "pending"
    DISPATCHED = "dispatched", "dispatched"
    DEAD = "dead", "dead"
    CANCELLED = "cancelled", "cancelled"


class OutboxManager(StoringManager, ClaimingManager, PendingManager):
    """The transitions of many rows at once, each in a single statement."""


class OutboxMessage(models.Model):
    """A message that leaves if, and only if, the transaction that stored it commits."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField()
    replay_id = models.CharField(
        max_length=64,
        default="",
        blank=True,
        help_text="Why this id was stored again: a redelivery, or a replay.",
    )
    service = models.CharField(
        max_length=100,
        default="",
        db_default="",
        blank=True,
        help_text="The service that stored this message, and whose relay sends it. "
        "Empty: stored by an earlier release, any relay sends it.",
    )
    broker = models.CharField(max_length=64, default="default")
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255, default="", blank=True)
    correlation_id = models.CharField(max_length=255, default="", blank=True)
    session_id = models.UUIDField(
        null=True,
        blank=True,
        help_text="The HTTP session or the stage's run that stored this message.",
    )
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255)
    body = models.BinaryField()
    created_at = models.DateTimeField(db_default=Now())
    due_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True, blank=True)
    lease_token = models.UUIDField(null=True, blank=True)
    last_error = models.TextField(default="", blank=True)
    dispatched_at = models.DateTimeField(null=True, blank=True)
    dead_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When it was cancelled; it is dead from then on.",
    )
    linked_at = models.DateTimeField(
        null=True,
        blank=True,
        help_text="When it got its place in the order of its key.",
    )
    unique_key = models.CharField(  # noqa: DJ001 - most rows have none, and no entry
        max_length=255,
        null=True,
        blank=True,
        help_text="Held by this message until a relay claims it, or longer.",
    )
    unique_until_processed = models.BooleanField(
        db_default=False,
        help_text="Whether it holds its key until a stage here has processed it.",
    )

    objects = OutboxManager()

    class Meta:
        verbose_name = "outbox message"
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
            # The claim scans this index: only pending rows, in the order of their due
            # times.
            models.Index(
                fields=["due_at", "id"], condition=PENDING, name="txmsg_outbox_due"
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
            models.Index(
                fields=["correlation_id"],
                condition=~Q(correlation_id=""),
                name="txmsg_outbox_correlation",
            ),
            models.Index(
                fields=["dead_at"],
                condition=Q(dead_at__isnull=False),
                name="txmsg_outbox_dead",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} to {self.destination}"

    @property
    def state(self) -> OutboxState:
        """Pending, dispatched, dead or cancelled."""
        if self.dispatched_at is not None:
            return OutboxState.DISPATCHED
        if self.dead_at is None:
            return OutboxState.PENDING
        if self.cancelled_at is None:
            return OutboxState.DEAD
        return OutboxState.CANCELLED
