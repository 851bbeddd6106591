"""Who runs a command, and the record of what they did with it."""

from __future__ import annotations

import getpass

from ..models import AuditEntry


def name() -> str:
    """Return the user of the operating system, "unknown" if it has no name for them (a
    container with a user id of its own)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def record(using: str, text: str) -> None:
    """Record an action. Call it in the transaction of the action."""
    AuditEntry.objects.db_manager(using).record(f"command: {name()}", text)
