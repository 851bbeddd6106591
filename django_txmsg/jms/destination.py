"""A destination on a broker: a queue or a topic.

Only this module and a ``Dialect`` distinguish queues from topics. Other modules pass a
destination as text: ``orders.place`` for a queue, ``topic:orders.placed`` for a topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .. import wire
from .errors import InvalidDestinationError


@dataclass(frozen=True, slots=True)
class Destination:
    """The name of a queue or topic on a broker."""

    name: str
    is_topic: bool = False

    def __str__(self) -> str:
        """Return the destination as text that ``parse`` can read."""
        return f"{wire.TOPIC_PREFIX}{self.name}" if self.is_topic else self.name


class Queue(Destination):
    """A destination where each message goes to one consumer."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        """Create a queue with this name."""
        super().__init__(name, is_topic=False)


class Topic(Destination):
    """A destination where each message goes to every subscription."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        """Create a topic with this name."""
        super().__init__(name, is_topic=True)


def parse(destination: str | Destination | None) -> Destination:
    """Read ``orders.place``, ``topic:orders.placed``, ``/queue/x`` or ``/topic/x``.

    Raises ``InvalidDestinationError`` if the destination is missing, empty or not text.
    The dialect checks later whether the broker allows the name.
    """
    if isinstance(destination, Destination):
        found = Destination(destination.name, destination.is_topic)
        return _checked(found, destination)
    if not isinstance(destination, str):
        raise InvalidDestinationError(
            f"A destination is a name such as 'orders.place', not {destination!r}."
        )
    return _named(destination)


@lru_cache(1000)
def _named(destination: str) -> Destination:
    if wire.is_topic(destination):
        name = destination.removeprefix(wire.TOPIC_PREFIX).removeprefix("/")
        found = Destination(name, is_topic=True)
    elif destination.startswith("/topic/"):
        found = Destination(destination.removeprefix("/topic/"), is_topic=True)
    else:
        found = Destination(destination.removeprefix("/queue/"))
    return _checked(found, destination)


def _checked(found: Destination, destination: str | Destination) -> Destination:
    name = found.name
    if not name or name != name.strip(" /") or not name.isprintable():
        raise InvalidDestinationError(
            f"Destination {destination!r} is malformed: a name has no surrounding "
            "spaces or slashes, no control characters, and at least one letter."
        )
    return found
