"""Around every view: the blocks of ATOMIC_REQUESTS, and what views raise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.core.handlers.base import BaseHandler
from django.http import HttpRequest

View = Callable[..., Any]


def is_non_atomic(view: View, using: str) -> bool:
    """Return whether `transaction.non_atomic_requests()` was said of a view."""
    return using in getattr(view, "_non_atomic_requests", ())


def wrap_views(
    wrap: Callable[[View, View, Callable[[str], View]], View],
    hear: Callable[[HttpRequest, Exception], None],
) -> None:
    """Have every handler run views as `wrap` says, and tell `hear` first of what they
    and their templates raise. Once a process.

    `wrap` is given a view, the view inside the blocks that ATOMIC_REQUESTS puts around
    it, and what returns the same without the block of one database. These methods are
    the one place before every process_exception(), and the one around a view alone.
    """
    usual = BaseHandler.make_view_atomic
    asking = BaseHandler.process_exception_by_middleware
    if hasattr(usual, "txmsg"):
        return

    @functools.wraps(asking)
    def asked(handler: BaseHandler, error: Exception, request: HttpRequest) -> Any:
        hear(request, error)
        return asking(handler, error, request)

    @functools.wraps(usual)
    def made_atomic(handler: BaseHandler, view: View) -> View:
        def without_atomic(using: str) -> View:
            # Another function, with a set of its own: the view may be used elsewhere.
            def bare(*args: Any, **kwargs: Any) -> Any:
                return view(*args, **kwargs)

            declared: set[str] = getattr(view, "_non_atomic_requests", set())
            bare._non_atomic_requests = {*declared, using}  # type: ignore[attr-defined]  # a mark on a function
            return usual(handler, bare)

        return wrap(view, usual(handler, view), without_atomic)

    made_atomic.txmsg = True  # type: ignore[attr-defined]  # a mark on a function
    handlers: Any = BaseHandler
    handlers.make_view_atomic = made_atomic
    handlers.process_exception_by_middleware = asked
