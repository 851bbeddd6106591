"""Decorates views for monitoring systems: GET only, never cached.

Such a view runs outside transactions, because it must answer even if the database does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction
from django.http import HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe


def probe(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Decorate a view as a probe. For such a view, neither our middleware nor
    ATOMIC_REQUESTS begins a transaction on any database."""
    decorated: Any = require_safe(never_cache(view))
    for alias in connections:
        decorated = transaction.non_atomic_requests(using=alias)(decorated)
    made: Callable[..., HttpResponse] = decorated
    return made
