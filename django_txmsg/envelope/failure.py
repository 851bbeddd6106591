"""The stored form of an exception: its text, its traceback, and a fingerprint by which
failures are grouped.

Reading an exception's text, cause, notes or even class name may run the application's
code, and that code may raise another exception. The failure is recorded even then.
Pure: no Django, no I/O.
"""

from __future__ import annotations

import hashlib
import re
import threading
import traceback as tb
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

#: Longest stored text of an exception, and of a traceback, in characters.
MAX_EXCEPTION = 2_000
MAX_TRACEBACK = 16_384

#: Parts in which texts of the same error differ: ids, numbers, instants.
_VARIABLE = re.compile(r"\b[0-9a-f]{8}[0-9a-f-]{8,}\b|\d+")

_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Failure:
    """The stored form of an error. Failures with the same cause share a fingerprint."""

    exception: str
    traceback: str = ""
    fingerprint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the stored form of `error`. The fingerprint combines the type of the
        error with the module and function of the innermost application frame. The
        fingerprint contains no line number, so edits of the file do not change it."""
        name = name_of(type(error))
        text = f"{name}: {text_of(error)}".rstrip(": ")
        way = _from_the_application(_traceback_of(error))
        trace = _foreign_text(
            lambda: "".join(tb.format_exception(type(error), error, way))
        )
        trace = trace or "".join([*tb.format_tb(way), text])
        where = _application_frame(error)
        digest = hashlib.sha256(f"2|{name}|{where}".encode()).hexdigest()
        return cls(
            _cut(storable(text), MAX_EXCEPTION),
            _cut(storable(trace), MAX_TRACEBACK),
            digest[:16],
        )

    @classmethod
    def because(cls, reason: str, detail: str, kind: str = "") -> Failure:
        """Return the stored form of a failure that no exception has caused: this
        package or the broker has refused the message. The fingerprint is computed from
        the reason and from the text without its numbers and ids, or from `kind` in
        place of the text. So all refusals of one kind have the same fingerprint."""
        same = _VARIABLE.sub("#", storable(kind or detail)[:MAX_EXCEPTION].lower())
        digest = hashlib.sha256(f"2|{reason}|{same}".encode()).hexdigest()
        return cls(_cut(storable(detail), MAX_EXCEPTION), "", digest[:16])


def text_of(error: BaseException) -> str:
    """Return an exception's text. If `str()` raises, return the name of the error that
    `str()` raised."""
    return _foreign_text(lambda: str(error), "<str() raised {}>")


def class_name(error: BaseException) -> str:
    """Return the name of an exception's class, without the module."""
    return _bare_name(type(error))


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is the KeyboardInterrupt of a Ctrl-C. Python raises it
    only in the main thread. In any other thread, application code has raised the
    KeyboardInterrupt, so the error is an ordinary failure."""
    main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and main


def cause_of(error: BaseException) -> BaseException | None:
    """Return the cause of an exception, even if its class overrides the attribute."""
    cause: BaseException | None = vars(BaseException)["__cause__"].__get__(error)
    return cause


def _traceback_of(error: BaseException) -> TracebackType | None:
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return trace


def _foreign_text(call: Callable[[], str], otherwise: str = "") -> str:
    """Return the result of foreign code as plain text. If the code raises, return
    `otherwise` with the name of the exception."""
    try:
        return "".join([call()])
    except BaseException as failed:
        return otherwise.format(name_of(type(failed)))


def name_of(kind: type[BaseException]) -> str:
    """Return the name of an exception's class, with its module."""
    name = _foreign_text(lambda: f"{kind.__module__}.{kind.__qualname__}")
    return (name or _bare_name(kind)).removeprefix("builtins.")


def _bare_name(kind: type[BaseException]) -> str:
    # Bypasses a metaclass that hides it.
    return str(vars(type)["__name__"].__get__(kind))


def _from_the_application(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this package from the beginning of a traceback, if the next
    frame after them belongs to the application. Otherwise return the whole
    traceback."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_OURS):
        rest = rest.tb_next
    return rest if rest is not None and _is_application(rest.tb_frame) else trace


def _application_frame(error: BaseException) -> str:
    frames = [frame for frame, _ in tb.walk_tb(_traceback_of(error))]
    for frame in reversed(frames):
        if _is_application(frame):
            return _place(frame)
    return _place(frames[-1]) if frames else ""


def _is_application(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    library = "site-packages" in path or "/lib/python" in path
    return not library and not path.startswith(_OURS)


def _place(frame: FrameType) -> str:
    # The module, not the file: every app has a file named stages.py.
    module = frame.f_globals.get("__name__") or Path(frame.f_code.co_filename).name
    return f"{module}:{frame.f_code.co_name}"


def storable(text: str) -> str:
    """Return the text with NUL and lone surrogates escaped, because PostgreSQL cannot
    store them."""
    cleaned = text.replace("\x00", "\\x00")
    return cleaned.encode("utf-8", "backslashreplace").decode()


def stored_text(error: BaseException, most: int = MAX_EXCEPTION) -> str:
    """Return the beginning of an exception's text, in a form that every database can
    store. The text may come from a broker, which can send any characters."""
    return storable(text_of(error))[:most]


def _cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters. Remove the middle, because a traceback
    begins with the outermost calls and ends with the error."""
    if len(text) <= most:
        return text
    head = most // 4
    tail = most - head - 40
    return (
        f"{text[:head]}\n… {len(text) - head - tail} characters cut …\n{text[-tail:]}"
    )
