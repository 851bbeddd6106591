"""What shipping does with messages: it sends the parcel and says so."""

from __future__ import annotations

from django_txmsg import Message, send_message, stage

from .models import Parcel


@stage("shipping.ship")
def ship(message: Message) -> None:
    """Send the parcel."""
    order = message.body["order"]
    # Made from the message's id, the code is the same in every attempt.
    parcel = Parcel.objects.create(
        order=order, tracking_code=f"P{message.id.hex[-8:].upper()}"
    )
    send_message(
        "orders.shipped",
        {"order": order, "tracking_code": parcel.tracking_code},
        key=order,
    )
