"""The headers of a row of the embedded broker, and the column filled by one of them."""

from __future__ import annotations

import json
import re

from .. import wire
from .base import Outgoing

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_PRIORITY = re.compile(r"-?\d{1,3}", re.ASCII)


def read_headers(written: str) -> tuple[dict[str, str], str]:
    """Return a row's headers as text, and a description of their fault, or "": a row
    may be written by hand, and the column holds any JSON."""
    try:
        given = json.loads(written)
        if not isinstance(given, dict):
            return {}, f"its headers are not an object: {written[:200]}"
        strange = [name for name, value in given.items() if not isinstance(value, str)]
        for name in strange:
            given[name] = json.dumps(given[name])
    except (ValueError, RecursionError) as error:
        return {}, f"its headers cannot be read: {error}"
    if strange:
        return given, f"its header {strange[0][:80]!r} is not text"
    if _UNSTORABLE.search("".join([*given, *given.values()])):
        return given, "its headers have a NUL or half of a surrogate pair"
    return given, ""


def priority(outgoing: Outgoing) -> dict[str, int]:
    """Return the priority column of a task, if it differs from the default."""
    given = outgoing.headers.get(wire.TASK_PRIORITY, "")
    if not wire.is_task(outgoing.destination) or not _PRIORITY.fullmatch(given):
        return {}
    return {"priority": int(given)}
