"""A backend for django.tasks: `enqueue()` stores in the running transaction.

TASKS = {"default": {"BACKEND": "django_txmsg.tasks_backend.TransactionalBackend"}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TransactionalBackend

__all__ = ["TransactionalBackend"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .backend import TransactionalBackend

        return TransactionalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
