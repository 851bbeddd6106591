"""Storing a task asks no result backend, which may be down.

A backend that watches for results (Redis) would be told of each task when it is called.
It is told when somebody waits for one instead, which asks for what has come meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

from django.db import connections

from ..django_internals import in_block


def without_asking(app: Any) -> None:
    """Have the app's backend, in this thread, asked by those alone that wait."""
    backend = app.backend
    if getattr(backend, "is_async", False) and not hasattr(backend, "txmsg"):
        backend.txmsg = _Patience(backend)


class _Patience:
    """Puts itself before four methods of one backend."""

    def __init__(self, backend: Any) -> None:
        self._call = backend.on_task_call
        self._add = backend.add_pending_result
        self._wait, self._iterate = backend.wait_for_pending, backend.iter_native
        #: What nobody has waited for yet, as long as somebody could.
        self._results: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        backend.on_task_call = self.on_task_call
        backend.add_pending_result = self.add_pending_result
        backend.wait_for_pending = self.wait_for_pending
        backend.iter_native = self.iter_native

    def on_task_call(self, producer: Any, task_id: str) -> Any:
        """A task is called, and stored if its producer only stands in for another."""
        return {} if hasattr(producer, "published") else self._call(producer, task_id)

    def add_pending_result(self, result: Any, **options: Any) -> Any:
        """A result is to be watched, as each of a group's is."""
        if not any(map(in_block, connections.all(initialized_only=True))):
            return self._add(result, **options)
        number, results = id(result), self._results
        gone = weakref.ref(result, lambda _: results.pop(number, None))
        results[number] = gone, options
        return result

    def wait_for_pending(self, result: Any, **options: Any) -> Any:
        """Somebody waits for one."""
        self._catch_up()
        return self._wait(result, **options)

    def iter_native(self, result: Any, **options: Any) -> Any:
        """Somebody waits for a group's."""
        self._catch_up()
        return self._iterate(result, **options)

    def _catch_up(self) -> None:
        while self._results:
            reference, options = self._results.popitem()[1]
            result = reference()
            if result is not None:
                self._add(result, **options)
