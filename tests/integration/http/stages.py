"""The receiver of the orders' messages: one effect for each message, duplicates
included."""

from __future__ import annotations

from django_txmsg import Message, stage
from tests.app.models import Effect

from .urls import orders


@stage(orders())
def note(message: Message) -> None:
    """Have an effect."""
    name = f"{message.body['order']}:{message.body['part']}"
    Effect.objects.create(name=name, message_id=str(message.id))
