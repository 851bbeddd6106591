"""How many messages were stored, dispatched, processed and buried in five minutes.

Written once a period has ended, so that showing a day does not count it again.
"""

from __future__ import annotations

import datetime as dt

from django.db import models

#: The length of a period.
PERIOD = dt.timedelta(minutes=5)


class PeriodCount(models.Model):
    """One finished period of one series."""

    id = models.BigAutoField(primary_key=True)
    start = models.DateTimeField()
    series = models.CharField(max_length=16)
    count = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["start", "series"], name="txmsg_period_count"
            )
        ]

    def __str__(self) -> str:
        return f"{self.count} {self.series} from {self.start:%Y-%m-%d %H:%M}"
