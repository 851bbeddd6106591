"""The messages that the app `shipping` receives."""

from __future__ import annotations

from dataclasses import dataclass

from django_txmsg import Destination, message_type


@message_type("shipping.Ship")
@dataclass
class Ship:
    """Send the parcel of an order."""

    order: str


@message_type("shipping.Reserve")
@dataclass
class Reserve:
    """Keep goods for a checkout, or put them back."""

    order: str
    item: str
    quantity: int


@message_type("shipping.Reserved")
@dataclass
class Reserved:
    """The products are reserved on this shelf."""

    shelf: str


reserve_goods = Destination("shipping.reserve", Reserve, reply=Reserved)
release_goods = Destination("shipping.release", Reserve)
ship_parcel = Destination("shipping.ship", Ship)
