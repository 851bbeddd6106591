"""The shop's products, its orders, and the approvals that they wait for."""

from __future__ import annotations

import secrets
from decimal import Decimal

from django.db import models

PRICES = {
    "Bag of coffee": Decimal("14.50"),
    "Pot of honey": Decimal("8.90"),
    "Box of tea": Decimal("11.20"),
}


def new_number() -> str:
    """Return an order number that is easy to read out."""
    return secrets.token_hex(4).upper()


class Order(models.Model):
    """One order. The transaction that stores it also stores the message that requests
    its payment."""

    class Status(models.TextChoices):
        PLACED = "placed", "placed"
        SHIPPED = "shipped", "shipped"
        ACCEPTED = "accepted", "accepted"
        REFUSED = "refused", "refused"

    number = models.CharField(max_length=16, unique=True, default=new_number)
    item = models.CharField(max_length=80, choices=[(one, one) for one in PRICES])
    quantity = models.PositiveSmallIntegerField(default=1)
    total = models.DecimalField(max_digits=9, decimal_places=2)
    status = models.CharField(
        max_length=16, choices=Status.choices, default=Status.PLACED
    )
    tracking_code = models.CharField(max_length=16, default="", blank=True)
    placed_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-placed_at"]

    def __str__(self) -> str:
        return self.number


class Approval(models.Model):
    """An order that waits for approval. Anyone who has the token can continue the
    order's flow."""

    order = models.CharField(max_length=16, unique=True)
    token = models.CharField(max_length=80)

    def __str__(self) -> str:
        return self.order
