"""The user who runs a command, and the audit entry about the command's action."""

from __future__ import annotations

import getpass

from ..models import AuditEntry, BulkOperation
from ..models.monitoring import Deed


def name() -> str:
    """Return the name of the operating system's user. Return "unknown" if the user id
    has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def record(
    using: str,
    deed: Deed,
    text: str,
    *,
    count: int | None = 1,
    operation: BulkOperation | None = None,
) -> None:
    """Record an operator's action in the audit. Call this in the transaction that makes
    the change."""
    entries = AuditEntry.objects.db_manager(using)
    by = f"command: {name()}"
    entries.record(by, text, deed=deed, count=count, operation=operation)
