"""How a worker handles one delivery of a OnceTask."""

from __future__ import annotations

from celery.worker.request import Request


class OnceRequest(Request):  # type: ignore[misc]  # published without type hints
    """A request that goes back to its queue whenever the process of its task dies."""

    # Celery stores the result before the chord counts the task. Since Celery 5.7, a
    # stored result means for Celery that the task has ended. Celery has no option for
    # that. If Celery renames this method, a test with a killed process fails.
    def _success_was_stored(self) -> bool:
        return False
