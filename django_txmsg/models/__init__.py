"""The tables. Only this package changes the states of rows."""

from __future__ import annotations

from django.apps import apps

from ..errors import ConfigurationError

# Django's own text, on the first model, does not say what to do.
if not apps.is_installed("django_txmsg"):
    raise ConfigurationError('Add "django_txmsg" to INSTALLED_APPS.')

from .batch import Batch as Batch
from .batch import Branch as Branch
from .bulk_operation import BulkOperation as BulkOperation
from .dead_letter import Attempt as Attempt
from .dead_letter import DeadLetter as DeadLetter
from .dead_letter import FailureNote as FailureNote
from .http_outbox import DatabaseIdentity as DatabaseIdentity
from .http_outbox import IdempotencyKey as IdempotencyKey
from .http_outbox import SessionRecord as SessionRecord
from .inbox import InboxMessage as InboxMessage
from .monitoring import Alert as Alert
from .monitoring import AuditEntry as AuditEntry
from .monitoring import PeriodCount as PeriodCount
from .outbox import KeyTail as KeyTail
from .outbox import OutboxMessage as OutboxMessage
from .queue import QueueMessage as QueueMessage
from .queue import QueueSubscription as QueueSubscription
from .run import FlowStep as FlowStep
from .run import FlowUndo as FlowUndo
from .run import Run as Run
from .schedule import Schedule as Schedule
from .stage import RateLine as RateLine
from .stage import StageState as StageState
from .stage import StopRequest as StopRequest
from .task_run import TaskRun as TaskRun
from .worker import Worker as Worker
