"""Destinations that declare the type of their bodies. Bodies are then checked not only
when they are received, but also when they are sent."""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .. import codecs
from ..envelope.message import Message, check_destination
from ..envelope.typed_body import BodyType
from ..errors import InvalidMessage
from .outbox import foreign_names, send_message

if TYPE_CHECKING:
    import typing_extensions
    from typing_extensions import TypeForm, Unpack

    from .outbox import SendOptions

    Reply = typing_extensions.TypeVar("Reply", default=None)
else:
    Reply = TypeVar("Reply")

Body = TypeVar("Body")

_declared: list[Destination[Any, Any]] = []


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


class Destination(TypedName[Body], Generic[Body, Reply]):
    """A queue or a topic, and the type of its bodies.

    With `orders_place = Destination("orders.place", PlaceOrder)`,
    `orders_place.send(…)` accepts only a PlaceOrder, in a type checker and at run time.
    `@stage(orders_place)` passes a PlaceOrder to the handler. `reply` is the type of
    the answer that the stage returns to a flow. Both types may be unions.

    Pass `foreign=True` if the consumer does not use this package. A flow's requests
    then have JMS's `reply-to` and `correlation-id`. The consumer must send its answer
    to `reply-to`, with the same `correlation-id`. Raises InvalidMessage if some broker
    could not carry the name.
    """

    @overload
    def __init__(
        self: Destination[Body, None],
        name: str,
        body: TypeForm[Body],
        *,
        foreign: bool = False,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        body: TypeForm[Body],
        *,
        reply: TypeForm[Reply],
        foreign: bool = False,
    ) -> None: ...
    def __init__(
        self, name: str, body: Any, *, reply: Any = None, foreign: bool = False
    ) -> None:
        super().__init__(name, body)
        self.reply: Any = reply
        if foreign:
            foreign_names.add(name)
        _declared.append(self)

    if not TYPE_CHECKING:
        # With the type of the body alone, too: a checker knows the other's default.
        __class_getitem__ = classmethod(GenericAlias)

    def send(self, body: Body, **options: Unpack[SendOptions]) -> Message:
        """Store one message, with the arguments and errors of `send_message()`. Also
        raises InvalidMessage if the body does not have the declared type."""
        return send_message(self, body, **options)


def declared() -> list[Destination[Any, Any]]:
    """Return all destinations that were declared in this process."""
    return list(_declared)
