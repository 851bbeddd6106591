"""Transactional messaging for Django: the public names, resolved lazily.

Importing this package imports no Django, so it works before the app registry is ready
and where Django is absent, as on a Spark executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy_imports import lazy_names

if TYPE_CHECKING:
    from .envelope.message import Message
    from .envelope.message_type import message_type, upgrade
    from .envelope.redelivery import RedeliveryPolicy
    from .errors import Redeliver, Refuse
    from .http_outbox.session import outbox_session
    from .middleware import no_outbox
    from .scheduling.timetable import every, make_recurring, remove_recurring
    from .sending.destination import Destination
    from .sending.outbox import send_message, send_messages
    from .sending.pending import cancel_message, reschedule_message
    from .stages import stage

__version__ = "0.1.0"

__all__ = [
    "Destination",
    "Message",
    "Redeliver",
    "RedeliveryPolicy",
    "Refuse",
    "cancel_message",
    "every",
    "make_recurring",
    "message_type",
    "no_outbox",
    "outbox_session",
    "remove_recurring",
    "reschedule_message",
    "send_message",
    "send_messages",
    "stage",
    "upgrade",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Destination": ".sending.destination",
        "Message": ".envelope.message",
        "Redeliver": ".errors",
        "RedeliveryPolicy": ".envelope.redelivery",
        "Refuse": ".errors",
        "cancel_message": ".sending.pending",
        "every": ".scheduling.timetable",
        "make_recurring": ".scheduling.timetable",
        "message_type": ".envelope.message_type",
        "no_outbox": ".middleware",
        "outbox_session": ".http_outbox.session",
        "remove_recurring": ".scheduling.timetable",
        "reschedule_message": ".sending.pending",
        "send_message": ".sending.outbox",
        "send_messages": ".sending.outbox",
        "stage": ".stages",
        "upgrade": ".envelope.message_type",
    },
)
