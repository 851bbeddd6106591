"""The HTTP outbox: a request's messages are sent after the request's commit, even if
the process dies."""

from __future__ import annotations

from django.conf import settings
from django.utils.module_loading import import_string

MIDDLEWARE = "django_txmsg.middleware.OutboxMiddleware"


def count_middleware() -> int:
    """Return how many entries of MIDDLEWARE are OutboxMiddleware or a subclass. If
    there is one, requests run in outbox sessions."""
    return sum(map(_is_ours, settings.MIDDLEWARE))


def _is_ours(path: str) -> bool:
    try:
        bases = getattr(import_string(path), "__mro__", ())
    except ImportError:
        return False  # Django says so at the first request
    return MIDDLEWARE in {f"{one.__module__}.{one.__qualname__}" for one in bases}
