"""The tables. Only this package changes the states of rows."""

from __future__ import annotations

from django.apps import apps

from ..errors import ConfigurationError

# Django's own text, on the first model, does not say what to do.
if not apps.is_installed("django_txmsg"):
    raise ConfigurationError('Add "django_txmsg" to INSTALLED_APPS.')

from .batch import Batch, Branch
from .bulk_operation import BulkOperation
from .dead_letter import Attempt, DeadLetter, FailureNote
from .http_outbox import DatabaseIdentity, IdempotencyKey, SessionRecord
from .inbox import InboxMessage
from .key_tail import KeyTail
from .monitoring import Alert, AuditEntry, PeriodCount
from .outbox import OutboxMessage
from .queue import QueueMessage, QueueSubscription
from .run import FlowStep, FlowUndo, Run
from .schedule import Schedule
from .stage import RateLine, StageState, StopRequest
from .task_run import TaskRun
from .worker import Worker

__all__ = [
    "Alert",
    "Attempt",
    "AuditEntry",
    "Batch",
    "Branch",
    "BulkOperation",
    "DatabaseIdentity",
    "DeadLetter",
    "FailureNote",
    "FlowStep",
    "FlowUndo",
    "IdempotencyKey",
    "InboxMessage",
    "KeyTail",
    "OutboxMessage",
    "PeriodCount",
    "QueueMessage",
    "QueueSubscription",
    "RateLine",
    "Run",
    "Schedule",
    "SessionRecord",
    "StageState",
    "StopRequest",
    "TaskRun",
    "Worker",
]
