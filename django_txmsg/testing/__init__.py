"""For the tests of projects: `drain()`, and a STOMP broker that follows a script.

Names resolve lazily, and the broker needs no Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .answering import answers
    from .draining import Drained, drain, embedded, outbox_messages
    from .profiles import ARTEMIS, CLASSIC, RABBITMQ, Profile
    from .record import ReceivedFrame
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

_HOME = {
    "ARTEMIS": "profiles",
    "CLASSIC": "profiles",
    "RABBITMQ": "profiles",
    "Drained": "draining",
    "Profile": "profiles",
    "ReceivedFrame": "record",
    "ScriptedBroker": "scripted_broker",
    "answers": "answering",
    "drain": "draining",
    "embedded": "draining",
    "outbox_messages": "draining",
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
