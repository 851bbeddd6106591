"""Business rows of the tests: orders that views write, and effects that handlers
record."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """Business data stored together with a message."""

    number = models.CharField(max_length=40, unique=True)
    total = models.DecimalField(max_digits=12, decimal_places=2, default=0)
    note = models.TextField(blank=True, default="")

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.number


class Effect(models.Model):
    """One effect of one message. No column is unique, so that a double effect shows."""

    name = models.CharField(max_length=100, db_index=True)
    message_id = models.CharField(max_length=64, db_index=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.name} {self.message_id}"
