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
        ".envelope.message": ["Message"],
        ".envelope.message_type": ["message_type", "upgrade"],
        ".envelope.redelivery": ["RedeliveryPolicy"],
        ".errors": ["Redeliver", "Refuse"],
        ".http_outbox.session": ["outbox_session"],
        ".middleware": ["no_outbox"],
        ".scheduling.timetable": ["every", "make_recurring", "remove_recurring"],
        ".sending.destination": ["Destination"],
        ".sending.outbox": ["send_message", "send_messages"],
        ".sending.pending": ["cancel_message", "reschedule_message"],
        ".stages": ["stage"],
    },
)
