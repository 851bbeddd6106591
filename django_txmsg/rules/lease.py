"""Whether a worker holds a row: the same in the outbox and in the inbox."""

from __future__ import annotations

from .rule import Rule

#: A worker holds it.
HELD = Rule("{lease_until} >= {now}")

#: No worker holds it, or one that has let its lease end.
FREE = Rule("({lease_until} IS NULL OR {lease_until} < {now})")
