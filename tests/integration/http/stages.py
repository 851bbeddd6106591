"""The stage that receives the orders' messages. It records one effect for each message
that it processes."""

from __future__ import annotations

from django_txmsg import Message, stage
from tests.app.models import Effect

from .urls import orders


@stage(orders())
def note(message: Message) -> None:
    """Record an effect of the message."""
    name = f"{message.body['order']}:{message.body['part']}"
    Effect.objects.create(name=name, message_id=str(message.id))
