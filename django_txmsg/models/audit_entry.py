"""Actions of operators, by page or command, recorded in the transaction of the
action."""

from __future__ import annotations

import logging

from django.db import models, transaction
from django.db.models.functions import Now

log = logging.getLogger("django_txmsg.audit")


class AuditManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The only way to create entries."""

    def record(self, by: str, text: str) -> None:
        """Record an action. Call it in the transaction of the action, in its database.
        It is also logged when the transaction commits, for systems that collect
        logs."""
        # PostgreSQL stores no NUL.
        self.create(by=by[:255], text=text.replace("\x00", "")[:4000])

        def tell() -> None:
            log.info("%s: %s", by, text)

        transaction.on_commit(tell, using=self.db, robust=True)


class AuditEntry(models.Model):
    """One action of one operator. `by` is a user of the admin, or "command: USER"."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_default=Now())
    by = models.CharField(max_length=255)
    text = models.TextField()

    objects = AuditManager()

    class Meta:
        verbose_name = "audit entry"
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return self.text
