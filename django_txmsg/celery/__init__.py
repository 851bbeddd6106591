"""Celery through the outbox: in place of `from celery import Celery`.

`Celery` stores what is called inside a transaction as rows of the outbox, which the
relay hands to Celery's own broker; `TransactionalTask` does so without the app's class;
an `OnceTask` takes effect once, however often it is delivered. See
docs/how-to/celery-outbox.md.
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

from .app import Celery
from .task import OnceTask, TransactionalTask

__all__ = ["Celery", "OnceTask", "TransactionalTask"]
