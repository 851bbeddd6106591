"""The stages that the TASKS setting declares: one for each queue of our backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.conf import settings
from django.utils.module_loading import import_string

from ..stages import Stage

if TYPE_CHECKING:
    from .backend import TransactionalBackend


def stages() -> Iterator[Stage]:
    """Yield the stage of each queue."""
    for backend in backends():
        yield from backend.stages()


def backends() -> Iterator[TransactionalBackend]:
    """Yield the backends of the TASKS setting that are ours."""
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
