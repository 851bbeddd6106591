"""Removes what a test has declared or counted from this process."""

from __future__ import annotations

from django_txmsg.envelope import message_type
from django_txmsg.flows import declaration
from django_txmsg.monitoring import periods
from django_txmsg.scheduling import timetable


def forget_recurring(name: str) -> None:
    """Remove the declared recurring message with this name."""
    timetable._declared.pop(name, None)


def forget_flow(name: str) -> None:
    """Remove a flow."""
    declaration._declared.pop(name, None)


def forget_upgraders(name: str) -> None:
    """Remove the upgraders of a type."""
    for key in [key for key in message_type._upgraders if key[0] == name]:
        del message_type._upgraders[key]


def forget_counts() -> None:
    """Clear this process's cache of counts."""
    periods._unstored.clear()
