"""The errors that end a job of the pipeline. Each class has its exit code.

PipelineError
├── UsageError            2  the options are invalid
├── EnvironmentFault      3  a database, a lake or Spark is unusable
│   └── SpoiltFile        3  a file of the lake is unreadable or has changed
└── VerificationRefused   4  a proof failed, and nothing was deleted
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class PipelineError(Exception):
    """A job failed. The message says what to do next."""

    exit_code: ClassVar[int] = 3


class UsageError(PipelineError):
    """The options contradict each other, or one of them names something that does not
    exist."""

    exit_code = 2


class EnvironmentFault(PipelineError):
    """A database cannot be reached, a directory is not a lake of this package, or
    another process holds a lock."""


class SpoiltFile(EnvironmentFault):
    """A file of the lake cannot be read, or has changed since it was written."""


class VerificationRefused(PipelineError):
    """Rows in the database differ from their copies in the lake, and were not
    deleted."""

    exit_code = 4


def reason(error: object) -> str:
    """Return the text of an error in one line, without the backtrace that the Delta
    library appends."""
    return " ".join(str(error).partition("\n   0: ")[0].split())


def spoilt(path: str, error: object) -> SpoiltFile:
    """Return a SpoiltFile error for this file, with the reader's error in its
    message."""
    return SpoiltFile(
        f"{path} cannot be read: {reason(error)}. Restore this file from a backup. If "
        "it is a file of the lake, `pipeline verify` names all that are spoilt."
    )


_FULL = (
    " The disk is full. Nothing is lost: make room, and run again. `pipeline sweep` "
    "removes from a lake the files that failed runs have left, and those that were "
    "replaced."
)
#: Advice, by what every library says of a disk without room, of a quota that is used
#: up, of a file that may not grow further, and of a server that expects a password.
_ADVICE = {
    "no password supplied": " Set the environment variable TXMSG_PASSWORD_NAME, with "
    "the service's name in capitals as NAME, before you run the job.",
    os.strerror(errno.ENOSPC): _FULL,
    os.strerror(errno.EDQUOT): _FULL,
    os.strerror(errno.EFBIG): " Nothing is lost: raise the limit of this user (`ulimit "
    "-f`), or use a file system that allows larger files, and run again.",
}
#: The errors of files and of the Delta library. Each driver of a database has its own
#: OperationalError and InterfaceError (PEP 249).
_OUTSIDE = frozenset(["OSError", "DeltaError", "OperationalError", "InterfaceError"])


def is_outside(error: Exception) -> bool:
    """Return whether an error says that a file, a database or a table's log cannot be
    used."""
    return not _OUTSIDE.isdisjoint(one.__name__ for one in type(error).__mro__)


@contextmanager
def faults_told() -> Iterator[None]:
    """If the block fails because a file, a database or a table's log cannot be used,
    raise EnvironmentFault instead of the original error. If a disk is full, or a file
    too large, the error contains advice."""
    try:
        yield
    except Exception as error:
        said = reason(error)
        advice = next((text for one, text in _ADVICE.items() if one in said), "")
        if not advice and not is_outside(error):
            raise
        if len(said) > 600:  # a query is at the beginning or at the end
            said = f"{said[:300]} … {said[-300:]}"
        raise EnvironmentFault(f"{said}.{advice}") from error


def from_spark(error: Exception) -> PipelineError:
    """Convert an error of Spark to a PipelineError. An error that one of our tasks
    raised keeps its class, on whatever machine the task ran. Most other errors become
    EnvironmentFault."""
    text = str(error)
    # Spark's own reader names the file, and why further below.
    if file := re.search(r"FAILED_READ_FILE\S* .*?reading file (\S+?)\.? ", text):
        why = re.search(r"Caused by: \S*(?:Exception|Error): (.+)", text)
        return spoilt(file[1], why[1] if why else "it is not as it was written")
    for kind in (VerificationRefused, SpoiltFile, EnvironmentFault, UsageError):
        found = re.search(rf"\b{__name__}\.{kind.__name__}: (.+)", text)
        if found:
            return kind(found[1].strip())
    # The last line of the first traceback has the error; without a traceback the first
    # line.
    within = text.partition("Traceback (most recent call last)")[2]
    lines = [line.strip(": ") for line in (within or text).splitlines()]
    raised = [one for one in lines if re.match(r"[\w.]+(Error|Exception): ", one)]
    reason = (raised or list(filter(None, lines)) or [type(error).__name__])[0]
    return EnvironmentFault(f"Spark gave up: {reason}")
