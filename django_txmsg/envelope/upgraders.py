"""Upgraders: functions from one version of a body to the next.

Pure: no Django, no I/O. They run whenever a body is read; the stored body does not
change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .handler import path_of
from .message_type import MAX_VERSION, is_name

Upgrader = Callable[[Any], Any]
Decorated = TypeVar("Decorated", bound=Upgrader)

_upgraders: dict[tuple[str, int], Upgrader] = {}


def upgrade(name: str, *, from_version: int) -> Callable[[Decorated], Decorated]:
    """Declare a function from a body of `from_version`, as parsed JSON with fractional
    numbers as Decimals, to a body of the next version.

    It must be pure: it runs each time such a body is read. Raises ConfigurationError if
    the step already has a function.
    """
    if not is_name(name) or not 1 <= from_version < MAX_VERSION:
        raise ConfigurationError(
            f"upgrade({name!r}, from_version={from_version!r}) names no version of a "
            f"message type."
        )

    def declare(upgrader: Decorated) -> Decorated:
        known = _upgraders.get((name, from_version), upgrader)
        if path_of(known) != path_of(upgrader):
            raise ConfigurationError(
                f"{path_of(known)} and {path_of(upgrader)} both upgrade {name!r} from "
                f"version {from_version}. Keep one of them."
            )
        _upgraders[name, from_version] = upgrader
        return upgrader

    return declare


def forget(name: str) -> None:
    """Remove the upgraders of a type, as tests do with the ones they declare."""
    for key in [key for key in _upgraders if key[0] == name]:
        del _upgraders[key]


def needed(name: str, version: int, to: int) -> bool:
    """Return whether an upgrader applies between two versions."""
    return any((name, one) in _upgraders for one in range(version, to))


def upgraded(name: str, body: Any, version: int, to: int) -> Any:
    """Return a body of `version` as version `to`; for steps without an upgrader, the
    fields' defaults suffice."""
    for one in range(version, to):
        upgrader = _upgraders.get((name, one))
        if upgrader is not None:
            body = upgrader(body)
    return body


def last_break(name: str, version: int) -> int:
    """Return the oldest version from which `version` is reached without an upgrader."""
    breaks = [one for (of, one) in _upgraders if of == name and one < version]
    return max(breaks, default=0) + 1
