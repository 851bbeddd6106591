"""What payments takes."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from django_txmsg import Destination, message_type


@message_type("payments.Charge")
@dataclass
class Charge:
    """Take the money for an order."""

    order: str
    amount: Decimal
    fails: bool = False
    """On purpose, for the demonstration."""


charge_payment = Destination("payments.charge", Charge)
