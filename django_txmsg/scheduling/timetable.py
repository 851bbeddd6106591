"""Which messages recur: declared by `every()` in `stages` modules, or by the settings.

Nothing here touches the database; `timekeeper.py` stores what is due.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from django.conf import settings as django_settings
from django.db import router

from .. import conf, wire
from ..envelope.cron import Cron
from ..envelope.message import MAX_NAME_LENGTH, check_destination
from ..errors import ConfigurationError
from ..models import Schedule
from ..sending.typed_name import TypedName

Missed = Literal["latest", "all"]

#: What the tables hold of a name.
#: The header that says for which tick a message is.
SCHEDULED_FOR = "scheduled-for"


@dataclass(frozen=True, kw_only=True)
class Recurring:
    """A message that is stored at each tick of its expression."""

    name: str
    expression: str
    destination: str | TypedName[Any]
    body: Any = None
    tz: str | None = None
    missed: Missed | None = None
    headers: Mapping[str, str] | None = None
    key: str | None = None
    expires: dt.timedelta | None = None
    using: str | None = None
    broker: str = "default"

    @property
    def cron(self) -> Cron:
        """When it is due. Raises ConfigurationError."""
        return Cron(self.expression, self.tz or django_settings.TIME_ZONE)

    @property
    def alias(self) -> str:
        """The database that it is stored in."""
        return self.using or router.db_for_write(Schedule)

    @property
    def makes_up_all(self) -> bool:
        """Whether every missed tick is made up for, and not the latest alone."""
        return (self.missed or conf.get().MISSED_TICKS) == "all"

    def message_id(self, tick: dt.datetime) -> uuid.UUID:
        """Return the id of the message for a tick, the same in every process."""
        return wire.tick_id(conf.get().SERVICE, self.name, tick)

    def arguments(self, tick: dt.datetime) -> dict[str, Any]:
        """Return what `send_message()` takes for a tick."""
        return {
            "destination": self.destination,
            "body": self.body,
            "headers": {**(self.headers or {}), SCHEDULED_FOR: tick.isoformat()},
            "message_id": self.message_id(tick),
            "key": self.key,
            "expires": self.expires,
            "using": self.alias,
            "broker": self.broker,
        }


_declared: dict[str, Recurring] = {}


def every(
    expression: str,
    destination: str | TypedName[Any],
    body: object = None,
    *,
    name: str | None = None,
    tz: str | None = None,
    missed: Missed | None = None,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    expires: dt.timedelta | None = None,
    using: str | None = None,
    broker: str = "default",
) -> Recurring:
    """Send a message at each tick of a cron expression, once over all processes.

    Call it in an app's `stages` module: `every("*/5 * * * *", "reports.refresh", {})`.
    `name` (default: the destination) is what ticks are counted by: keep it. `tz` is the
    time zone of the expression, by default settings.TIME_ZONE. `missed`: of the ticks
    that no relay was there for, send "latest" or "all" (default:
    TXMSG["MISSED_TICKS"]). The header `scheduled-for` says which tick it is. Everything
    else is as for `send_message()`.

    Raises ConfigurationError for an expression or time zone that is none, and for a
    name that is taken; InvalidMessage for a destination's name.
    """
    check_destination(str(destination))
    found = Recurring(
        name=name or str(destination),
        expression=expression,
        destination=destination,
        body=body,
        tz=tz,
        missed=missed,
        headers=headers,
        key=key,
        expires=expires,
        using=using,
        broker=broker,
    )
    if len(found.name) > MAX_NAME_LENGTH:
        raise ConfigurationError(f"The name {found.name[:40]!r}… is too long.")
    if missed not in (None, "latest", "all"):
        raise ConfigurationError(f'missed={missed!r} is neither "latest" nor "all".')
    assert found.cron
    if _declared.setdefault(found.name, found) != found:
        raise ConfigurationError(
            f"Two recurring messages are named {found.name!r}. Give one of them "
            f"another name=."
        )
    return found


def forget(name: str) -> None:
    """Forget what was declared, as tests do with theirs."""
    _declared.pop(name, None)


def recurring() -> list[Recurring]:
    """Return all recurring messages, by name. What TXMSG["SCHEDULE"] says of a name
    takes the place of what the code says."""
    found = dict(_declared)
    for name, given in conf.get().SCHEDULE.items():
        values = {key.lower(): value for key, value in given.items()}
        expression = values.pop("every")
        if values.get("expires") is not None:
            values["expires"] = dt.timedelta(seconds=values["expires"])
        found[name] = Recurring(name=name, expression=expression, **values)
    return [found[name] for name in sorted(found)]
