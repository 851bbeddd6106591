"""The parcels, and the reserved goods."""

from __future__ import annotations

from django.db import models


class Parcel(models.Model):
    """The parcel of one order."""

    order = models.CharField(max_length=16, db_index=True)
    tracking_code = models.CharField(max_length=16)
    sent_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.tracking_code


class Reservation(models.Model):
    """The reserved goods of one checkout."""

    order = models.CharField(max_length=16, db_index=True)
    item = models.CharField(max_length=80)
    quantity = models.PositiveSmallIntegerField()

    def __str__(self) -> str:
        return f"{self.quantity} {self.item} for {self.order}"
