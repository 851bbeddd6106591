"""The name under which services refer to the class of a body, and the version of that
class.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .handler import path_of

#: The highest accepted version; a higher one means a broken sender.
MAX_VERSION = 1000
MAX_NAME_LENGTH = 200

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ATTRIBUTE = "__txmsg_type__"

Class = TypeVar("Class")


@dataclass(frozen=True, slots=True)
class MessageType:
    """The declared name and version of a class of bodies.

    If `name` is "", the name is made of the app's label and the class's name.
    `readable_from` is the oldest version whose code can read bodies of this version.
    If it is `None`, the package derives this number.
    """

    name: str = ""
    version: int = 1
    readable_from: int | None = None

    def __post_init__(self) -> None:
        if self.name and not is_name(self.name):
            raise ConfigurationError(
                f"{self.name[:80]!r} is not a valid name of a message type: use "
                f"letters, digits, '.', '-' and '_', at most {MAX_NAME_LENGTH} of them."
            )
        oldest = self.version if self.readable_from is None else self.readable_from
        if not 1 <= oldest <= self.version <= MAX_VERSION:
            raise ConfigurationError(
                f"version={self.version!r} of a message type is a whole number from 1 "
                f"to {MAX_VERSION}, and readable_from={self.readable_from!r} not above "
                f"it."
            )


def message_type(
    name: str = "", *, version: int = 1, readable_from: int | None = None
) -> Callable[[Class], Class]:
    """Give a dataclass, TypedDict or pydantic model its name and version on the wire.

    `name` (default: app label + class name) is the name that other services use. Keep
    `name` when you rename the class. Raise `version` (from 1) with every change of the
    fields. `readable_from` is the oldest version whose code can read messages of this
    version. If a service has only older code, the message waits there. Raises
    ConfigurationError if a value is invalid.
    """
    declared = MessageType(name, version, readable_from)

    def declare(cls: Class) -> Class:
        setattr(cls, _ATTRIBUTE, declared)
        return cls

    return declare


def declaration(cls: type) -> MessageType:
    """Return the declaration of this class. Ignores a declaration of its base class."""
    found = vars(cls).get(_ATTRIBUTE)
    return found if isinstance(found, MessageType) else MessageType()


def is_name(text: str) -> bool:
    """Return whether the text is a valid name of a message type."""
    return len(text) <= MAX_NAME_LENGTH and _NAME.fullmatch(text) is not None


def name_of(cls: type, label: str) -> str:
    """Return the default name of a class: the app's label and the class's name, without
    characters that are invalid in the name of a message type. Raises ConfigurationError
    if no valid name remains."""
    # "Page[Order]", pydantic's name for a parametrized generic class.
    plain = re.sub(r"[\[\], ]+", "-", f"{label}.{cls.__name__}").strip("-")
    name = plain.encode("ascii", "backslashreplace").decode().replace("\\", "")
    if not is_name(name):
        raise ConfigurationError(
            f"{name[:80]!r} is not a valid name of a message type. Give the class one: "
            f"@message_type(…)."
        )
    return name


def unaliased(annotation: Any) -> Any:
    """Return the target of a `type X = …` or of a NewType. Return any other annotation
    unchanged."""
    while True:
        origin = typing.get_origin(annotation)
        if type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif type(origin).__name__ == "TypeAliasType":
            annotation = origin.__value__[typing.get_args(annotation)]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            break
    if typing.get_origin(annotation) is typing.Annotated:
        meant = unaliased(annotation.__origin__)
        if meant is not annotation.__origin__:
            return typing.Annotated[(meant, *annotation.__metadata__)]
    return annotation


def class_of(annotation: Any) -> type | None:
    """Return the class of a body's annotation. Return None if services cannot refer to
    the class by name, as for a list, a dict or a number."""
    annotation = unaliased(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = annotation.__origin__
    # A parametrized generic class counts as that class, whatever its parameters.
    annotation = typing.get_origin(annotation) or annotation
    if not isinstance(annotation, type):
        return None
    if _ATTRIBUTE in vars(annotation):
        return annotation
    package = annotation.__module__.partition(".")[0]
    return None if package in sys.stdlib_module_names else annotation


# Upgraders: functions from one version of a body to the next.
#
# Pure: no Django, no I/O. They run whenever a body is read; the stored body does not
# change.

Upgrader = Callable[[Any], Any]
Decorated = TypeVar("Decorated", bound=Upgrader)

_upgraders: dict[tuple[str, int], Upgrader] = {}


def upgrade(name: str, *, from_version: int) -> Callable[[Decorated], Decorated]:
    """Declare a function that converts a body of `from_version` to the next version.

    The function gets and returns parsed JSON, with fractional numbers as Decimals. It
    must be pure, because it runs each time a body of `from_version` is read. Raises
    ConfigurationError if this version already has a function.
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


def needed(name: str, version: int, to: int) -> bool:
    """Return whether any step from `version` to `to` has an upgrader."""
    return any((name, one) in _upgraders for one in range(version, to))


def upgraded(name: str, body: Any, version: int, to: int) -> Any:
    """Upgrade a body from `version` to version `to`, and return it. A step without an
    upgrader leaves the body unchanged; new fields then get their defaults."""
    for one in range(version, to):
        upgrader = _upgraders.get((name, one))
        if upgrader is not None:
            body = upgrader(body)
    return body


def last_break(name: str, version: int) -> int:
    """Return the oldest version whose bodies can be read as `version` without an
    upgrader."""
    breaks = [one for (of, one) in _upgraders if of == name and one < version]
    return max(breaks, default=0) + 1
