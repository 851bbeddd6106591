"""Destinations that declare the type of their bodies. Bodies are then checked not only
when they are received, but also when they are sent."""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, overload

from ..envelope.message import Message
from . import typed_name
from .outbox import send_message
from .typed_name import Body, TypedName

if TYPE_CHECKING:
    from typing_extensions import TypeForm, TypeVar, Unpack

    from .outbox import SendOptions

    Reply = TypeVar("Reply", default=None)
else:
    from typing import TypeVar

    Reply = TypeVar("Reply")

_declared: list[Destination[Any, Any]] = []


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
            typed_name.foreign.add(name)
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
