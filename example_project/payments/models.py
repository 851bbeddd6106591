"""Payments taken. It knows an order by its number only."""

from __future__ import annotations

from django.db import models


class Payment(models.Model):
    """Money for one order. Not unique: a customer charged twice must show."""

    order = models.CharField(max_length=16, db_index=True)
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    paid_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.order}"
