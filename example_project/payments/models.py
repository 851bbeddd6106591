"""The payments. A payment refers to its order by the order's number."""

from __future__ import annotations

from django.db import models


class Payment(models.Model):
    """The payment for an order. The order's number is not unique here, so that a double
    charge would be visible."""

    order = models.CharField(max_length=16, db_index=True)
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    paid_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.order}"
