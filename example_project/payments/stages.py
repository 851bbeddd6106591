"""The stages of the app `payments`. They charge the customer, and request the
parcel."""

from __future__ import annotations

from shipping.messages import Ship, ship_parcel

from django_txmsg import RedeliveryPolicy, stage

from .messages import Charge, Take, Taken, charge_payment, refund_payment, take_payment
from .models import Payment


class GatewayDown(Exception):
    """The bank does not answer. Another attempt may succeed."""


@stage(
    charge_payment,
    # One payment of an order after the other; one that failed for good holds up what
    # else is to be charged for that order, until a person has looked at it.
    ordered="block",
    # Three attempts within seconds: a demonstration does not wait for minutes.
    redelivery=RedeliveryPolicy(max_redeliveries=2, initial_delay=0.3, jitter=0),
)
def charge(payment: Charge) -> None:
    """Store the payment and request the parcel. The payment, the inbox row and the next
    message are committed in one transaction."""
    order = payment.order
    Payment.objects.create(order=order, amount=payment.amount)
    if payment.fails:
        raise GatewayDown(f"the bank does not answer for order {order}")
    ship_parcel.send(Ship(order), key=order)


@stage(take_payment)
def take(asked: Take) -> Taken:
    """Store the payment of a checkout. The flow receives the returned value."""
    Payment.objects.create(order=asked.order, amount=asked.amount)
    return Taken(asked.order)


@stage(refund_payment, undoes=take_payment)
def refund(asked: Take) -> None:
    """Refund the payment of a checkout. `undoes` ensures that a refund happens at most
    once, and only if `take` took the payment."""
    Payment.objects.create(order=asked.order, amount=-asked.amount)
