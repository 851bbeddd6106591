"""Whether a worker holds a row, for both the outbox and the inbox."""

from __future__ import annotations

from .rule import Rule

#: A worker holds it.
HELD = Rule("{lease_until} >= {now}")

#: No worker holds it, or the worker's lease has ended.
FREE = Rule("({lease_until} IS NULL OR {lease_until} < {now})")
