"""Reports the outcome of an asynchronous send to its sender.

Hop 4 of a message. A sender passes a listener, or gets a future. For each accepted
message, the session calls the listener, or completes the future, exactly once and in
the order of sending. A session runs one callback at a time.

Callbacks run on the threads of a pool, and never on the connection's thread. The pool
starts a thread on demand, and an idle thread ends. The threads are daemon threads, so
the interpreter can exit. If no thread can start, callbacks run on a thread that waits
for them, for example in `close()`.

While a callback runs, its thread is marked with the link, the session and the producer
that sent the message. If the callback calls a method of these objects that would wait
for the callback itself, the method raises an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

from .errors import IllegalStateError, MessagingError
from .message import Message

logger = logging.getLogger("django_txmsg.jms.pool")

_NOT_OF_A_POOL = contextlib.nullcontext()


class _ThisThread(threading.local):
    pool: CompletionPool | None = None
    scope: tuple[object, ...] = ()


#: Kept per thread, not per context, which event loops and threads inherit: work
#: scheduled from a callback does not run in it.
_this_thread = _ThisThread()


class CompletionPool:
    """Runs tasks on daemon threads. At most ``max_workers`` threads run at the same
    time, not counting threads that wait for other tasks."""

    def __init__(self, max_workers: int = 32, idle_seconds: float = 5.0) -> None:
        """Create a pool without threads. The first task starts a thread."""
        self._max_workers = max_workers
        self._idle_seconds = idle_seconds
        self._tasks: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._workers = 0
        #: Whether tasks wait for a thread that could not be started.
        self.stranded = False

    def submit(self, task: Callable[[], object]) -> None:
        """Queue the task for a thread of the pool."""
        with self._changed:
            self._tasks.append(task)
        self.start_thread()

    def start_thread(self) -> bool:
        """Ensure that a thread runs the next task. Return False if no thread can be
        started."""
        with self._changed:
            if self._idle >= len(self._tasks):
                self.stranded = False
                self._changed.notify()
                return True
            if self._workers >= self._max_workers:
                return True
            self._workers += 1
        try:
            threading.Thread(
                target=self._work, name="jms-completion", daemon=True
            ).start()
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            with self._changed:
                self._workers -= 1
                self.stranded = True
                return False
        with self._changed:
            self.stranded = False
            return True

    def help_out(self) -> None:
        """Run the queued tasks on the calling thread if the pool cannot start a thread.
        Call this before waiting for these tasks."""
        while self.stranded and not self.start_thread():
            with self._changed:
                if not self._tasks:
                    self.stranded = False
                    return
                task = self._tasks.popleft()
            task()

    def _work(self) -> None:
        _this_thread.pool = self
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._tasks, self._idle_seconds)
                self._idle -= 1
                if not found or self._workers > self._max_workers:
                    self._workers -= 1
                    self._changed.notify()  # another one takes what this one left
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException:
                logger.exception("A completion task ended with an error.")

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        with self._changed:
            self._max_workers += 1
        try:
            self.start_thread()
            yield
        finally:
            with self._changed:
                self._max_workers -= 1


def waiting() -> contextlib.AbstractContextManager[None]:
    """While the block runs, allow the pool one more thread. Used when a callback waits
    for other callbacks, because otherwise all threads might wait for each other."""
    pool = _this_thread.pool
    return _NOT_OF_A_POOL if pool is None else pool._lent()


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
        listener = SimpleNamespace(on_completion=listener[0], on_exception=listener[1])
    # Much cheaper, for each send, than isinstance() with the protocol.
    elif not callable(getattr(listener, "on_completion", None)) or not callable(
        getattr(listener, "on_exception", None)
    ):
        raise ValueError(
            "A completion listener has on_completion(message) and on_exception"
            f"(message, error), or is a pair of callables; got {listener!r}."
        )
    return cast("CompletionListener", listener)


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
        with waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome. Return the error that ``result`` would raise, or
        None."""
        self._refuse_own_callback()
        with waiting():
            return super().exception(timeout)

    def __await__(self) -> Generator[Any, None, Message]:
        """Wait for the outcome without blocking the running event loop."""
        self._refuse_own_callback()
        return asyncio.wrap_future(self).__await__()
