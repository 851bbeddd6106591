"""Who runs a command, and the audit entry of what they did with it."""

from __future__ import annotations

import getpass

from ..models import AuditEntry


def name() -> str:
    """Return the name of the operating system's user; "unknown" if the user id has no
    name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def record(using: str, text: str) -> None:
    """Record an action. Call it in the transaction of the action."""
    AuditEntry.objects.db_manager(using).record(f"command: {name()}", text)
