"""A backend for django.tasks: `enqueue()` stores a task in the open transaction.

TASKS = {"default": {"BACKEND": "django_txmsg.tasks_backend.TransactionalBackend"}}

This module finds such backends in the setting: each has a stage for each queue. Their
checks are here and not in the backend's own `check()`: the backport calls that only if
it is installed as an app.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.utils.module_loading import import_string

from .. import conf
from ..stages import Stage

if TYPE_CHECKING:
    from .backend import TransactionalBackend

__all__ = ["TransactionalBackend"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from .backend import TransactionalBackend

        return TransactionalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def stages() -> Iterator[Stage]:
    """Yield the stage of each queue."""
    for backend in backends():
        yield from backend.stages()


def backends() -> Iterator[TransactionalBackend]:
    """Yield the backends in the TASKS setting that are this package's."""
    given = getattr(settings, "TASKS", None) or {}
    for alias, params in given.items():
        if _is_ours(params.get("BACKEND", "")):
            from .framework import task_backends

            yield task_backends[alias]  # type: ignore[misc]  # it is one


def _is_ours(path: str) -> bool:
    if path.startswith(("django.tasks.", "django_tasks.")):
        return False
    try:
        found = import_string(path)
    except ImportError:
        if path.startswith("django_txmsg."):
            raise
        return False  # the framework reports it
    from .backend import TransactionalBackend

    return isinstance(found, type) and issubclass(found, TransactionalBackend)


@register("txmsg")
def check(**_: object) -> list[CheckMessage]:
    """Return what is wrong with the options and the names of queues."""
    return [] if conf.problems() else list(_found())


def _found() -> Iterator[CheckMessage]:
    for backend in backends():
        for name, why in backend.problems():
            yield Error(
                f"{name} {why}.",
                hint="See docs/how-to/django-tasks.md for the options.",
                id="txmsg.E040",
            )
