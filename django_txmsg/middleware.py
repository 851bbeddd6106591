"""Hop 1 in a web process: a request's data and messages commit together or not at all.

The transaction begins right before the view and ends after it, inside every middleware
that is listed before this one. Sync views get this transaction, under WSGI and ASGI. An
async view opens its own transaction inside `sync_to_async()`. See
docs/explanation/http-outbox.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakSet

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.handlers.base import BaseHandler
from django.db import OperationalError
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import conf
from .http_outbox import idempotency
from .http_outbox.session import OutboxSession
from .sending.scope import enter_scope

log = logging.getLogger("django_txmsg.middleware")

View = Callable[..., Any]
Marked = TypeVar("Marked", bound=View)


def no_outbox(view: Marked) -> Marked:
    """Exempt a view from the middleware, so that the view gets no transaction. Other
    decorators may be above or below this one. For a class-based view use
    `@method_decorator(no_outbox, name="dispatch")`."""
    view._txmsg_no_outbox = True  # type: ignore[attr-defined]  # a mark on a function
    return view


class OutboxMiddleware:
    """Runs each view in a transaction. The steps are: begin, run the view, send the
    control message, commit, dispatch."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        wrap_views()
        self.get_response = get_response
        self._async = iscoroutinefunction(get_response)
        if self._async:
            markcoroutinefunction(self)

    def __call__(
        self, request: HttpRequest
    ) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self._async:
            return self._call_async(request)
        try:
            response: HttpResponseBase = self.get_response(request)
        except BaseException:
            _abandon(request)
            raise
        return _finish(request, response)

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        # The connection belongs to the thread that runs this request's sync code.
        try:
            response: HttpResponseBase = await self.get_response(request)
        except BaseException:
            # The client may have disconnected and the request been cancelled, even
            # while process_view() runs: its thread reaches this point afterwards.
            await _to_the_end(_abandon, request)
            raise
        if _session(request) is None:
            return response
        finished: HttpResponseBase = await _to_the_end(_finish, request, response)
        return finished

    def process_view(
        self, request: HttpRequest, view: Callable[..., Any], *_: Any
    ) -> HttpResponseBase | None:
        """Begin the session if the view needs one. Django calls this method after it
        has chosen the view and before it runs the view."""
        using = conf.get().HTTP.USING
        if (
            iscoroutinefunction(view)
            or getattr(view, "_txmsg_no_outbox", False)
            or is_non_atomic(view, using)
            or getattr(request, "_txmsg_over", False)
            or _session(request) is not None
        ):
            if _session(request) is None and idempotency.wanted(request):
                return idempotency.impossible()
            return None
        reading = request.method in idempotency.SAFE_METHODS and view not in _writing
        session = OutboxSession(using, reading=reading)
        session.begin()
        request.outbox_session = session  # type: ignore[attr-defined]  # kept on the request
        answer = idempotency.claim(request, using)
        if answer is not None:
            _end(session.rollback, request)
        return answer


