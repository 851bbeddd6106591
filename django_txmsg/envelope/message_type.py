"""What a body's class is called between services, and which version of it this is.

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

#: The highest version accepted; above it, the sender is broken.
MAX_VERSION = 1000
MAX_NAME_LENGTH = 200

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ATTRIBUTE = "__txmsg_type__"

Class = TypeVar("Class")


@dataclass(frozen=True, slots=True)
class MessageType:
    """The name and the version of a class of bodies, as its declaration says.

    `name` "" is the app's label and the class's name. `readable_from` is the oldest
    version whose readers understand this one; None leaves that to be found out.
    """

    name: str = ""
    version: int = 1
    readable_from: int | None = None

    def __post_init__(self) -> None:
        if self.name and not is_name(self.name):
            raise ConfigurationError(
                f"{self.name[:80]!r} is no name of a message type: use letters, "
                f"digits, '.', '-' and '_', at most {MAX_NAME_LENGTH} of them."
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
    """Say what a dataclass, TypedDict or pydantic model is called on the wire.

    `name` (default: app label + class name) is what other services know it by: keep it
    when you rename the class. Raise `version` (from 1) with every change of the fields.
    `readable_from` is the oldest version whose code reads this one's messages; older
    code lets them wait. Raises ConfigurationError for what cannot be.
    """
    declared = MessageType(name, version, readable_from)

    def declare(cls: Class) -> Class:
        setattr(cls, _ATTRIBUTE, declared)
        return cls

    return declare


def declaration(cls: type) -> MessageType:
    """Return what was declared of this very class; a subclass is another type."""
    found = vars(cls).get(_ATTRIBUTE)
    return found if isinstance(found, MessageType) else MessageType()


def is_name(text: str) -> bool:
    """Return whether this can be the name of a message type."""
    return len(text) <= MAX_NAME_LENGTH and _NAME.fullmatch(text) is not None


def name_of(cls: type, label: str) -> str:
    """Return what a class is called that declares no name: by the label of its app, and
    what a name cannot have in it otherwise. Raises ConfigurationError."""
    # "Page[Order]", as pydantic calls a generic class that is one of something.
    plain = re.sub(r"[\[\], ]+", "-", f"{label}.{cls.__name__}").strip("-")
    name = plain.encode("ascii", "backslashreplace").decode().replace("\\", "")
    if not is_name(name):
        raise ConfigurationError(
            f"{name[:80]!r} is no name of a message type. Give the class one: "
            f"@message_type(…)."
        )
    return name


def unaliased(annotation: Any) -> Any:
    """Return what a `type X = …` or a NewType stands for, anything else as it is."""
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
    """Return the class that a body's annotation means, None where it is none that
    services could know by a name: a list, a dict, a number."""
    annotation = unaliased(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = annotation.__origin__
    # A generic class of something is that class, whatever it is of.
    annotation = typing.get_origin(annotation) or annotation
    if not isinstance(annotation, type):
        return None
    if _ATTRIBUTE in vars(annotation):
        return annotation
    package = annotation.__module__.partition(".")[0]
    return None if package in sys.stdlib_module_names else annotation
