"""Runs the middlewares of TXMSG["STAGE_MIDDLEWARE"] around the handler.

A middleware is a class or a function. It is called with a `CallNext`, and returns a
callable that takes a message. A middleware runs inside the stage's transaction, or
around the transaction if it sets `outside_transaction = True`. Without middlewares, the
stage calls its handler directly.

A message is processed only if its handler returns. A middleware can replace an error
(by Refuse, for example), but can neither hide an error nor skip the handler.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any

from django.core.exceptions import MiddlewareNotUsed
from django.utils.module_loading import import_string

from .. import conf
from ..envelope.failure import cause_of
from ..envelope.handler import Handler, is_coroutine, ran
from ..envelope.message import Message
from ..errors import ConfigurationError, MiddlewareMisused
from ..stages import CallNext, Stage
from . import coroutines, deadline

log = logging.getLogger("django_txmsg.stage_middleware")

Factory = Callable[[CallNext], Handler]


def prepared(stage: Stage) -> Stage:
    """Return a copy of the stage with a wrapped handler. The wrappers are the code that
    sends the answer, the middlewares and the time-out. Each process wraps a stage only
    once.

    Raises ConfigurationError if a middleware cannot be loaded, and any error of a
    middleware's factory.
    """
    if stage.is_resolved:
        return stage
    settings = conf.get()
    with _loading:
        known = _prepared.get(stage.name)
        if known is None or known[0] is not stage or known[1] is not settings:
            known = _prepared[stage.name] = (stage, settings, _prepare(stage))
    return known[2]


_prepared: dict[str, tuple[Stage, conf.Settings, Stage]] = {}
_loading = threading.Lock()


def _prepare(stage: Stage) -> Stage:
    plain = stage.resolved()
    if is_coroutine(plain.handler):
        plain = replace(plain, handler=coroutines.blocking(plain))
    called = plain.handler
    checked = wraps(called)(lambda message: ran(called(message)))
    plain = replace(plain, handler=checked)
    if plain.answering is not None:
        plain = replace(plain, handler=plain.answering(plain.handler))
    ready = plain
    inner, outer = (Chain(plain, factories) for factories in _factories())
    if not inner.empty:
        handler = plain.handler
        ready = replace(ready, handler=lambda message: inner.run(message, handler))
    if ready.timeout is not None:
        ready = replace(ready, handler=deadline.timed(ready, ready.timeout))
    if not outer.empty:
        # Middlewares around the transaction need one transaction for each message.
        ready = replace(ready, outside=outer, batch=1)
    return ready


def _factories() -> tuple[list[Factory], list[Factory]]:
    """Return the middlewares' factories from the settings, in two lists: middlewares
    inside the transaction, and middlewares around it."""
    found: tuple[list[Factory], list[Factory]] = ([], [])
    for path in conf.get().STAGE_MIDDLEWARE:
        try:
            factory = import_string(path)
        except ImportError as error:
            raise ConfigurationError(
                f'TXMSG["STAGE_MIDDLEWARE"] names {path!r}, which cannot be imported: '
                f"{error}"
            ) from error
        found[bool(getattr(factory, "outside_transaction", False))].append(factory)
    return found


class Chain:
    """The middlewares of one stage that run inside its transaction, or those that run
    around it. All threads of the stage share a chain."""

    def __init__(self, stage: Stage, factories: Sequence[Factory]) -> None:
        self._call: ContextVar[_Call] = ContextVar("django_txmsg_call")
        self.empty = True
        self._first: Handler = self._last
        for factory in reversed(factories):
            where = f'TXMSG["STAGE_MIDDLEWARE"] names {factory!r}'
            _checked(factory, where)
            try:
                middleware = factory(CallNext(stage, self._first))
            except MiddlewareNotUsed as error:
                log.debug("stage %r: %r is not used: %s", stage.name, factory, error)
                continue
            self.empty = False
            self._first = _checked(middleware, f"{where}: it returns {middleware!r}")

    def run(
        self,
        message: Message,
        go_on: Handler,
        final: Callable[[BaseException], bool] = lambda error: False,
    ) -> Any:
        """Pass a message through the middlewares to `go_on`, the innermost call.

        Raises the exception of the middlewares. If the middlewares hid an exception of
        `go_on`, raises that exception. If they replaced an exception for which `final`
        returns true, raises the original exception: the middlewares must not decide
        about it. Raises MiddlewareMisused if a middleware returned without calling the
        next one.
        """
        call = _Call(message, go_on)
        token = self._call.set(call)
        try:
            result = self._first(message)
        except BaseException as error:
            raised = call.error
            if raised is not None and raised is not error and final(raised):
                raise raised from cause_of(raised)  # keeps its cause
            raise
        finally:
            self._call.reset(token)
        if call.error is not None:
            raise call.error
        if not call.called:
            raise MiddlewareMisused(
                "A middleware returned without calling call_next(message): the handler "
                "did not run. Raise Refuse to bury a message."
            )
        return result

    def _last(self, message: Message) -> Any:
        call = self._call.get(None)
        if call is None:
            raise MiddlewareMisused(
                "call_next() was called while its middleware processed no message."
            )
        return call.go_on(message)


def _checked(made: object, what: str) -> Any:
    """Return the middleware or factory `made`. Raises ConfigurationError if it is not
    callable or is asynchronous."""
    call = getattr(type(made), "__call__", None)  # noqa: B004 - what, and not whether
    if any(inspect.iscoroutinefunction(one) for one in (made, call)):
        raise ConfigurationError(f"{what}, which is asynchronous: stages are not.")
    if not callable(made):
        raise ConfigurationError(f"{what}, which cannot be called.")
    return made


class _Call:
    """One message that passes through the chain, and whether the handler was called."""

    __slots__ = ("_go_on", "_message", "_thread", "called", "error")

    def __init__(self, message: Message, go_on: Handler) -> None:
        self._message, self._go_on = message, go_on
        self._thread = threading.get_ident()
        self.called = False
        self.error: BaseException | None = None

    def go_on(self, message: Message) -> Any:
        try:
            self._check(message)
            self.called = True
            return self._go_on(message)
        except BaseException as error:
            self.error = error
            raise

    def _check(self, message: Message) -> None:
        if self.called:
            raise MiddlewareMisused(
                "call_next() was called twice for one message. A RedeliveryPolicy "
                "tries again, in a transaction of its own."
            )
        if threading.get_ident() != self._thread:
            raise MiddlewareMisused(
                "call_next() was called from another thread, which has no part in the "
                "stage's transaction."
            )
        if message.id != self._message.id:
            raise MiddlewareMisused(
                f"call_next() was given message {message.id} in place of "
                f"{self._message.id}. It takes the message, or a copy with another "
                f"body or other headers."
            )
