"""Names of destinations with a special meaning: topics, control messages, tasks."""

from __future__ import annotations

TOPIC_PREFIX = "topic:"

_CONTROL = ".txmsg.control"
#: The part of a destination that marks tasks.
OF_TASKS = ".tasks."


def control_destination(service: str) -> str:
    """Return the destination of a service's control messages to itself."""
    return f"{service}{_CONTROL}"


def is_control(destination: str) -> bool:
    """Return whether this is the destination of a service's control messages."""
    return destination.endswith(_CONTROL)


def task_destination(service: str, backend: str) -> str:
    """Return the destination of a backend's tasks. With a queue name appended, it is
    the destination of that queue."""
    return f"{service}{OF_TASKS}{backend}"


def is_task(destination: str) -> bool:
    """Return whether this is a destination of tasks."""
    return OF_TASKS in destination


def is_topic(destination: str) -> bool:
    """Return whether this is a topic, whose messages go to every subscriber."""
    return destination.startswith(TOPIC_PREFIX)
