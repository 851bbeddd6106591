"""Every use of Django's undocumented parts around views: the blocks of ATOMIC_REQUESTS,
and the exceptions of views. `django_internals.py` has all other such uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.core.handlers.base import BaseHandler
from django.http import HttpRequest

View = Callable[..., Any]


def is_non_atomic(view: View, using: str) -> bool:
    """Return whether a view has `transaction.non_atomic_requests()`."""
    return using in getattr(view, "_non_atomic_requests", ())


def wrap_views(
    wrap: Callable[[View, View, Callable[[str], View]], View],
    hear: Callable[[HttpRequest, Exception], None],
) -> None:
    """Make every request handler call `wrap` for each view, and run the view that
    `wrap` returns. Call this once per process.

    `wrap` gets three arguments: the view, the view inside the blocks of
    ATOMIC_REQUESTS, and a function that returns the view inside all but one of these
    blocks. The argument of that function is the database whose block is omitted.

    `hear` is called with the request and each exception of a view or of its template.
    This happens before the process_exception() of any middleware.

    This function replaces two methods of Django's BaseHandler. The new methods call
    `wrap` and `hear`. A middleware could not do the same: a middleware surrounds more
    than the view, and the process_exception() of another middleware may run first.
    """
    usual = BaseHandler.make_view_atomic
    usual_handler = BaseHandler.process_exception_by_middleware
    if hasattr(usual, "txmsg"):
        return

    @functools.wraps(usual_handler)
    def process_exception(
        handler: BaseHandler, error: Exception, request: HttpRequest
    ) -> Any:
        hear(request, error)
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

        return wrap(view, usual(handler, view), without_atomic)

    made_atomic.txmsg = True  # type: ignore[attr-defined]  # a mark on a function
    handlers: Any = BaseHandler
    handlers.make_view_atomic = made_atomic
    handlers.process_exception_by_middleware = process_exception
