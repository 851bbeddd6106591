"""How many messages were stored, dispatched, processed and buried in five minutes, at
each destination and stage.

Written once a period has ended, so that showing a day does not count it again.
"""

from __future__ import annotations

import datetime as dt

from django.db import models

#: The length of a period.
PERIOD = dt.timedelta(minutes=5)


class PeriodCount(models.Model):
    """One finished period of one series at one place."""

    id = models.BigAutoField(primary_key=True)
    start = models.DateTimeField()
    series = models.CharField(max_length=16)
    place = models.CharField(
        max_length=255,
        default="",
        db_default="",
        help_text="The destination or stage; empty: marks the period as counted.",
    )
    count = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["start", "series", "place"], name="txmsg_period_count"
            )
        ]

    def __str__(self) -> str:
        return f"{self.count} {self.series} from {self.start:%Y-%m-%d %H:%M}"
