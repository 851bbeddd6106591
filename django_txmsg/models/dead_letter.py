"""Dead letters: failed messages, kept complete until they are resolved.

States: `open → redelivered | replaced | discarded`.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import models, router, transaction
from django.db.models import Q
from django.db.models.functions import Now

from .. import wire
from ..errors import TxmsgError
from .fields import Later, MessageKey, SqlManager, not_blank, read_uuid

# An operator's note about an error, for all dead letters with its fingerprint.
#
# A muted error is known and awaits its fix: its dead letters stay and can be
# redelivered as before, but the overview and the alarms do not count them.


class FailureNoteManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Changes operators' notes. No other class may change a note."""

    def keep(
        self,
        fingerprint: str,
        *,
        by: str,
        note: str | None = None,
        muted: bool | None = None,
        seen: str | None = None,
        duration: dt.timedelta | None = None,
        above: int | None = None,
    ) -> FailureNote:
        """Store the note about an error, and whether the error is muted. If `note` or
        `muted` is None, that value stays as it is.

        The mute ends after `duration`, or never if `duration` is None. The mute does
        not apply while more than `above` dead letters of the error are open. `seen` is
        the `version` of the note that the operator has read. Raises TxmsgError in three
        cases: another operator has changed the note since; the error would be muted
        with an empty note; no dead letter has the fingerprint.
        """
        using = self._db or router.db_for_write(self.model)
        notes = self.using(using)
        with transaction.atomic(using=using):
            known = notes.filter(fingerprint=fingerprint).exists()
            letters = DeadLetter.objects.using(using).filter(fingerprint=fingerprint)
            if not known and not letters.exists():
                raise TxmsgError(f"No dead letter has the fingerprint {fingerprint!r}.")
            locked = notes.select_for_update()
            row: FailureNote
            row, _ = locked.get_or_create(fingerprint=fingerprint[:64])
            if seen is not None and seen != row.version:
                raise TxmsgError(
                    f"Nothing is saved: {row.noted_by or 'another operator'} has "
                    "written a note on this error in the meantime: "
                    f"{row.note!r}. Read it, then write again."
                )
            if note is not None:
                row.note = note.strip()[:2000]
            if muted is not None:
                row.muted = muted
                ends = muted and duration is not None
                row.muted_above = above if muted else None
                row.muted_until = Later(duration.total_seconds()) if ends else None  # type: ignore[union-attr]  # it is not None
            if row.muted and not row.note:
                raise TxmsgError("Say in the note why this error is muted.")
            row.noted_by = by[:255]
            row.noted_at = Now()
            row.save(using=using)
        row.refresh_from_db(using=using)
        return row


class FailureNote(models.Model):
    """An operator's note about an error: a ticket, a cause, a plan."""

    fingerprint = models.CharField(max_length=64, unique=True)
    note = models.TextField(default="")
    muted = models.BooleanField(default=False)
    muted_until = models.DateTimeField(null=True)
    muted_above = models.PositiveIntegerField(null=True)
    noted_by = models.CharField(max_length=255, default="")
    noted_at = models.DateTimeField(db_default=Now())

    objects = FailureNoteManager()

    def __str__(self) -> str:
        return self.note.partition("\n")[0] or self.fingerprint

    @property
    def version(self) -> str:
        """A text that changes whenever the note changes; "" if there is no note."""
        return f"{self.noted_at.timestamp():.6f}" if self.noted_by else ""


# One failed attempt of a stage at a message: when, by which worker, how long, and
# why.


class Attempt(models.Model):
    """A failed execution of a stage. A successful execution is recorded only in the
    inbox."""

    message_id = models.UUIDField()
    stage = models.CharField(max_length=255)
    number = models.PositiveIntegerField()
    worker = models.CharField(max_length=255, default="")
    failed_at = models.DateTimeField(db_default=Now())
    #: In seconds.
    duration = models.FloatField(null=True)
    exception = models.TextField(default="")
    traceback = models.TextField(default="")
    fingerprint = models.CharField(max_length=64, default="")

    class Meta:
        indexes = [
            models.Index(fields=["message_id", "stage"], name="txmsg_attempt_message")
        ]

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.message_id} at {self.stage}"


class Resolution(models.TextChoices):
    """How a dead letter was resolved."""

    OPEN = "open", "open"
    REDELIVERED = "redelivered", "redelivered"
    REPLACED = "replaced", "replaced by a copy"
    DISCARDED = "discarded", "discarded"


