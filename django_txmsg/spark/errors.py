"""What a job of the pipeline can end with. Each class carries its exit code.

PipelineError
├── UsageError            2  what was asked for makes no sense
├── EnvironmentFault      3  a database, a lake or Spark is not as it has to be
└── VerificationRefused   4  a proof failed, and nothing was deleted
"""

from __future__ import annotations

from typing import ClassVar


class PipelineError(Exception):
    """A job could not do its work; the message says what to do next."""

    exit_code: ClassVar[int] = 3


class UsageError(PipelineError):
    """The options do not fit together, or name what is not there."""

    exit_code = 2


class EnvironmentFault(PipelineError):
    """A database cannot be reached, a lake is not ours, a lock is held."""

    exit_code = 3


class VerificationRefused(PipelineError):
    """Rows in the database are not what the lake has of them. None were deleted."""

    exit_code = 4
