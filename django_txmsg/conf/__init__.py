"""The TXMSG setting: typed, immutable, read at first use, strict about unknown keys.

`get()` returns the current settings. `problems()` lists their errors for `manage.py
check`, with suggestions for misspelt keys. Tests can use
`override_settings(TXMSG=...)`.
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import Any, Literal

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from ..envelope import redelivery
from ..envelope.broker_url import BrokerUrl
from ..envelope.cron import Cron
from ..envelope.message import MAX_NAME_LENGTH, check_destination
from ..errors import ConfigurationError, InvalidMessage
from .schema import (
    BAD,
    KINDS,
    BrokerSettings,
    LakeSettings,
    RecurringSettings,
    RedeliverySettings,
    RetentionSettings,
    hints,
)
from .schema import Settings as Settings

#: Two thousand million seconds, bytes or messages: the highest number that every column
#: and option for such a value can hold.
MAX_NUMBER = 2**31 - 1
#: A hundred years.
MAX_DAYS = 36_525
MAX_SERVICE_LENGTH = 100
#: The highest values of single keys. A worker counts as dead three heartbeats after its
#: last one; until then its messages and stages count as attended. After a process was
#: killed, its control message's receiver needs up to CONTROL_GROUP to be certain.
_MOST = {"HEARTBEAT": 60, "CONTROL_GROUP": 60} | dict.fromkeys(
    ("BATCH", "CONCURRENCY", "MAX_REDELIVERIES"), redelivery.MAX_REDELIVERIES
)
#: The lowest values of single keys. A lease that ends before the relay has marked its
#: messages makes a relay send the same messages again and again.
_LEAST = {"LEASE": 1}
#: The longest broker alias that the tables can store.
MAX_ALIAS_LENGTH = 64
# Like message.check_destination(): control messages go to SERVICE.txmsg.control.
_SERVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")

_POSITIVE = frozenset(
    {
        "BATCH_SIZE", "LEASE", "LANES", "MAX_ATTEMPTS", "PREFETCH", "POLL_INTERVAL",
        "BREAKER_MAX_PAUSE", "MAX_MESSAGE_BYTES", "BACKOFF", "HEARTBEAT", "BATCH",
        "COMMIT_DELAY_INCREMENT", "MAX_COMMIT_DURATION", "CONTROL_TIMEOUT",
        "CONCURRENCY", "LATE_AFTER",
    }
)  # fmt: skip


@lru_cache(maxsize=1)
def get() -> Settings:
    """Return the current settings.

    Raises ConfigurationError, with the first error, if the settings are invalid.
    """
    found = problems()
    if found:
        raise ConfigurationError(
            f"{found[0].path}: {found[0].message} {found[0].hint}".strip()
        )
    loaded: Settings = _build(Settings, getattr(django_settings, "TXMSG", {}))
    return loaded


def problems() -> list[Problem]:
    """Return all errors in TXMSG, in the order of its keys."""
    return list(find(Settings, getattr(django_settings, "TXMSG", {}), "TXMSG"))


def hide_passwords() -> None:
    """Hide the passwords in TXMSG's URLs when Django displays its settings, for example
    on a debug page. Django itself hides a value only if the name of its key looks
    secret."""
    given = getattr(django_settings, "TXMSG", None)
    if not isinstance(given, Mapping):
        return  # nothing to hide; a system check reports what is wrong
    hidden = dict(given)
    if isinstance(brokers := given.get("BROKERS"), Mapping):
        hidden["BROKERS"] = {alias: _hidden(entry) for alias, entry in brokers.items()}
    lake = given.get("LAKE")
    if isinstance(lake, Mapping) and isinstance(lake.get("READER"), str):
        hidden["LAKE"] = {**lake, "READER": BrokerUrl(lake["READER"])}
    django_settings.TXMSG = hidden
    get.cache_clear()


def _hidden(entry: Any) -> Any:
    if isinstance(entry, Mapping) and isinstance(entry.get("URL"), str):
        return {**entry, "URL": BrokerUrl(entry["URL"])}
    return entry


def _reset(*, setting: str, **_: object) -> None:
    if setting == "TXMSG":
        get.cache_clear()
        hide_passwords()


setting_changed.connect(_reset, dispatch_uid="django_txmsg.conf")


def _build(kind: Any, given: Mapping[str, Any]) -> Any:
    values = dict(given)
    for name, hint in hints(kind).items():
        if name not in values:
            continue
        if is_dataclass(hint):
            values[name] = _build(hint, values[name])
        elif name == "LAKE" and values[name] is not None:
            lake = values[name]
            given_lake = {"URI": lake} if isinstance(lake, str) else lake
            values[name] = _build(LakeSettings, given_lake)
        elif typing.get_origin(hint) is tuple:
            values[name] = tuple(values[name])
    return kind(**values)


@dataclass(frozen=True)
class Problem:
    """One error in the settings: its path, a message, and a hint on how to correct
    it."""

    path: str
    message: str
    hint: str = ""


def find(kind: Any, given: object, path: str) -> Iterator[Problem]:
    """Yield the errors of a section, in the order of its keys."""
    if not isinstance(given, Mapping):
        yield Problem(path, f"must be a dict, not {type(given).__name__}.")
        return
    known = hints(kind)
    for name, value in given.items():
        where = f'{path}["{name}"]'
        if name not in known:
            hint = _section_of(name, known) or _did_you_mean(name, known)
            yield Problem(where, "is not a setting.", hint)
        elif is_dataclass(known[name]):
            yield from find(known[name], value, where)
        elif known[name] is Any:
            continue
        elif name in _FINDERS:
            yield from _FINDERS[name](value, where)
        elif not _fits(value, known[name]):
            yield Problem(
                where,
                f"must be {_describe(known[name])}{_shown(value)}.",
                _instead(value, known[name]),
            )
        elif kind is RedeliverySettings:
            for _, problem in redelivery.problems(**{name.lower(): value}):
                yield Problem(where, f"{problem}.")
        elif _is_number(value):
            yield from _number_problems(kind, name, value, where)
        elif name == "LATE_AFTER":
            for limit in value.values():
                yield from _number_problems(kind, name, limit, where)
        elif name == "KINDS" and (unknown := {*value} - {*KINDS, BAD}):
            found = min(unknown)
            hint = _did_you_mean(found, [*KINDS, BAD])
            yield Problem(where, f"has {found!r}, which is not a kind of alarm.", hint)
        elif name == "DEAD_LETTER_DESTINATIONS" and not all(value):
            yield Problem(where, "must name queues; one of its names is empty.")
        elif name in ("DEAD_LETTER_DESTINATIONS", "REPLY_TO"):
            yield from _destination_problems(name, value, where)
        elif name == "FORMER_SERVICES":
            for one in value:
                yield from _service_problems(one, where)


def _number_problems(
    kind: Any, name: str, value: float, where: str
) -> Iterator[Problem]:
    most = MAX_DAYS if kind is RetentionSettings else _MOST.get(name, MAX_NUMBER)
    if value < 0 or (value == 0 and name in _POSITIVE):
        least = "greater than zero" if name in _POSITIVE else "0 or more"
        yield Problem(where, f"must be {least}, not {value!r}.")
    elif value < _LEAST.get(name, 0):
        yield Problem(where, f"must be at least {_LEAST[name]}, not {value!r}.")
    elif not value <= most:  # nor is NaN
        yield Problem(where, f"must be at most {most:,}, not {value!r}.")


def _destination_problems(
    name: str, value: Iterable[str], where: str
) -> Iterator[Problem]:
    for one in value:
        # Only a broker's own queue may have a name that not every broker can carry.
        if name == "REPLY_TO" or one.startswith(("/queue/", "/topic/")):
            try:
                check_destination(one)
            except InvalidMessage as error:
                yield Problem(where, f"cannot be used: {error}")


def _service_problems(given: object, path: str) -> Iterator[Problem]:
    if not isinstance(given, str):
        yield Problem(path, f"must be a string, not {type(given).__name__}.")
    elif len(given) > MAX_SERVICE_LENGTH or not _SERVICE.fullmatch(given):
        yield Problem(
            path,
            f"must be a name that destinations and subscriptions can begin with, not "
            f"{given[:40]!r}.",
            f"Use letters, digits, '.', '-' and '_', at most {MAX_SERVICE_LENGTH} of "
            f"them, and no '.' or '-' at the beginning.",
        )


def _broker_problems(given: object, path: str) -> Iterator[Problem]:
    if not isinstance(given, Mapping) or "default" not in given:
        yield Problem(path, 'must be a dict of aliases with a "default" in it.')
        return
    for alias, entry in given.items():
        where = f'{path}["{alias}"]'
        if not isinstance(alias, str) or not 0 < len(alias) <= MAX_ALIAS_LENGTH:
            yield Problem(
                where, f"must have an alias of 1 to {MAX_ALIAS_LENGTH} characters."
            )
            continue
        if not isinstance(entry, Mapping) or not {"BACKEND", "URL"} & {*entry}:
            yield Problem(where, 'must be a dict like {"URL": "database://"}.')
        else:
            yield from find(BrokerSettings, entry, where)


def _schedule_problems(given: object, path: str) -> Iterator[Problem]:
    if not isinstance(given, Mapping):
        yield Problem(path, f"must be a dict, not {type(given).__name__}.")
        return
    for name, entry in given.items():
        where = f'{path}["{name}"]'
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            yield Problem(where, f"must have a name of 1 to {MAX_NAME_LENGTH} letters.")
        elif not isinstance(entry, Mapping) or not {"EVERY", "DESTINATION"} <= {*entry}:
            yield Problem(
                where,
                'must be a dict like {"EVERY": "*/5 * * * *", "DESTINATION": '
                '"reports.refresh", "BODY": {}}.',
            )
        elif found := list(find(RecurringSettings, entry, where)):
            yield from found
        else:
            try:
                assert Cron(entry["EVERY"], entry.get("TZ") or "UTC")
                check_destination(entry["DESTINATION"])
            except (ConfigurationError, InvalidMessage) as error:
                yield Problem(where, f"cannot be used: {error}")


def _lake_problems(given: object, path: str) -> Iterator[Problem]:
    if isinstance(given, Mapping):
        yield from find(LakeSettings, given, path)
        given = given.get("URI", "")
    if given is not None and not (isinstance(given, str) and given):
        yield Problem(
            path,
            'must be a URI such as "file:///var/lake", or a dict like '
            '{"URI": "s3://bucket/lake"}.',
        )


def _section_of(name: object, known: Mapping[str, Any]) -> str:
    """Return a hint that names the section to which a setting of this name belongs, or
    ""."""
    for section, kind in known.items():
        if isinstance(kind, type) and is_dataclass(kind) and name in hints(kind):
            return f'It belongs in "{section}": {{"{section}": {{"{name}": …}}}}.'
    return ""


#: By the name of a setting whose type is not a dataclass: what yields its errors.
_FINDERS: dict[str, Callable[[object, str], Iterator[Problem]]] = {
    "BROKERS": _broker_problems,
    "LAKE": _lake_problems,
    "SCHEDULE": _schedule_problems,
    "SERVICE": _service_problems,
}


def _did_you_mean(name: object, known: Any) -> str:
    close = difflib.get_close_matches(str(name).upper(), list(known), n=1, cutoff=0.5)
    if close:
        return f'Did you mean "{close[0]}"?'
    return f"Known here: {', '.join(sorted(known))}."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, list | tuple) and all(
            isinstance(one, str) for one in value
        )
    if origin is Mapping:
        (_, of) = typing.get_args(hint)
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and _fits(one, of) for name, one in value.items()
        )
    if hint is float:
        return _is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(f'"{one}"' for one in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is Mapping:
        of = {str: "strings", float: "numbers"}.get(typing.get_args(hint)[1], "values")
        return f"a dict of {of}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "a bool"}
    if hint is type(None):
        return "None"
    return names.get(hint, "a list of strings")


def _instead(value: object, hint: Any) -> str:
    """Return a hint with the value in the expected type, or ""."""
    if isinstance(value, dt.timedelta):
        return f"Give {value.total_seconds():g}, in seconds."
    if isinstance(value, str) and typing.get_origin(hint) is tuple and _is_short(value):
        return f'Give ["{value}"].'
    return ""


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ""  # perhaps a dict was wanted, but of other values
    shown = f" {value!r}" if _is_short(value) else ""
    return f", not {type(value).__name__}{shown}"


def _is_short(value: object) -> bool:
    # A setting may be a secret. Short plain values help the reader; long ones may be
    # anything, and a URL may contain a password.
    return len(repr(value)) <= 20 and "://" not in repr(value)
