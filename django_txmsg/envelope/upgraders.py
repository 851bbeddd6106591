"""What makes an old body a newer one, from one version of its type to the next.

Pure: no Django, no I/O. They run whenever a body is read; what is stored stays.
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
    """Declare a function that takes a body of `from_version` as JSON gives it, with
    numbers that have a fraction as Decimals, and returns one of the version after.

    It is to be pure: it runs each time such a body is read. Raises ConfigurationError
    where another function does so already.
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
    """Forget the upgraders of a type, as tests do with the ones they declare."""
    for key in [key for key in _upgraders if key[0] == name]:
        del _upgraders[key]


def needed(name: str, version: int, to: int) -> bool:
    """Return whether something is to be done between two versions."""
    return any((name, one) in _upgraders for one in range(version, to))


def upgraded(name: str, body: Any, version: int, to: int) -> Any:
    """Return a body of `version` as version `to` has it; where nobody has declared how,
    the fields' defaults are enough."""
    for one in range(version, to):
        upgrader = _upgraders.get((name, one))
        if upgrader is not None:
            body = upgrader(body)
    return body


def last_break(name: str, version: int) -> int:
    """Return the oldest version that has no upgrader between it and `version`."""
    breaks = [one for (of, one) in _upgraders if of == name and one < version]
    return max(breaks, default=0) + 1
