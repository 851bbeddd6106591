"""What orders does with messages: it learns that a parcel is on its way."""

from __future__ import annotations

from django_txmsg import Message, stage

from .models import Order


@stage("orders.shipped")
def note_shipment(message: Message) -> None:
    """Close the order."""
    Order.objects.filter(number=message.body["order"]).update(
        status=Order.Status.SHIPPED, tracking_code=message.body["tracking_code"]
    )
