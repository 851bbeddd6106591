"""Reports the outcome of an asynchronous send to its sender.

Hop 4 of a message. A sender passes a listener, or gets a future. For each accepted
message, the session calls the listener, or completes the future, exactly once and in
the order of sending. A session runs one callback at a time. The callback runs on a pool
thread, and not on a thread of the sender or of the connection.

While a callback runs, its thread is marked with the link, the session and the producer
that sent the message. If the callback calls a method of these objects that would wait
for the callback itself, the method raises an error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, cast, runtime_checkable

from . import pool
from .errors import IllegalStateError, MessagingError
from .message import Message


class _Scope(threading.local):
    scope: tuple[object, ...] = ()


#: Kept per thread, not per context, which event loops and threads inherit: work
#: scheduled from a callback does not run in it.
_this_thread = _Scope()


def run_for(scope: tuple[object, ...]) -> tuple[object, ...]:
    """Mark this thread as running a callback of the objects in `scope`: a link, a
    session and a producer. Return the previous scope."""
    before = _this_thread.scope
    _this_thread.scope = scope
    return before


def is_running_for(thing: object) -> bool:
    """Return True if this thread is running a callback of the object."""
    scope = _this_thread.scope
    return bool(scope) and any(one is thing for one in scope)


def refuse_own(thing: object, what: str) -> None:
    """Raise ``IllegalStateError`` if this thread is running a callback of the
    object."""
    if is_running_for(thing):
        raise IllegalStateError(
            f"A completion callback cannot {what}: it would wait for itself. Do it "
            "from another thread."
        )


@runtime_checkable
class CompletionListener(Protocol):
    """Receives the outcome of a message that was sent asynchronously."""

    def on_completion(self, message: Message) -> None:
        """Called when the broker has confirmed the message."""

    def on_exception(self, message: Message, error: MessagingError) -> None:
        """Called when the broker has refused the message, or when it is unknown whether
        the broker has stored the message."""


class _Callables:
    """A completion listener made of two callables."""

    def __init__(
        self,
        on_completion: Callable[[Message], object],
        on_exception: Callable[[Message, MessagingError], object],
    ) -> None:
        self._on_completion = on_completion
        self._on_exception = on_exception

    def on_completion(self, message: Message) -> None:
        self._on_completion(message)

    def on_exception(self, message: Message, error: MessagingError) -> None:
        self._on_exception(message, error)


def as_listener(listener: object) -> CompletionListener:
    """Return a completion listener. ``listener`` is a completion listener, which is
    returned unchanged, or a pair ``(on_completion, on_exception)`` of callables.

    Raises ``ValueError`` for anything else, including ``None``.
    """
    if (
        isinstance(listener, tuple)
        and len(listener) == 2
        and all(map(callable, listener))
    ):
        return _Callables(*listener)
    # Much cheaper, for each send, than isinstance() with the protocol.
    if callable(getattr(listener, "on_completion", None)) and callable(
        getattr(listener, "on_exception", None)
    ):
        return cast("CompletionListener", listener)
    raise ValueError(
        "A completion listener has on_completion(message) and "
        f"on_exception(message, error), or is a pair of callables; got {listener!r}."
    )


class CompletionFuture(Future["Message"]):
    """The outcome of a message that ``producer.submit`` sends. ``result()`` and
    ``await`` both return the message.

    ``cancel()`` succeeds only while the frame has not been written.
    """

    def __init__(self, session: object) -> None:
        """`session` is the session that sends the message."""
        super().__init__()
        self._session = session
        self._withdraw: Callable[[], bool] = lambda: False

    def on_completion(self, message: Message) -> None:
        """Set the future's result. Called when the broker has confirmed the message."""
        if self.set_running_or_notify_cancel():
            self.set_result(message)

    def on_exception(self, message: Message, error: MessagingError) -> None:
        """Set the future's exception. Called when the message was refused or its
        outcome is unknown."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    def on_withdrawn(self) -> None:
        """Mark the future as cancelled, and wake the threads that wait for it. Called
        when the message was cancelled."""
        super().cancel()
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the message if its frame has not been written yet. Return True if the
        message is cancelled."""
        if self.cancelled():
            return True
        return self._withdraw() and super().cancel()

    def _refuse_own_callback(self) -> None:
        if is_running_for(self._session) and not self.done():
            raise IllegalStateError(
                "A completion callback waits for a later send of its own session, "
                "whose callback cannot run before this one returns."
            )

    def result(self, timeout: float | None = None) -> Message:
        """Wait for the outcome, and return the message. If the message was not stored,
        or its outcome is unknown, raise the error."""
        self._refuse_own_callback()
        with pool.waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome. Return the error that ``result`` would raise, or
        None."""
        self._refuse_own_callback()
        with pool.waiting():
            return super().exception(timeout)

    def __await__(self) -> Generator[Any, None, Message]:
        """Wait for the outcome without blocking the running event loop."""
        self._refuse_own_callback()
        return asyncio.wrap_future(self).__await__()
