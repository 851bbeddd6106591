"""The TXMSG setting: typed, frozen, read lazily, strict about what it does not know.

`get()` returns the settings in force; `problems()` lists what is wrong with them, for
`manage.py check`. `override_settings(TXMSG=...)` works.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from .envelope import redelivery
from .envelope.broker_url import BrokerUrl
from .errors import ConfigurationError


@dataclass(frozen=True)
class RelaySettings:
    """How stored messages leave."""

    BATCH_SIZE: int = 500
    """Messages claimed and handed over together."""
    POLL_INTERVAL: float = 1.0
    """Seconds an idle relay waits before it looks again."""
    LEASE: float = 60.0
    """Seconds that claimed messages belong to one relay."""
    LANES: int = 4
    """Broker connections that one relay process sends over side by side."""
    MAX_ATTEMPTS: int = 7
    """Dispatches of a message the broker rejects, before it is dead."""
    BREAKER_MAX_PAUSE: float = 30.0
    """Longest pause, in seconds, between probes of a broker that is down."""


@dataclass(frozen=True)
class RedeliverySettings:
    """The redelivery policy of stages that bring none of their own."""

    MAX_REDELIVERIES: int = 6
    INITIAL_DELAY: float = 1.0
    BACKOFF: float = 2.0
    MAX_DELAY: float = 300.0
    JITTER: float = 0.15
    MODE: Literal["blocking", "non_blocking", "broker"] = "non_blocking"


@dataclass(frozen=True)
class ConsumeSettings:
    """How messages are received and stages run."""

    PREFETCH: int = 10
    """Unacknowledged messages that the broker may send ahead to one thread."""
    POLL_INTERVAL: float = 0.5
    """Seconds between looks for parked messages that have become due."""
    STUCK_AFTER: float = 60.0
    """Seconds after which a running handler is named, with its stack, in the log."""
    THROTTLE_AFTER: int = 0
    """Failures in a row after which a stage works one message at a time; 0: never."""
    THROTTLE_PAUSE: float = 1.0
    """Seconds between messages of a throttled stage."""
    HEARTBEAT: float = 5.0
    """Seconds between a worker's signs of life."""


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP-request outbox."""

    USING: str = "default"
    """The database whose transaction a request gets."""
    CONTROL_MESSAGE: Literal["before_commit", "off"] = "before_commit"
    """Whether a request that stored messages tells its own service, before it commits,
    to look after them."""
    CONTROL_MESSAGE_ORACLE: Literal["auto", "delay"] = "auto"
    """How the control message's receiver learns whether the request has committed:
    "auto" asks PostgreSQL and waits elsewhere, "delay" always waits."""
    ON_CONTROL_FAILURE: Literal["commit", "fail"] = "commit"
    """What a request does when its control message cannot be sent: commit, and leave
    its messages to the relay in the worst case, or fail and roll back."""
    CONTROL_TIMEOUT: float = 5.0
    """Seconds that a request waits for the control message's receipt at most, with all
    that it takes to get it."""
    MAX_COMMIT_DURATION: float = 15.0
    """Seconds from the control message to the commit after which a request is given
    up where the receiver can only wait. A later commit fails with CommitTimedOut."""
    COMMIT_DELAY_INCREMENT: float = 0.5
    """Seconds before the receiver looks again; doubled each time."""
    ROLLBACK_ON_4XX: bool = False
    """Whether a response of 400 to 499 rolls back, as one of 500 and more does."""
    IDEMPOTENCY: bool = False
    """Whether an unsafe request with an Idempotency-Key is done once only."""
    IDEMPOTENCY_CALLER: str | None = None
    """Dotted path of a function from a request to who sends it, as text; None refuses
    its key. Needed where callers are known neither by Django's users and sessions nor
    by an Authorization header."""


@dataclass(frozen=True)
class RetentionSettings:
    """Days that settled rows are kept; None keeps for ever."""

    OUTBOX: float | None = 7
    INBOX: float | None = 14
    DEAD_LETTERS: float | None = None
    IDEMPOTENCY: float | None = 1


@dataclass(frozen=True)
class Settings:
    """Everything under TXMSG."""

    SERVICE: str = "service"
    BROKERS: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"default": {"URL": "database://"}}
    )
    REQUIRE_ATOMIC: bool = True
    DISPATCH_ON_COMMIT: Literal["thread", "inline", "off"] = "thread"
    MAX_MESSAGE_BYTES: int = 16 * 1024 * 1024
    """Largest body that send_message() takes."""
    TRANSACTION_DEFINITION: str | None = None
    """Dotted path of a function from Stage to TransactionDefinition."""
    DEAD_LETTER_DESTINATIONS: tuple[str, ...] = ()
    """The broker's own dead-letter queues that `consume` takes in."""
    EDIT_DEAD_LETTERS: bool = False
    """Whether the admin may redeliver an edited copy."""
    MASK: str | None = None
    """Dotted path of a function that masks personal data before it is shown."""
    RELAY: RelaySettings = field(default_factory=RelaySettings)
    REDELIVERY: RedeliverySettings = field(default_factory=RedeliverySettings)
    CONSUME: ConsumeSettings = field(default_factory=ConsumeSettings)
    HTTP: HttpSettings = field(default_factory=HttpSettings)
    LAKE: str | None = None
    RETENTION: RetentionSettings = field(default_factory=RetentionSettings)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the settings: where, what, and what to do."""

    path: str
    message: str
    hint: str = ""


def get() -> Settings:
    """Return the settings in force.

    Raises ConfigurationError, with the first problem, when they are wrong.
    """
    return _load()


def problems() -> list[Problem]:
    """Return all that is wrong with TXMSG, in the order it is written there."""
    return list(_problems(Settings, getattr(django_settings, "TXMSG", {}), "TXMSG"))


def hide_passwords() -> None:
    """Let the brokers' URLs in Django's settings show no password: Django hides values
    by the names of their keys, and cannot know that a URL holds one."""
    given = getattr(django_settings, "TXMSG", None)
    brokers = given.get("BROKERS") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(brokers, Mapping):
        return  # nothing there, or a check's affair
    django_settings.TXMSG = {
        **given,
        "BROKERS": {alias: _hidden(entry) for alias, entry in brokers.items()},
    }
    _load.cache_clear()


def _hidden(entry: Any) -> Any:
    if isinstance(entry, Mapping) and isinstance(entry.get("URL"), str):
        return {**entry, "URL": BrokerUrl(entry["URL"])}
    return entry


@lru_cache(maxsize=1)
def _load() -> Settings:
    found = problems()
    if found:
        raise ConfigurationError(
            f"{found[0].path}: {found[0].message} {found[0].hint}".strip()
        )
    loaded: Settings = _build(Settings, getattr(django_settings, "TXMSG", {}))
    return loaded


def _reset(*, setting: str, **_: object) -> None:
    if setting == "TXMSG":
        _load.cache_clear()
        hide_passwords()


setting_changed.connect(_reset, dispatch_uid="django_txmsg.conf")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, given: Mapping[str, Any]) -> Any:
    values = dict(given)
    for name, hint in _hints(kind).items():
        if name not in values:
            continue
        if is_dataclass(hint):
            values[name] = _build(hint, values[name])
        elif typing.get_origin(hint) is tuple:
            values[name] = tuple(values[name])
    return kind(**values)


def _problems(kind: Any, given: object, path: str) -> Iterator[Problem]:
    if not isinstance(given, Mapping):
        yield Problem(path, f"must be a dict, not {type(given).__name__}.")
        return
    hints = _hints(kind)
    for name, value in given.items():
        where = f'{path}["{name}"]'
        if name not in hints:
            yield Problem(where, "is not a setting.", _did_you_mean(name, hints))
        elif is_dataclass(hints[name]):
            yield from _problems(hints[name], value, where)
        elif name == "BROKERS":
            yield from _broker_problems(value, where)
        elif name == "SERVICE":
            yield from _service_problems(value, where)
        elif not _fits(value, hints[name]):
            yield Problem(
                where,
                f"must be {_describe(hints[name])}, not {type(value).__name__}"
                f" {_shown(value)}.",
            )
        elif kind is RedeliverySettings:
            for _, problem in redelivery.problems(**{name.lower(): value}):
                yield Problem(where, f"{problem}.")
        elif _is_number(value):
            yield from _number_problems(kind, name, value, where)
        elif name == "DEAD_LETTER_DESTINATIONS" and not all(value):
            yield Problem(where, "must name queues; one of its names is empty.")


def _number_problems(
    kind: Any, name: str, value: float, where: str
) -> Iterator[Problem]:
    most = MAX_DAYS if kind is RetentionSettings else MAX_NUMBER
    if value < 0 or (value == 0 and name in _POSITIVE):
        yield Problem(where, f"must be greater than zero, not {value!r}.")
    elif not value <= most:  # nor is NaN
        yield Problem(where, f"must be at most {most:,}, not {value!r}.")


def _service_problems(given: object, path: str) -> Iterator[Problem]:
    if not isinstance(given, str):
        yield Problem(path, f"must be a string, not {type(given).__name__}.")
    elif len(given) > MAX_SERVICE_LENGTH or not _SERVICE.fullmatch(given):
        yield Problem(
            path,
            f"must be a name that destinations and subscriptions can begin with, not "
            f"{given[:40]!r}.",
            f"Use letters, digits, '.', '-' and '_', at most {MAX_SERVICE_LENGTH} of "
            f"them, and no '.' or '-' in front.",
        )


#: Two thousand million seconds, bytes or messages: what every place that takes such a
#: number can hold.
MAX_NUMBER = 2**31 - 1
#: A hundred years.
MAX_DAYS = 36_525
MAX_SERVICE_LENGTH = 100
#: What the tables hold of a broker's alias.
MAX_ALIAS_LENGTH = 64
# As message.check_destination() has it: control messages go to SERVICE.txmsg.control.
_SERVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")

_POSITIVE = frozenset(
    {
        "BATCH_SIZE", "LEASE", "LANES", "MAX_ATTEMPTS", "PREFETCH", "POLL_INTERVAL",
        "BREAKER_MAX_PAUSE", "MAX_MESSAGE_BYTES", "BACKOFF", "HEARTBEAT",
        "COMMIT_DELAY_INCREMENT", "MAX_COMMIT_DURATION", "CONTROL_TIMEOUT",
    }
)  # fmt: skip


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
        if not isinstance(entry, Mapping) or not isinstance(entry.get("URL"), str):
            yield Problem(where, 'must be a dict like {"URL": "database://"}.')
            continue
        for name in entry:
            if name != "URL":
                yield Problem(
                    f'{where}["{name}"]',
                    "is not a setting.",
                    _did_you_mean(name, ["URL"]),
                )


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
    names = {int: "an integer", float: "a number", str: "a string", bool: "a bool"}
    if hint is type(None):
        return "None"
    return names.get(hint, "a list of strings")


def _shown(value: object) -> str:
    # A setting may be a secret; short plain ones help, long ones may be anything.
    text = repr(value)
    return text if len(text) <= 20 else ""