async def _to_the_end(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function to its end in the thread of this request's sync code, even if this
    task is cancelled."""
    try:
        return await asyncio.shield(sync_to_async(work)(*arguments))
    finally:
        # The shield's context is a copy of this one, which is reset here too.
        enter_scope(None)


def _finish(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Commit or roll back, depending on the response. Raises the error that prevents
    the commit."""
    session = _session(request)
    if session is None:
        return response
    status = response.status_code
    if (
        status >= 500
        or getattr(request, "_txmsg_error", None) is not None
        or (status >= 400 and (conf.get().HTTP.ROLLBACK_ON_4XX or session.spoiled))
        or idempotency.is_free_again(request, response)
    ):
        _end(session.rollback, request)
        return response
    try:
        if not session.rolls_back:
            idempotency.keep(request, response, session.using, session.stored_as)
    except BaseException:
        _end(session.rollback, request)
        raise
    try:
        _end(session.commit, request)
    except Exception as error:
        if not session.committed:
            raise
        log.exception(
            "an on_commit hook raised after the request was committed; its response "
            "is sent nevertheless: %s",
            error,
        )
    return response


def _abandon(request: HttpRequest) -> None:
    session = _session(request)
    request._txmsg_over = True  # type: ignore[attr-defined]  # kept on the request
    if session is not None:
        session.rollback()


def _end(how: Callable[[], None], request: HttpRequest) -> None:
    request._txmsg_over = True  # type: ignore[attr-defined]  # kept on the request
    how()


def _session(request: HttpRequest) -> OutboxSession | None:
    if getattr(request, "_txmsg_over", False):
        return None
    return getattr(request, "outbox_session", None)


def _note(request: HttpRequest, error: Exception) -> None:
    """Record an exception of a view or its template. This runs before other middlewares
    turn the exception into a response."""
    session = _session(request)
    if session is not None:
        request._txmsg_error = error  # type: ignore[attr-defined]  # kept on the request
        if isinstance(error, OperationalError) and session.refused_to_write(error):
            _take_lock_from_now_on(request)  # its template has written


def _around(view: View, atomic: View, without_atomic: Callable[[str], View]) -> View:
    """Return a view that runs `view` inside the session's transaction. That transaction
    replaces the block of ATOMIC_REQUESTS on the same database. The blocks on other
    databases stay: `without_atomic` returns the view without the block of one database.
    An async view has no session: return `atomic`, which runs the view inside all
    blocks."""
    if iscoroutinefunction(view):
        return atomic

    @functools.wraps(view)
    def run(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        session = _session(request)
        if session is None:
            return atomic(request, *args, **kwargs)
        mine = without_atomic(session.using)
        try:
            return mine(request, *args, **kwargs)
        except OperationalError as error:
            if not session.refused_to_write(error):
                raise
            log.info("%s writes after it has read: it runs again: %s", view, error)
        _take_lock_from_now_on(request)
        _begin_again(request, session)
        return mine(request, *args, **kwargs)

    return run


#: Views whose GET turned out to write: on SQLite their transactions begin with the
#: write lock.
_writing: WeakSet[View] = WeakSet()


def _take_lock_from_now_on(request: HttpRequest) -> None:
    assert request.resolver_match is not None  # the view may be in wrappers by now
    with contextlib.suppress(TypeError):  # not every callable can be remembered
        _writing.add(request.resolver_match.func)


def _begin_again(request: HttpRequest, session: OutboxSession) -> None:
    session.rollback()
    again = OutboxSession(session.using)
    again.metadata = session.metadata
    request.outbox_session = again  # type: ignore[attr-defined]  # kept on the request
    again.begin()


# Every use of Django's undocumented parts around views: the blocks of
# ATOMIC_REQUESTS, and the exceptions of views. `django_internals.py` has all other such
# uses.


def is_non_atomic(view: View, using: str) -> bool:
    """Return whether a view has `transaction.non_atomic_requests()`."""
    return using in getattr(view, "_non_atomic_requests", ())


def wrap_views() -> None:
    """Make every request handler run each view inside `_around()`, and report each
    exception of a view or of its template to `_note()`. Only the first call in a
    process has an effect.

    This function replaces two methods of Django's BaseHandler. A middleware could not
    do the same: a middleware surrounds more than the view, and the process_exception()
    of another middleware may run first.
    """
    usual = BaseHandler.make_view_atomic
    usual_handler = BaseHandler.process_exception_by_middleware
    if hasattr(usual, "txmsg"):
        return

    @functools.wraps(usual_handler)
    def process_exception(
        handler: BaseHandler, error: Exception, request: HttpRequest
    ) -> Any:
        _note(request, error)
        return usual_handler(handler, error, request)

    @functools.wraps(usual)
    def made_atomic(handler: BaseHandler, view: View) -> View:
        def without_atomic(using: str) -> View:
            # Set on a new function, since the view may be used elsewhere.
            def bare(*args: Any, **kwargs: Any) -> Any:
                return view(*args, **kwargs)

            declared: set[str] = getattr(view, "_non_atomic_requests", set())
            bare._non_atomic_requests = {*declared, using}  # type: ignore[attr-defined]  # a mark on a function
            return usual(handler, bare)

        return _around(view, usual(handler, view), without_atomic)

    made_atomic.txmsg = True  # type: ignore[attr-defined]  # a mark on a function
    handlers: Any = BaseHandler
    handlers.make_view_atomic = made_atomic
    handlers.process_exception_by_middleware = process_exception
