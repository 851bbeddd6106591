"""Storing a task does not contact the result backend, which may be down.

A backend that watches for results (Redis) would be notified of each called task. It is
notified when a caller waits for a result instead, and then also reads results that have
arrived meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

from django.db import connections

from ..django_internals import in_block


def without_asking(app: Any) -> None:
    """In this thread, let only callers that wait contact the app's result backend."""
    backend = app.backend
    if getattr(backend, "is_async", False) and not hasattr(backend, "txmsg"):
        backend.txmsg = _Patience(backend)


class _Patience:
    """Wraps four methods of one backend."""

    def __init__(self, backend: Any) -> None:
        self._call = backend.on_task_call
        self._add = backend.add_pending_result
        self._wait, self._iterate = backend.wait_for_pending, backend.iter_native
        #: Results that no caller has waited for yet, while one could.
        self._results: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        backend.on_task_call = self.on_task_call
        backend.add_pending_result = self.add_pending_result
        backend.wait_for_pending = self.wait_for_pending
        backend.iter_native = self.iter_native

    def on_task_call(self, producer: Any, task_id: str) -> Any:
        """A task is called; it is only stored if its producer is our stand-in."""
        return {} if hasattr(producer, "published") else self._call(producer, task_id)

    def add_pending_result(self, result: Any, **options: Any) -> Any:
        """A result is to be watched, like each of a group's."""
        if not any(map(in_block, connections.all(initialized_only=True))):
            return self._add(result, **options)
        number, results = id(result), self._results
        gone = weakref.ref(result, lambda _: results.pop(number, None))
        results[number] = gone, options
        return result

    def wait_for_pending(self, result: Any, **options: Any) -> Any:
        """A caller waits for one."""
        self._catch_up()
        return self._wait(result, **options)

    def iter_native(self, result: Any, **options: Any) -> Any:
        """A caller waits for a group's results."""
        self._catch_up()
        return self._iterate(result, **options)

    def _catch_up(self) -> None:
        while self._results:
            reference, options = self._results.popitem()[1]
            result = reference()
            if result is not None:
                self._add(result, **options)
