"""The messages that the app `orders` receives."""

from __future__ import annotations

from dataclasses import dataclass

from django_txmsg import Destination, message_type


@message_type("orders.Shipped")
@dataclass
class Shipped:
    """The parcel of an order is on its way."""

    order: str
    tracking_code: str


order_shipped = Destination("orders.shipped", Shipped)
