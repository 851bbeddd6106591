"""An exception as it is kept: its text, its traceback, and a fingerprint to group by.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import hashlib
import re
import traceback as tb
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

#: Longest text kept of an exception and of a traceback, in characters.
MAX_EXCEPTION = 2_000
MAX_TRACEBACK = 16_384

#: What differs between two texts that say the same: ids, numbers, instants.
_VARIABLE = re.compile(r"\b[0-9a-f]{8}[0-9a-f-]{8,}\b|\d+")

_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an error. Two failures of one cause share a fingerprint."""

    exception: str
    traceback: str = ""
    fingerprint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what is kept of `error`: its type and the module and function of the
        innermost application frame make the fingerprint, without line numbers, so
        that it survives an edit."""
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        name = name.removeprefix("builtins.")
        text = f"{name}: {error}".rstrip(": ")
        trace = "".join(tb.format_exception(error))
        where = _application_frame(error)
        digest = hashlib.sha256(f"2|{name}|{where}".encode()).hexdigest()
        return cls(
            _cut(_clean(text), MAX_EXCEPTION),
            _cut(_clean(trace), MAX_TRACEBACK),
            digest[:16],
        )

    @classmethod
    def because(cls, reason: str, detail: str) -> Failure:
        """Return a failure without an exception: a verdict of our own, or a broker's.
        The words make the fingerprint too, but for numbers and ids in them: a broker
        refuses for reasons that have nothing in common."""
        same = _VARIABLE.sub("#", _clean(detail)[:MAX_EXCEPTION].lower())
        digest = hashlib.sha256(f"2|{reason}|{same}".encode()).hexdigest()
        return cls(_cut(_clean(detail), MAX_EXCEPTION), "", digest[:16])


def _application_frame(error: BaseException) -> str:
    frames = [frame for frame, _ in tb.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        path = frame.f_code.co_filename
        library = "site-packages" in path or "/lib/python" in path
        if not library and not path.startswith(_OURS):
            return _place(frame)
    return _place(frames[-1]) if frames else ""


def _place(frame: FrameType) -> str:
    # The module and not the file: every app has a file named stages.py.
    module = frame.f_globals.get("__name__") or Path(frame.f_code.co_filename).name
    return f"{module}:{frame.f_code.co_name}"


def _clean(text: str) -> str:
    # A lone surrogate cannot be stored as UTF-8, nor NUL in PostgreSQL's text.
    cleaned = text.replace("\x00", "\\x00")
    return cleaned.encode("utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    """Keep both ends: the first line tells the way in, the last ones the error."""
    if len(text) <= most:
        return text
    head = most // 4
    tail = most - head - 40
    return (
        f"{text[:head]}\n… {len(text) - head - tail} characters cut …\n{text[-tail:]}"
    )
