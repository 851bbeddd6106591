"""A backend for django.tasks: `enqueue()` stores a task in the open transaction.

    TASKS = {"default": {"BACKEND": "django_txmsg.tasks_backend.TransactionalBackend"}}

This module finds the backends of this package in the TASKS setting, and yields the
stage of each of their queues. It also checks these backends, because the backport of
django.tasks calls a backend's `check()` only if the backport is an installed app.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.utils.module_loading import import_string

from .. import conf
from ..lazy_imports import lazy_names
from ..stages import Stage

if TYPE_CHECKING:
    from .backend import TransactionalBackend

__all__ = ["TransactionalBackend"]


__getattr__, __dir__ = lazy_names(__name__, {".backend": __all__})


def stages() -> Iterator[Stage]:
    """Yield the stage of each queue of each backend."""
    for backend in backends():
        yield from backend.stages()


def backends() -> Iterator[TransactionalBackend]:
    """Yield the backends in the TASKS setting that belong to this package."""
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
    """Return a message for each invalid option, and for each invalid name of a
    queue."""
    return [
        Error(
            f"{problem.path} {problem.message}",
            hint=problem.hint or "See docs/how-to/django-tasks.md for the options.",
            id="txmsg.E040",
        )
        for backend in ([] if conf.problems() else backends())
        for problem in backend.problems()
    ]
