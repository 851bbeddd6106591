"""The pipeline's tables. Its jobs use them in plain SQL, since they have no Django."""

from __future__ import annotations

from .archive_mark import ArchiveMark
from .finding import Finding
from .pipeline_alert import PipelineAlert
from .pipeline_run import PipelineRun
from .staged_message import StagedMessage
from .stored_run import StoredRun

__all__ = [
    "ArchiveMark",
    "Finding",
    "PipelineAlert",
    "PipelineRun",
    "StagedMessage",
    "StoredRun",
]
