"""Helpers for the tests of projects: `drain()`, and a STOMP broker that follows a
script.

This package imports each of its names on first use, so the STOMP broker can be used
without Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_imports import lazy_names

if TYPE_CHECKING:
    from .broker_state import ReceivedFrame
    from .draining import Drained, answers, drain, embedded, outbox_messages
    from .profiles import ARTEMIS, CLASSIC, RABBITMQ, Profile
    from .scripted_broker import ScriptedBroker

__all__ = [
    "ARTEMIS",
    "CLASSIC",
    "RABBITMQ",
    "Drained",
    "Profile",
    "ReceivedFrame",
    "ScriptedBroker",
    "answers",
    "drain",
    "embedded",
    "outbox_messages",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".draining": __all__,
        ".broker_state": ["ReceivedFrame"],
        ".profiles": ["ARTEMIS", "CLASSIC", "RABBITMQ", "Profile"],
        ".scripted_broker": ["ScriptedBroker"],
    },
)
