"""Whether an operator has paused a stage."""

from __future__ import annotations

from .rule import Rule

#: Its consumers take no messages now.
PAUSED = Rule("{paused_at} IS NOT NULL")

#: Subquery of the names of all paused stages; a statement reads it once.
PAUSED_NAMES = (
    f"(SELECT p.stage FROM django_txmsg_stagestate p WHERE {PAUSED.sql('p')})"  # noqa: S608 - constants only
)
