"""The names of destinations that mean something: topics, control messages, tasks."""

from __future__ import annotations

TOPIC_PREFIX = "topic:"

_CONTROL = ".txmsg.control"
#: In the destinations of tasks.
OF_TASKS = ".tasks."


def control_destination(service: str) -> str:
    """Return the destination of a service's control messages to itself."""
    return f"{service}{_CONTROL}"


def is_control(destination: str) -> bool:
    """Return whether a service receives its control messages there."""
    return destination.endswith(_CONTROL)


def task_destination(service: str, backend: str) -> str:
    """Return the destination of a backend's tasks, or what those of its queues begin
    with."""
    return f"{service}{OF_TASKS}{backend}"


def is_task(destination: str) -> bool:
    """Return whether tasks go there."""
    return OF_TASKS in destination


def is_topic(destination: str) -> bool:
    """Return whether every subscriber gets what is sent there."""
    return destination.startswith(TOPIC_PREFIX)
