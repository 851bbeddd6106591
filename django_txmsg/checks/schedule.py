"""Checks that recurring messages can be stored, before a relay fails at a tick."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage, Error

from .. import conf
from ..envelope.message import check_duration, check_headers, check_key
from ..errors import TxmsgError
from ..monitoring import databases
from ..scheduling.timetable import Recurring, recurring
from ..sending.outbox import encoded
from ..sending.unique import check_recorded, check_until


def check() -> list[CheckMessage]:
    """Return which recurring messages could not be stored."""
    return [error for one in recurring() for error in _check(one)]


def _check(one: Recurring) -> Iterator[CheckMessage]:
    known = conf.get().BROKERS
    if one.broker not in known:
        why = f"its broker {one.broker!r} is not in TXMSG['BROKERS']"
    elif one.alias not in databases.with_tables():
        why = f"the router keeps the tables out of database {one.alias!r}"
    else:
        try:
            assert encoded(one.destination, one.body)
            assert one.cron
            check_headers(one.headers)
            check_key(one.key)
            check_duration("expires", one.expires)
            check_key(one.unique)
            check_until(one.unique, one.unique_until)
            if one.unique_until == "processed":
                check_recorded(str(one.destination), one.broker, one.alias)
            return
        except TxmsgError as error:
            why = str(error)
    yield Error(
        f"The recurring message {one.name!r} cannot be stored: {why}",
        hint='Correct its every(), or its entry in TXMSG["SCHEDULE"].',
        id="txmsg.E050",
    )
