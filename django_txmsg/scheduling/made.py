"""Recurring messages that code, an admin page or a command creates at run time.

Each such message is a row of `Schedule`, whose column `made` contains the arguments. A
message that `every()` or the settings declare under the same name takes precedence.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import router

from .. import conf, wire
from ..envelope import serializers
from ..errors import InvalidMessage
from ..models import Schedule
from ..models.outbox_store import UniqueUntil
from .timetable import Missed, Recurring, recurring

log = logging.getLogger("django_txmsg.timekeeper")

_NAMES = {one.name for one in dataclasses.fields(Recurring)} - {"name", "using"}


def make_recurring(
    name: str,
    expression: str,
    destination: str,
    body: object = None,
    *,
    tz: str | None = None,
    missed: Missed | None = None,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    expires: dt.timedelta | None = None,
    broker: str = "default",
    unique: str | None = None,
    unique_until: UniqueUntil = "left",
) -> None:
    """Create a recurring message, or change the message that was created with this
    name. Messages are stored only for ticks after this call.

    The recurring message is a row, inserted in the open transaction if there is one.
    Relays read the row within a minute. `missed` says what they do about the ticks that
    have passed by then. The arguments are the same as for `every()`. The body must be
    JSON.

    Raises ConfigurationError for an invalid expression, time zone or name. Raises
    InvalidMessage if the message cannot be sent, or if the project's code or settings
    declare this name.
    """
    if any(one.name == name for one in recurring()):
        raise InvalidMessage(
            f"The recurring message {name!r} is declared by every() or in "
            f'TXMSG["SCHEDULE"]. Change it there, or give this one another name.'
        )
    content, content_type = serializers.encode(body)
    if content_type != wire.JSON:
        raise InvalidMessage(f"The body of {name!r} is not JSON, but {content_type}.")
    one = Recurring(
        name=name,
        expression=expression,
        destination=destination,
        body=json.loads(content),
        tz=tz,
        missed=missed,
        headers=headers,
        key=key,
        expires=expires,
        broker=broker,
        unique=unique,
        unique_until=unique_until,
    )
    one.check()
    given = {name: getattr(one, name) for name in _NAMES}
    given |= {
        "headers": dict(headers or {}),
        "expires": None if expires is None else expires.total_seconds(),
    }
    _rows().make(conf.get().SERVICE, name, given, str(one.cron))


def said(name: str, expression: str, destination: str) -> str:
    """Return the text for the audit log about the creation of a recurring message."""
    return f"Made recurring message {name}: {expression} to {destination}."


def remove_recurring(name: str) -> bool:
    """Remove a recurring message that was created at run time. Return False if no
    message has this name."""
    return bool(_rows().unmake(conf.get().SERVICE, name))


def _rows() -> Any:
    return Schedule.objects.db_manager(router.db_for_write(Schedule))


def read(rows: Iterable[Schedule]) -> dict[str, Recurring]:
    """Return, by name, those recurring messages in these rows that were created at run
    time. A row that this code cannot read is logged and skipped."""
    declared = {one.name for one in recurring()}
    found: dict[str, Recurring] = {}
    for row in rows:
        if row.made is None or row.name in declared:
            continue
        given = {name: value for name, value in row.made.items() if name in _NAMES}
        seconds = given.get("expires")
        given["expires"] = None if seconds is None else dt.timedelta(seconds=seconds)
        try:
            one = Recurring(name=row.name, using=row._state.db, **given)
            assert one.cron
        except Exception:
            log.exception("recurring message %r cannot be read from its row", row.name)
        else:
            found[row.name] = one
    return found
