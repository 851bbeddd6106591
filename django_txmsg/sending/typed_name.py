"""A destination's name together with the types of its bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .. import codecs
from ..envelope.message import check_destination
from ..envelope.typed_body import BodyType
from ..errors import InvalidMessage

if TYPE_CHECKING:
    from typing_extensions import TypeForm

Body = TypeVar("Body")

#: The names of destinations whose consumers know the headers of JMS alone.
foreign: set[str] = set()


class TypedName(Generic[Body]):
    """The name of a `Destination` and the type of its bodies, without the methods that
    send."""

    def __init__(self, name: str, body: TypeForm[Body]) -> None:
        self.name = check_destination(name)
        self.body: Any = body

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def type_of(self, body: object) -> BodyType:
        """Return the type of a body, which is one of the destination's types. Raises
        InvalidMessage if the body has none of these types."""
        types = codecs.reader(self.body).types
        if len(types) == 1:
            return types[0]
        for one in types:
            if type(body) is one.cls:
                return one
        # A TypedDict's objects are dicts, which do not record their type.
        fitting = [
            one
            for one in types
            if isinstance(body, dict if issubclass(one.cls, dict) else one.cls)
        ]
        if len(fitting) == 1:
            return fitting[0]
        raise InvalidMessage(
            f"{self.name!r} takes one of {', '.join(one.name for one in types)}, not "
            f"{type(body).__name__}."
        )
