"""The messages that the app `payments` receives."""

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


@message_type("payments.Take")
@dataclass
class Take:
    """Take the money for a checkout, or give it back."""

    order: str
    amount: Decimal


@message_type("payments.Taken")
@dataclass
class Taken:
    """The payment was taken."""

    order: str


take_payment = Destination("payments.take", Take, reply=Taken)
refund_payment = Destination("payments.refund", Take)
charge_payment = Destination("payments.charge", Charge)
