"""The recurring messages. Some are declared: in the settings, or with `every()` in
`stages` modules. Others are created at run time: by code, an admin page or a command.

A message that is created at run time is a row of `Schedule`. The row's column `made`
contains the arguments. If a declared message has the same name, the declared message
takes precedence. `timekeeper.py` stores due messages.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from django.conf import settings as django_settings
from django.db import router

from .. import conf, wire
from ..envelope import serializers
from ..envelope.cron import Cron
from ..envelope.message import (
    MAX_NAME_LENGTH,
    check_duration,
    check_headers,
    check_key,
)
from ..errors import ConfigurationError, InvalidMessage
from ..models import Schedule
from ..models.outbox_store import UniqueUntil
from ..sending.destination import TypedName
from ..sending.outbox import destination_name, encoded
from ..sending.unique import check_recorded, check_until

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..sending.outbox import TickOptions

Missed = Literal["latest", "all"]

#: The header with the time of a message's tick.
SCHEDULED_FOR = "scheduled-for"

log = logging.getLogger("django_txmsg.timekeeper")


@dataclass(frozen=True, kw_only=True)
class Recurring:
    """A message that is stored at each tick of a cron expression."""

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
    unique: str | None = None
    unique_until: UniqueUntil = "left"

    def __post_init__(self) -> None:
        # str() of an enum's member may be the member's name, not its value.
        for name in ("name", "destination"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, str.__str__(value))

    @property
    def cron(self) -> Cron:
        """The parsed cron expression. Raises ConfigurationError if the expression or
        the time zone is invalid."""
        return Cron(self.expression, self.tz or django_settings.TIME_ZONE)

    @property
    def alias(self) -> str:
        """The alias of the database in which the message is stored."""
        return self.using or router.db_for_write(Schedule)

    @property
    def makes_up_all(self) -> bool:
        """Whether all missed ticks are caught up, instead of only the latest one."""
        return (self.missed or conf.get().MISSED_TICKS) == "all"

    def check_timing(self) -> None:
        """Raise ConfigurationError or InvalidMessage if the name, the expression or the
        destination is invalid. This reads no TXMSG setting, so it can run while a
        module is imported."""
        destination_name(self.destination)
        if not self.name or len(self.name) > MAX_NAME_LENGTH:
            raise ConfigurationError(
                f"The name {self.name[:40]!r} is empty or too long."
            )
        if self.missed not in (None, "latest", "all"):
            raise ConfigurationError(
                f'missed={self.missed!r} is neither "latest" nor "all".'
            )
        if len(str(self.cron)) > MAX_NAME_LENGTH:
            raise ConfigurationError(
                f"The expression {self.expression[:40]!r}… and its time zone have more "
                f"than {MAX_NAME_LENGTH} characters."
            )

    def check(self) -> None:
        """Raise ConfigurationError or InvalidMessage if this recurring message is
        invalid, so that no tick could store a message. This does not query the
        database, and does not check whether another recurring message has the same
        name."""
        self.check_timing()
        if self.broker not in conf.get().BROKERS:
            raise InvalidMessage(
                f"its broker {self.broker!r} is not in TXMSG['BROKERS']"
            )
        assert encoded(self.destination, self.body)
        check_headers(self.headers)
        check_key(self.key)
        check_duration("expires", self.expires)
        check_key(self.unique)
        check_until(self.unique, self.unique_until)
        if self.unique_until == "processed":
            named = destination_name(self.destination)
            check_recorded(named, self.broker, self.alias)

    def message_id(self, tick: dt.datetime) -> uuid.UUID:
        """Return the id of the message of a tick. The id is the same in every
        process."""
        return wire.tick_id(conf.get().SERVICE, self.name, tick)

    def arguments(self, tick: dt.datetime) -> dict[str, Any]:
        """Return the arguments of `send_message()` for a tick."""
        return {name: getattr(self, name) for name in _ARGUMENTS} | {
            "headers": {**(self.headers or {}), SCHEDULED_FOR: tick.isoformat()},
            "message_id": self.message_id(tick),
            "using": self.alias,
            "on_conflict": "skip",
        }


_ARGUMENTS = (
    "destination", "body", "key", "expires", "broker", "unique", "unique_until",
)  # fmt: skip

_declared: dict[str, Recurring] = {}


def every(
    expression: str,
    destination: str | TypedName[Any],
    body: object = None,
    *,
    name: str | None = None,
    tz: str | None = None,
    missed: Missed | None = None,
    using: str | None = None,
    **options: Unpack[TickOptions],
) -> Recurring:
    """Declare a message that is sent at each tick of a cron expression. However many
    processes run, each tick has one message.

    Call this in an app's `stages` module: `every("*/5 * * * *", "reports.refresh",
    {})`.

    - The database stores the last tick under `name` (default: the destination), so keep
      the name.
    - `tz` is the time zone of the expression, by default settings.TIME_ZONE.
    - `missed` says which ticks are caught up after a time without a relay: "latest" or
      "all" (default: TXMSG["MISSED_TICKS"]).
    - A tick is skipped while an earlier message holds its `unique` key. With
      `unique_until="processed"`, the earlier message holds the key until a stage has
      processed it.

    Each message has the header `scheduled-for`, the time of its tick. The other
    arguments are the same as for `send_message()`. Raises ConfigurationError for an
    invalid expression or time zone, or if another message has this name. Raises
    InvalidMessage for an invalid destination.
    """
    found = Recurring(
        name=name or destination_name(destination),
        expression=expression,
        destination=destination,
        body=body,
        tz=tz,
        missed=missed,
        using=using,
        **options,
    )
    found.check_timing()
    if _declared.setdefault(found.name, found) != found:
        raise ConfigurationError(
            f"Two recurring messages are named {found.name!r}. Give one of them "
            f"another name=."
        )
    return found


def recurring() -> list[Recurring]:
    """Return all declared recurring messages, sorted by name. If an entry of
    TXMSG["SCHEDULE"] has the same name as a message that `every()` declares, the entry
    replaces that message."""
    found = dict(_declared)
    for name, given in conf.get().SCHEDULE.items():
        values = {key.lower(): value for key, value in given.items()}
        expression = values.pop("every")
        if values.get("expires") is not None:
            values["expires"] = dt.timedelta(seconds=values["expires"])
        found[name] = Recurring(name=name, expression=expression, **values)
    return [found[name] for name in sorted(found)]


_NAMES = {one.name for one in dataclasses.fields(Recurring)} - {"name", "using"}


def make_recurring(
    name: str,
    expression: str,
    destination: str,
    body: object = None,
    *,
    tz: str | None = None,
    missed: Missed | None = None,
    **options: Unpack[TickOptions],
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
        using=None,  # an option of `every()` only
        **options,
    )
    one.check()
    given = {name: getattr(one, name) for name in _NAMES}
    given |= {
        "headers": dict(one.headers or {}),
        "expires": None if one.expires is None else one.expires.total_seconds(),
    }
    if not serializers.is_storable([name, given]):
        raise InvalidMessage(
            f"{name!r} contains a NUL or half of a surrogate pair, which PostgreSQL "
            f"cannot store."
        )
    rows = adopt(router.db_for_write(Schedule))
    rows.make(conf.get().SERVICE, name, given, str(one.cron))


def remove_recurring(name: str) -> bool:
    """Remove a recurring message that was created at run time. Return False if no
    message has this name."""
    rows = adopt(router.db_for_write(Schedule))
    return bool(rows.unmake(conf.get().SERVICE, name))


def adopt(using: str) -> Any:
    """Continue under this service's name the recurring messages of its former names.
    Returns the manager of the rows."""
    rows = Schedule.objects.db_manager(using)
    rows.adopt(conf.get().SERVICE, conf.get().FORMER_SERVICES)
    return rows


def read_made(rows: Iterable[Schedule]) -> dict[str, Recurring]:
    """Return, by name, those recurring messages in these rows that were created at run
    time. A row that this code cannot read is logged and skipped."""
    declared = {one.name for one in recurring()}
    found: dict[str, Recurring] = {}
    for row in rows:
        if row.made is None or row.name in declared:
            continue
        try:
            given = {name: value for name, value in row.made.items() if name in _NAMES}
            seconds = given.get("expires")
            if seconds is not None:
                given["expires"] = dt.timedelta(seconds=seconds)
            one = Recurring(name=row.name, using=row._state.db, **given)
            assert one.cron
        except Exception:
            log.exception("recurring message %r cannot be read from its row", row.name)
        else:
            found[row.name] = one
    return found
