"""The TXMSG setting: typed, immutable, read at first use, strict about unknown keys.

`get()` returns the current settings. `problems()` lists their errors for `manage.py
check`. Tests can use `override_settings(TXMSG=...)`.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from ..envelope.broker_url import BrokerUrl
from ..errors import ConfigurationError
from .schema import LakeSettings, hints
from .schema import Settings as Settings
from .validation import Problem as Problem
from .validation import find


def get() -> Settings:
    """Return the current settings.

    Raises ConfigurationError, with the first error, if the settings are invalid.
    """
    return _load()


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
