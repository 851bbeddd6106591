"""Whether the dead letters of an error are counted."""

from __future__ import annotations

from .rule import Rule

#: They are not counted until the mute ends.
MUTED = Rule("{muted} AND ({muted_until} IS NULL OR {muted_until} > {now})")
