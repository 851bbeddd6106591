"""Checks that recurring messages can be stored, before a relay fails at a tick."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage, Error

from ..errors import TxmsgError
from ..monitoring import databases
from ..scheduling.timetable import Recurring, recurring


def check() -> list[CheckMessage]:
    """Return which recurring messages could not be stored."""
    return [error for one in recurring() for error in _check(one)]


def _check(one: Recurring) -> Iterator[CheckMessage]:
    if one.alias not in databases.with_tables():
        why = f"the router keeps the tables out of database {one.alias!r}"
    else:
        try:
            one.check()
            return
        except TxmsgError as error:
            why = str(error)
    yield Error(
        f"The recurring message {one.name!r} cannot be stored: {why}",
        hint='Correct its every(), or its entry in TXMSG["SCHEDULE"].',
        id="txmsg.E050",
    )
