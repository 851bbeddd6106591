"""What payments does with messages: it takes the money and asks for the parcel."""

from __future__ import annotations

from decimal import Decimal

from django_txmsg import Message, RedeliveryPolicy, send_message, stage

from .models import Payment


class GatewayDown(Exception):
    """The bank does not answer. Another attempt may succeed."""


@stage(
    "payments.charge",
    # Three attempts within seconds: a demonstration does not wait for minutes.
    redelivery=RedeliveryPolicy(max_redeliveries=2, initial_delay=0.3, jitter=0),
)
def charge(message: Message) -> None:
    """Take the payment. It, the inbox row and the next message are one transaction."""
    order = message.body["order"]
    Payment.objects.create(order=order, amount=Decimal(message.body["amount"]))
    if message.body.get("fails"):
        raise GatewayDown(f"the bank does not answer for order {order}")
    send_message("shipping.ship", {"order": order}, key=order)
