"""Celery through the outbox: use it in place of `from celery import Celery`.

`Celery` stores tasks called inside a transaction as rows of the outbox, which the relay
sends to Celery's own broker; `TransactionalTask` does so for apps that keep Celery's
class; an `OnceTask` takes effect once, however often it is delivered. See
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

from .app import Celery, OnceTask, TransactionalTask

__all__ = ["Celery", "OnceTask", "TransactionalTask"]
