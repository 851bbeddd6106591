"""The errors that end a job of the pipeline. Each class has its exit code.

PipelineError
├── UsageError            2  the options are invalid
├── EnvironmentFault      3  a database, a lake or Spark is unusable
└── VerificationRefused   4  a proof failed, and nothing was deleted
"""

from __future__ import annotations

import re
from typing import ClassVar


class PipelineError(Exception):
    """A job failed; the message says what to do next."""

    exit_code: ClassVar[int] = 3


class UsageError(PipelineError):
    """The options contradict each other, or name something that does not exist."""

    exit_code = 2


class EnvironmentFault(PipelineError):
    """A database cannot be reached, a lake is not ours, a lock is held."""

    exit_code = 3


class VerificationRefused(PipelineError):
    """Rows in the database differ from the lake's. None were deleted."""

    exit_code = 4


def told_by_spark(error: Exception) -> PipelineError:
    """Return the meaning of an error from a Spark job: an error of ours that a task has
    raised, wherever it ran, or a fault of Spark's environment."""
    text = str(error)
    for kind in (VerificationRefused, EnvironmentFault, UsageError):
        found = re.search(rf"\b{__name__}\.{kind.__name__}: (.+)", text)
        if found:
            return kind(found[1].strip())
    # The last line of the first traceback has the error; without a traceback the first
    # line.
    within = text.partition("Traceback (most recent call last)")[2]
    lines = [line.strip(": ") for line in (within or text).splitlines()]
    raised = [one for one in lines if re.match(r"[\w.]+(Error|Exception): ", one)]
    said = (raised or list(filter(None, lines)) or [type(error).__name__])[0]
    return EnvironmentFault(f"Spark gave up: {said}")
