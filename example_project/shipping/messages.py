"""What shipping takes."""

from __future__ import annotations

from dataclasses import dataclass

from django_txmsg import Destination, message_type


@message_type("shipping.Ship")
@dataclass
class Ship:
    """Send the parcel of an order."""

    order: str


ship_parcel = Destination("shipping.ship", Ship)
