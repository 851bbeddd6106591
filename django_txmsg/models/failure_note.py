"""An operator's note about an error, for all dead letters with its fingerprint.

A muted error is known and awaits its fix: its dead letters stay and can be redelivered
as before, but the overview and the alarms do not count them.
"""

from __future__ import annotations

import datetime as dt

from django.db import models, router, transaction
from django.db.models.functions import Now

from ..errors import TxmsgError
from .dead_letter import DeadLetter
from .fields import Later


class FailureNoteManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The only way to change notes."""

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
        """Store a note, and whether its error is muted. None leaves a value unchanged.

        A mute ends after `duration`, by the database's clock; None means never. It does
        not apply while more than `above` dead letters of the error are open.
        `seen` is the `version` of the note that the operator read. Raises TxmsgError
        if another one has been written since, for a muted error without a note that
        gives the reason, and for a fingerprint that no dead letter has.
        """
        using = self._db or router.db_for_write(self.model)
        notes = self.using(using)
        with transaction.atomic(using=using):
            known = notes.filter(fingerprint=fingerprint).exists()
            letters = DeadLetter.objects.using(using).filter(fingerprint=fingerprint)
            if not known and not letters.exists():
                raise TxmsgError(f"No dead letter has the fingerprint {fingerprint!r}.")
            notes.get_or_create(fingerprint=fingerprint[:64])
            row: FailureNote = notes.select_for_update().get(
                fingerprint=fingerprint[:64]
            )
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
    """What an operator found out about an error: a ticket, a cause, a plan."""

    id = models.BigAutoField(primary_key=True)
    fingerprint = models.CharField(max_length=64, unique=True)
    note = models.TextField(default="", blank=True)
    muted = models.BooleanField(default=False)
    muted_until = models.DateTimeField(
        null=True, blank=True, help_text="When the mute ends; empty: never."
    )
    muted_above = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="The mute does not apply while more dead letters are open.",
    )
    noted_by = models.CharField(max_length=255, default="", blank=True)
    noted_at = models.DateTimeField(db_default=Now())

    objects = FailureNoteManager()

    def __str__(self) -> str:
        return self.note.partition("\n")[0] or self.fingerprint

    @property
    def version(self) -> str:
        """A value that differs between versions of the note; "" without a note."""
        return f"{self.noted_at.timestamp():.6f}" if self.noted_by else ""
