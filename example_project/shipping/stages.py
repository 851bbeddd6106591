"""What shipping does with messages: it sends the parcel and says so."""

from __future__ import annotations

from orders.messages import Shipped, order_shipped

from django_txmsg import Message, stage

from .messages import Ship, ship_parcel
from .models import Parcel


@stage(ship_parcel)
def ship(asked: Ship, message: Message) -> None:
    """Send the parcel."""
    order = asked.order
    # Made from the message's id, the code is the same in every attempt.
    parcel = Parcel.objects.create(
        order=order, tracking_code=f"P{message.id.hex[-8:].upper()}"
    )
    order_shipped.send(Shipped(order, parcel.tracking_code), key=order)
