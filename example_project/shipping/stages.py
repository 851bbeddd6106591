"""The stages of the app `shipping`. They reserve goods, send parcels, and report each
sent parcel."""

from __future__ import annotations

from orders.messages import Shipped, order_shipped

from django_txmsg import Message, stage

from .messages import (
    Reserve,
    Reserved,
    Ship,
    release_goods,
    reserve_goods,
    ship_parcel,
)
from .models import Parcel, Reservation


@stage(ship_parcel)
def ship(asked: Ship, message: Message) -> None:
    """Store the parcel of an order, and report it."""
    order = asked.order
    # Made from the message's id, the code is the same in every attempt.
    parcel = Parcel.objects.create(
        order=order, tracking_code=f"P{message.id.hex[-8:].upper()}"
    )
    order_shipped.send(Shipped(order, parcel.tracking_code), key=order)


@stage(reserve_goods)
def reserve(asked: Reserve) -> Reserved:
    """Reserve the goods, and return their shelf."""
    kept = Reservation.objects.create(
        order=asked.order, item=asked.item, quantity=asked.quantity
    )
    return Reserved(shelf=f"A{kept.pk}")


@stage(release_goods, undoes=reserve_goods)
def release(asked: Reserve) -> None:
    """Cancel the reservation of the goods."""
    Reservation.objects.filter(order=asked.order).delete()
