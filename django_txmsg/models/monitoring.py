"""Records about the operation of the service: alerts, counts of finished periods, and
the actions of operators."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection, Iterable
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from .. import rules
from .bulk_operation import BulkOperation
from .fields import Holds, Later

# What was wrong, from when to when, and whether it was reported.
#
# A problem has one row for each time that it occurs. Rows without an end are open.

#: Seconds for which one process has the delivery of an alert. Then it is tried again.
LEASE = 60.0
#: How long the end of an alert is tried.
TRIED = dt.timedelta(days=1)
#: How long ended alerts are kept.
KEPT = dt.timedelta(days=90)


class AlertManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Changes the states of alerts. If several processes try the same change, only one
    succeeds."""

    def begin(self, service: str, name: str, kind: str, text: str) -> bool:
        """Open an alert. Returns False if the alert is open already. Also deletes
        alerts that ended long ago."""
        self.filter(ended_at__lt=Later(-KEPT.total_seconds())).delete()
        open_alert = {"service": service, "name": name[:255], "ended_at": None}
        values = {"kind": kind, "text": text[:2000]}
        _, begun = self.get_or_create(**open_alert, defaults=values)
        return bool(begun)

    def end(self, pk: int) -> bool:
        """End an open alert. Returns False if the alert has ended already."""
        ended = self.filter(pk=pk, ended_at=None).update(
            ended_at=Now(), lease_until=None
        )
        return bool(ended)

    def undelivered(self, services: Collection[str]) -> Iterable[Alert]:
        """Return the alerts of these services whose start or end has yet to be
        delivered, including those that a process is delivering now. If an alert ends
        before all receivers got its start, they all get its end: some may have got the
        start. Alerts that were not tried come first, open ones before ended ones."""
        begun = Q(ended_at=None, delivered="")
        ended = Q(ended_at__gt=Later(-TRIED.total_seconds())) & ~Q(delivered="resolved")
        rows: Any = self.filter(begun | ended, service__in=services)
        order = (F(name).asc(nulls_first=True) for name in ("lease_until", "ended_at"))
        return list(rows.order_by(*order, "pk"))

    def claim(self, alert: Alert) -> bool:
        """Reserve the delivery of an alert for LEASE seconds. Returns False if another
        process has reserved it."""
        free = Holds(rules.NOT_LEASED, now=Now())
        claimed = self.filter(free, pk=alert.pk, delivered=alert.delivered).update(
            lease_until=Later(LEASE)
        )
        return bool(claimed)

    def delivered(self, alert: Alert) -> None:
        """Record that the present state of this alert was delivered."""
        self.filter(pk=alert.pk).update(delivered=alert.status, lease_until=None)


class Alert(models.Model):
    """One occurrence of a problem. The alert's name says what kind of problem it is,
    and where it occurs."""

    service = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    kind = models.CharField(max_length=32)
    text = models.TextField(default="")
    since = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    delivered = models.CharField(
        max_length=16, default="", help_text="What its receivers know."
    )
    lease_until = models.DateTimeField(null=True)

    objects = AlertManager()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["service", "name"],
                condition=Q(ended_at__isnull=True),
                name="txmsg_alert_open",
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.service}"

    @property
    def status(self) -> str:
        """The state: firing or resolved."""
        return "firing" if self.ended_at is None else "resolved"


# How many messages were stored, dispatched, processed and buried in five minutes, at
# each destination and stage.
#
# Written once a period has ended, so that showing a day does not count it again.

#: The length of a period.
PERIOD = dt.timedelta(minutes=5)


class PeriodCount(models.Model):
    """The count of one series, for example "processed", at one destination or stage in
    one finished period."""

    start = models.DateTimeField()
    series = models.CharField(max_length=16)
    #: The destination or stage; empty: marks the period as counted.
    place = models.CharField(max_length=255, default="", db_default="")
    count = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["start", "series", "place"], name="txmsg_period_count"
            )
        ]

    def __str__(self) -> str:
        return f"{self.count} {self.series} from {self.start:%Y-%m-%d %H:%M}"


# Actions of operators, by page or command, recorded in the transaction of the action.

log = logging.getLogger("django_txmsg.audit")


class Deed(models.TextChoices):
    """What an operator did."""

    REDELIVER = "redeliver"
    DISCARD = "discard"
    RESTORE = "restore"
    GO_BACK = "go-back"
    OPERATION = "bulk-operation"
    COPY = "copy"
    NOTE = "note"
    PAUSE = "pause"
    RESUME = "resume"
    LIMIT = "change-rate"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    STOP = "stop"
    MAKE = "make-recurring"
    REMOVE = "remove-recurring"
    RUN = "act-on-run"
    LET_GO = "let-go"
    BURY = "bury"
    UNSUBSCRIBE = "unsubscribe"
    ACKNOWLEDGE = "acknowledge"
    REOPEN = "reopen"
    REPLAY = "replay"
    EXPORT = "export"
    DELETE = "delete-key"
    DEPLOY = "deploy"


#: What an operator has done: the changed row, and the deed and the text of the entry.
Done = tuple[models.Model, Deed, str]


class AuditManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Records the actions of operators. Only this class creates entries."""

    def record(
        self,
        by: str,
        text: str,
        *,
        deed: Deed,
        count: int | None = 1,
        operation: BulkOperation | None = None,
    ) -> None:
        """Record an action. Call this in the transaction of the action, in the same
        database. When the transaction commits, the action is also logged, for systems
        that collect logs.

        `count` is how many messages, stages or other rows the operator was shown, or
        None if they were not counted. For a bulk `operation`, the operation's total is
        recorded instead.
        """
        self.create(
            by=by[:255],
            deed=deed.value,
            text=text.replace("\x00", "")[:4000],  # PostgreSQL stores no NUL
            count=count if operation is None else operation.total,
            operation=operation,
        )

        def tell() -> None:
            log.info("%s: %s", by, text)

        transaction.on_commit(tell, using=self.db, robust=True)


class AuditEntry(models.Model):
    """One action of one operator, or the first start of a version of a service.

    `by` is a user of the admin or "command: USER". For the start of a version, `by` is
    "service: NAME".
    """

    at = models.DateTimeField(db_default=Now())
    by = models.CharField(max_length=255)
    deed = models.CharField(max_length=16)
    text = models.TextField()
    count = models.BigIntegerField(
        null=True, help_text="How many the operator was shown."
    )
    operation = models.ForeignKey(
        "BulkOperation",
        on_delete=models.SET_NULL,
        null=True,
        related_name="+",
        help_text="The bulk operation, which counts how many are done.",
    )

    objects = AuditManager()

    class Meta:
        verbose_name_plural = "audit entries"
        indexes = [models.Index(fields=["at"], name="txmsg_audit_at")]

    def __str__(self) -> str:
        return self.text

    @property
    def done(self) -> int | None:
        """The number of rows that the action has changed so far. An action without a
        bulk operation changed all its rows at once, so this number is `count`."""
        operation: Any = self.operation
        return self.count if operation is None else int(operation.done)
