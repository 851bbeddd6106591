"""The stage of the app `orders`. It records that a parcel is on its way."""

from __future__ import annotations

from django_txmsg import stage

from .flows import Checkout as Checkout  # declares its stages
from .messages import Shipped, order_shipped
from .models import Order


@stage(order_shipped)
def note_shipment(parcel: Shipped) -> None:
    """Record that the order was shipped."""
    Order.objects.filter(number=parcel.order).update(
        status=Order.Status.SHIPPED, tracking_code=parcel.tracking_code
    )
