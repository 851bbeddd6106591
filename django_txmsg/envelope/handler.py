"""Reads from a handler's annotations whether it takes the message, the body, or both.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from ..errors import ConfigurationError, StageError
from .message import Message

if sys.version_info >= (3, 14):
    from annotationlib import Format

    # Annotations are evaluated only now. They may use names that exist only for type
    # checkers.
    signature_of = functools.partial(
        inspect.signature, annotation_format=Format.FORWARDREF
    )
else:
    signature_of = inspect.signature

Handler = Callable[[Message], Any]
Body = TypeVar("Body")
Result = TypeVar("Result")

#: Annotations of a first argument that takes the message, whose body is parsed JSON.
_THE_MESSAGE = (Message, Any, object, inspect.Parameter.empty)


class Declaring(Protocol[Body]):
    """The type of the decorator that `@stage` returns for a typed destination."""

    @overload
    def __call__(
        self, handler: Callable[[Message], Result], /
    ) -> Callable[[Message], Result]: ...
    @overload
    def __call__(
        self, handler: Callable[[Body], Result], /
    ) -> Callable[[Body], Result]: ...
    @overload
    def __call__(
        self, handler: Callable[[Body, Message], Result], /
    ) -> Callable[[Body, Message], Result]: ...


def accepted(handler: Callable[..., Any]) -> Any:
    """Return the annotation of a handler's first parameter if this parameter takes the
    message's body. Return None if the parameter takes the whole message. Raises
    ConfigurationError if the annotation cannot be resolved."""
    positional = _positional(handler)
    if not positional:
        return None
    found = _resolved(handler, positional[0])
    return None if any(found is one for one in _THE_MESSAGE) else found


def bound(handler: Callable[..., Any]) -> Callable[[Message], Any]:
    """Return a function that takes a message with a decoded body, and calls the handler
    with the arguments that the handler takes."""
    if accepted(handler) is None:
        _check_call(handler, 1)
        return handler
    arguments = _arguments(handler)
    _check_call(handler, arguments)

    @functools.wraps(handler)
    def call(message: Message) -> Any:
        both = arguments == 2
        return handler(message.body, message) if both else handler(message.body)

    return call


def is_coroutine(handler: Any) -> bool:
    """Return whether a call of the handler returns a coroutine."""
    return inspect.iscoroutinefunction(_runs(handler))


def check(handler: Any, *, coroutine: bool = False) -> None:
    """Raise ConfigurationError unless `handler` can be a handler. A handler is a plain
    function, or a coroutine function if `coroutine` is true. A call of a generator
    function, or of a coroutine function without `coroutine`, would run no code, and the
    message would still count as processed."""
    if not callable(handler) or inspect.isclass(handler):
        raise ConfigurationError(
            f"{handler!r} cannot be a handler. Decorate a function, or give an "
            f"instance that can be called: @stage(…) above `def place(message): …`."
        )
    runs = _runs(handler)
    if is_coroutine(handler) and not coroutine:
        raise ConfigurationError(
            f"The handler {path_of(handler)} is a coroutine function; Django's "
            f"transactions are synchronous. Declare the stage with "
            f'transaction="none", or a plain function that calls async code through '
            f"asgiref.sync.async_to_sync."
        )
    if inspect.isgeneratorfunction(runs) or inspect.isasyncgenfunction(runs):
        raise ConfigurationError(
            f"The handler {path_of(handler)} is a generator (it has a `yield`), so "
            f"a call runs none of its code. Write a function that does its work and "
            f"returns."
        )


def ran(result: Any) -> Any:
    """Return the result of a handler. Raises StageError if the handler has only created
    a coroutine or a generator: none of its code has run, and the message would still
    count as processed. `check()` does not see this of a lambda, for example."""
    unrun = inspect.isawaitable(result) or inspect.isasyncgen(result)
    unrun = unrun and not hasattr(result, "add_done_callback")  # a future is under way
    if not unrun and not inspect.isgenerator(result):
        return result
    if inspect.iscoroutine(result):
        result.close()  # Python would warn that it was never awaited
    raise StageError(
        f"The handler returned a {type(result).__name__}, whose code has not run. "
        f'Declare an `async def` with transaction="none" (a decorator around it needs '
        f"functools.wraps), or call it by asgiref.sync.async_to_sync. Write a loop in "
        f"place of a generator."
    )


def _runs(handler: Any) -> Any:
    """Return the innermost function that a call runs, without the partials and
    decorators around it."""
    while True:
        if isinstance(handler, functools.partial):
            handler = handler.func
        elif inspect.isroutine(handler):
            unwrapped = inspect.unwrap(handler)
            if unwrapped is handler:
                return handler
            handler = unwrapped
        else:
            return type(handler).__call__


def _arguments(handler: Callable[..., Any]) -> int:
    """Return the number of arguments for a handler that takes the body: 1 for the body,
    2 for body and message."""
    needed = [one for one in _positional(handler) if one.default is one.empty]
    own = _signature(handler, follow_wrapped=False)
    if own is None or own == signature_of(handler):
        return max(len(needed), 1)
    kinds = [one.kind for one in own.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        # The function of a decorator that takes fewer or more arguments than the
        # decorated one.
        needed = [one for one in _taken(own) if one.default is one.empty]
        return max(len(needed), 1)
    # A decorator's function that passes on its arguments, and may add some.
    second = _written(needed[1].annotation) if len(needed) > 1 else None
    return 2 if second in _THE_MESSAGE or _named_message(second) else 1


def _signature(
    handler: Callable[..., Any], *, follow_wrapped: bool
) -> inspect.Signature | None:
    """Return the signature of a handler, or None if it is unknown. The wrapper function
    of a decorator reports the signature of the decorated function, but may take other
    arguments. With `follow_wrapped=False`, return the one that a call must fit. Raises
    ConfigurationError if an annotation cannot be evaluated."""
    try:
        return signature_of(handler, follow_wrapped=follow_wrapped)
    except ValueError:
        return None
    except TypeError as error:
        # Python 3.14 evaluates the annotations only here.
        raise ConfigurationError(
            f"An annotation of {path_of(handler)} is wrong: {error}."
        ) from error


def _check_call(handler: Callable[..., Any], arguments: int) -> None:
    """Raise ConfigurationError if the handler cannot be called with that many
    arguments."""
    signature = _signature(handler, follow_wrapped=False)
    if signature is None:
        return
    try:
        if arguments > 2:
            raise TypeError(f"{arguments} arguments without a default")
        signature.bind(*range(arguments))
    except TypeError as error:
        raise ConfigurationError(
            f"{path_of(handler)}{signature} can never be called: {error}. A handler "
            f"takes one argument, the Message; or the body, with its type: "
            f"(order: Order); or both: (order: Order, message: Message)."
        ) from None


def _positional(handler: Callable[..., Any]) -> list[inspect.Parameter]:
    signature = _signature(handler, follow_wrapped=True)
    return [] if signature is None else _taken(signature)


def _taken(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [
        one
        for one in signature.parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]


def _resolved(handler: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation of one parameter as an object. With `from __future__ import
    annotations`, the annotation is text. Only this annotation is resolved, because
    other annotations may use names that exist only for type checkers."""
    given = _written(parameter.annotation)
    if not isinstance(given, str):
        return given
    function = inspect.unwrap(handler)
    if isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__globals__"):
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    names = getattr(function, "__globals__", vars(sys.modules[handler.__module__]))
    try:
        given = eval(given, names)  # noqa: S307 - the annotation of the user's own code
        # It is still a text if the annotation is written in quotes.
        return eval(given, names) if isinstance(given, str) else given  # noqa: S307
    except Exception as error:
        if _named_message(given):
            return Message
        raise ConfigurationError(
            f"The annotation {given!r} of {path_of(handler)} is unknown: {error}. "
            f"Import the class where the handler's module is run, and not under "
            f"TYPE_CHECKING."
        ) from None


def _written(annotation: Any) -> Any:
    """Return the text of an annotation that Python 3.14 could not evaluate. Return
    every other annotation unchanged."""
    return getattr(annotation, "__forward_arg__", annotation)


def _named_message(annotation: Any) -> bool:
    text = isinstance(annotation, str)
    return text and annotation.rpartition(".")[2] == Message.__name__


def path_of(handler: Callable[..., Any]) -> str:
    """Return the dotted path of a function."""
    handler = inspect.unwrap(handler)
    return f"{handler.__module__}.{getattr(handler, '__qualname__', handler)}"


def origin(handler: Callable[..., Any]) -> tuple[str, list[object]]:
    """Return the dotted path of a function, and what distinguishes it from another
    function of the same path: two lambdas, say, or two results of one factory."""
    plain = inspect.unwrap(handler)
    names = ("__self__", "__code__", "__closure__", "__defaults__", "__kwdefaults__")
    return path_of(plain), [getattr(plain, name, None) for name in names]
