"""Celery through the outbox: import `Celery` from here in place of `from celery import
Celery`.

`Celery` stores tasks that are called inside a transaction as rows of the outbox. The
relay sends these rows to Celery's own broker. `TransactionalTask` does the same for
apps that keep Celery's class. An `OnceTask` takes effect only once, even if its message
is delivered several times. See docs/how-to/celery-outbox.md.
"""

from __future__ import annotations

try:
    from celery import Celery as _Celery  # noqa: F401 - to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "django_txmsg.celery needs Celery, which is not installed. "
        'Run: pip install "django_txmsg[celery]"',
        name=error.name,
    ) from error

from .app import Celery, OnceTask, TransactionalTask

__all__ = ["Celery", "OnceTask", "TransactionalTask"]
