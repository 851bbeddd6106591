"""The tables. Only this package changes the states of rows."""

from __future__ import annotations

from django.apps import apps

from ..errors import ConfigurationError

# Django's own text, on the first model, does not say what to do.
if not apps.is_installed("django_txmsg"):
    raise ConfigurationError('Add "django_txmsg" to INSTALLED_APPS.')

from .alert import Alert
from .attempt import Attempt
from .audit_entry import AuditEntry
from .batch import Batch
from .branch import Branch
from .bulk_operation import BulkOperation
from .database_identity import DatabaseIdentity
from .dead_letter import DeadLetter
from .failure_note import FailureNote
from .flow_step import FlowStep
from .flow_undo import FlowUndo
from .idempotency_key import IdempotencyKey
from .inbox import InboxMessage
from .key_tail import KeyTail
from .outbox import OutboxMessage
from .period_count import PeriodCount
from .queue import QueueMessage, QueueSubscription
from .rate_line import RateLine
from .run import Run
from .schedule import Schedule
from .session_record import SessionRecord
from .stage_state import StageState
from .stop_request import StopRequest
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
