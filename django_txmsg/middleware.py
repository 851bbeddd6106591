"""Hop 1 in a web process: a request's data and messages, both or neither.

The transaction begins right before the view and ends after it, below every middleware
that stands above this one. Sync views get it, under WSGI and under ASGI; an async view
opens its own inside `sync_to_async()`. See docs/explanation/http-outbox.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.db import connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import conf, idempotency
from .session import OutboxSession

log = logging.getLogger("django_txmsg.middleware")

View = TypeVar("View", bound=Callable[..., Any])

#: The alias whose transaction the middleware has open for the request at hand.
_covered: ContextVar[str | None] = ContextVar("django_txmsg_covered", default=None)


def no_outbox(view: View) -> View:
    """Mark a view that the middleware leaves alone: it gets no transaction.

    Above other decorators or below them; on a class-based view, with
    `@method_decorator(no_outbox, name="dispatch")`.
    """
    view._txmsg_no_outbox = True  # type: ignore[attr-defined]
    return view


class OutboxMiddleware:
    """Begin, run the view, send the control message, commit, dispatch."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
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
        except BaseException as error:
            _abandon(request, error)
            raise
        return _finish(request, response)

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        # The connection belongs to the thread that runs this request's sync code.
        try:
            response: HttpResponseBase = await self.get_response(request)
        except BaseException as error:
            # As when the client has gone and the request is cancelled.
            if _session(request) is not None:
                await sync_to_async(_abandon)(request, error)
            raise
        if _session(request) is None:
            return response
        return await sync_to_async(_finish)(request, response)

    def process_view(
        self, request: HttpRequest, view: Callable[..., Any], *_: Any
    ) -> HttpResponseBase | None:
        """Begin the session, now that the view is known."""
        using = conf.get().HTTP.USING
        if (
            iscoroutinefunction(view)
            or getattr(view, "_txmsg_no_outbox", False)
            or using in getattr(view, "_non_atomic_requests", ())
            or _session(request) is not None
        ):
            return None
        session = OutboxSession(using)
        session.begin()
        request.outbox_session = session  # type: ignore[attr-defined]
        _covered.set(using)
        if connections.settings[using]["ATOMIC_REQUESTS"]:
            _spare_second_transaction(view)
        if not conf.get().HTTP.IDEMPOTENCY:
            return None
        answer = idempotency.claim(request, using)
        if answer is not None:
            _end(session.rollback, request)
        return answer

    def process_exception(self, request: HttpRequest, error: Exception) -> None:
        """Note that the view raised, whatever response is made of it."""
        if _session(request) is not None:
            request._txmsg_error = error  # type: ignore[attr-defined]


def _finish(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Commit or roll back by the response; raise what makes a commit impossible."""
    session = _session(request)
    if session is None:
        return response
    status = response.status_code
    if (
        status >= 500
        or getattr(request, "_txmsg_error", None) is not None
        or (status >= 400 and (conf.get().HTTP.ROLLBACK_ON_4XX or session.spoiled))
    ):
        _end(session.rollback, request)
        return response
    try:
        idempotency.keep(request, response, session.using)
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


def _abandon(request: HttpRequest, error: BaseException) -> None:
    session = _session(request)
    if session is not None:
        _end(session.rollback, request)


def _end(how: Callable[[], None], request: HttpRequest) -> None:
    request._txmsg_over = True  # type: ignore[attr-defined]
    _covered.set(None)
    how()


def _session(request: HttpRequest) -> OutboxSession | None:
    if getattr(request, "_txmsg_over", False):
        return None
    return getattr(request, "outbox_session", None)


class _NonAtomic(set[str]):
    """A view's `non_atomic_requests`, and the alias whose transaction is open: Django
    would put ATOMIC_REQUESTS' own transaction, a savepoint now, into it."""

    def __contains__(self, alias: object) -> bool:
        return alias == _covered.get() or super().__contains__(alias)


def _spare_second_transaction(view: Any) -> None:
    declared: set[str] = getattr(view, "_non_atomic_requests", set())
    if not isinstance(declared, _NonAtomic):
        try:
            view._non_atomic_requests = _NonAtomic(declared)
        except AttributeError:
            # A bound method takes no attributes; the savepoint does no harm.
            log.debug("%r runs in a savepoint of its own", view)
