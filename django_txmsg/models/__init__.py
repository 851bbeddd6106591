"""The tables. Rows own their transitions: no other module writes their states."""

from __future__ import annotations

from .archive import ArchiveMark, PipelineRun, StagedMessage, StoredRun
from .attempts import Attempt
from .bulk import BulkOperation
from .dead_letters import DeadLetter
from .groups import FailureNote
from .idempotency import IdempotencyKey
from .inbox import InboxMessage
from .outbox import OutboxMessage
from .periods import PeriodCount
from .queue import QueueMessage, QueueSubscription
from .sessions import SessionRecord
from .stages import StageState
from .workers import Worker

__all__ = [
    "ArchiveMark",
    "Attempt",
    "BulkOperation",
    "DeadLetter",
    "FailureNote",
    "IdempotencyKey",
    "InboxMessage",
    "OutboxMessage",
    "PeriodCount",
    "PipelineRun",
    "QueueMessage",
    "QueueSubscription",
    "SessionRecord",
    "StageState",
    "StagedMessage",
    "StoredRun",
    "Worker",
]