class DeadLetterManager(SqlManager):
    """Operations on many dead letters in a single statement."""

    def store_again(
        self, again: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, uuid.UUID]]:
        """Copy dead letters and their bodies into the outbox, in a single statement.

        Each entry of `again` has the dead letter's `id`, and the new row's `key`,
        `headers`, `replay_id` and `service`. Returns the primary key and the message id
        of each new row.
        """
        source = self._sql.given(
            "again", id="bigint", key="text", headers="jsonb", replay_id="text",
            service="text",
        )  # fmt: skip
        now = self._sql.now
        rows = self._rows(
            "INSERT INTO django_txmsg_outboxmessage (message_id, replay_id,"  # noqa: S608 - constants only
            " service, broker, destination, key, correlation_id, headers,"
            " content_type, body, attempts, last_error, created_at, due_at)"
            " SELECT letter.message_id, again.replay_id, again.service,"
            " letter.broker, letter.destination, again.key, letter.correlation_id,"
            " again.headers,"
            " CASE letter.content_type WHEN '' THEN %s"
            f" ELSE letter.content_type END, letter.body, 0, '', {now}, {now}"
            f" FROM {source} JOIN django_txmsg_deadletter letter"
            " ON letter.id = again.id ORDER BY again.id"
            " RETURNING id, message_id",
            [wire.BYTES, json.dumps(list(again))],
        )
        return [(pk, read_uuid(message_id)) for pk, message_id in rows]

    def park_again(self, again: Sequence[Mapping[str, Any]], *, force: bool) -> None:
        """Put the messages of dead letters back into the inbox as parked messages, in a
        single statement. Each dead letter belongs to a stage. The parked messages are
        due immediately.

        Each entry of `again` has the dead letter's `id`, and the new row's `headers`
        and `service`. Parked and revoked messages are not changed. A processed message
        is parked again only if `force` is set.
        """
        source = self._sql.given("again", id="bigint", headers="jsonb", service="text")
        now = self._sql.now
        settled = "TRUE" if force else "i.processed_at IS NULL"
        self._changed(
            f"""
            INSERT INTO django_txmsg_inboxmessage AS i
                (stage, message_id, destination, correlation_id, service,
                 created_at, deliveries, attempts, first_received_at,
                 last_received_at, due_at, headers, body, last_error)
            SELECT letter.stage, letter.message_id, letter.destination,
                letter.correlation_id, again.service, letter.message_created_at,
                1, 0, {now}, {now}, {now}, again.headers, letter.body, ''
            FROM {source} JOIN django_txmsg_deadletter letter
                ON letter.id = again.id
            WHERE TRUE ORDER BY again.id
            ON CONFLICT (message_id, stage) DO UPDATE SET
                attempts = 0, dead_at = NULL, processed_at = NULL,
                due_at = excluded.due_at, headers = excluded.headers,
                body = excluded.body, lease_until = NULL, lease_token = NULL,
                last_error = ''
            WHERE i.due_at IS NULL AND i.revoked_at IS NULL AND {settled}
            """,  # noqa: S608 - constants only
            [json.dumps(list(again))],
        )


class DeadLetter(models.Model):
    """A buried message with its original headers and bytes, and the error that led to
    its burial. With the reason `body_too_long`, only the beginning of the bytes.

    `stage` is empty if the relay could not send the message. It is also empty if the
    broker itself has dead-lettered the message, unless no stage but this one can have
    received the message, and has an inbox row of it (`consuming/intake.py`).
    """

    message_id = models.UUIDField()
    stage = models.CharField(max_length=255, default="")
    broker = models.CharField(max_length=64, default="default")
    destination = models.CharField(max_length=255)
    correlation_id = models.CharField(max_length=255, default="")
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255, default="")
    body = models.BinaryField()
    reason = models.CharField(max_length=64)
    exception = models.TextField(default="")
    traceback = models.TextField(default="")
    fingerprint = models.CharField(max_length=64, default="")
    attempts = models.PositiveIntegerField(default=0)
    #: How often this message died at this stage.
    deaths = models.PositiveIntegerField(default=1)
    message_created_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    resolution = models.CharField(
        max_length=16, choices=Resolution.choices, default=Resolution.OPEN
    )
    resolved_at = models.DateTimeField(null=True)
    resolved_by = models.CharField(max_length=255, default="")
    #: The id of the copy that was sent instead.
    replaced_by = models.UUIDField(null=True)
    #: The last bulk operation that redelivered, discarded or restored it.
    operation = models.BigIntegerField(null=True)

    objects = DeadLetterManager()

    class Meta:
        permissions = [
            ("redeliver_deadletter", "Can redeliver dead letters"),
            ("edit_deadletter", "Can redeliver an edited copy of a dead letter"),
            ("discard_deadletter", "Can discard and restore dead letters"),
            ("export_deadletter", "Can export dead letters, without bodies"),
            ("view_message_body", "Can view message bodies"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(resolution="open") | Q(resolved_at__isnull=False),
                name="txmsg_dead_letter_resolved_when",
            )
        ]
        indexes = [
            models.Index(fields=["message_id", "stage"], name="txmsg_dead_message"),
            # Lists show the newest first.
            models.Index(
                fields=["id"], condition=Q(resolution="open"), name="txmsg_dead_open"
            ),
            models.Index(
                fields=["resolution", "id"],
                condition=~Q(resolution="open"),
                name="txmsg_dead_resolved",
            ),
            models.Index(
                fields=["id"], condition=Q(deaths__gt=1), name="txmsg_dead_again"
            ),
            # A redelivery counts its messages that have died again.
            models.Index(
                fields=["operation"],
                condition=Q(operation__isnull=False, resolution="open"),
                name="txmsg_dead_operation",
            ),
            # Only this index is read for groups and counts, never the bodies.
            models.Index(
                fields=[
                    "fingerprint",
                    "id",
                    "stage",
                    "destination",
                    "reason",
                    "created_at",
                    "deaths",
                ],
                condition=Q(resolution="open"),
                name="txmsg_dead_groups",
            ),
            not_blank("correlation_id", "txmsg_dead_correlation"),
            # The first of each error is found by one entry.
            models.Index(fields=["fingerprint", "created_at"], name="txmsg_dead_error"),
            models.Index(MessageKey("headers"), name="txmsg_dead_key"),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} ({self.reason})"

    @property
    def asks(self) -> bool:
        """Whether it is a request whose requester gets `Dead` if it is discarded."""
        return wire.is_request(self.headers) and wire.UNDOES not in self.headers

    @property
    def given_up(self) -> bool:
        """Whether the requester got `Dead` before a stage had received the request. No
        inbox row records that answer."""
        dead = self.resolution == Resolution.DISCARDED or self.reason == "rejected"
        return not self.stage and self.asks and dead
