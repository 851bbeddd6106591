"""Whether an operator has paused a stage."""

from __future__ import annotations

from .rule import Rule

#: Its consumers take nothing now.
PAUSED = Rule("{paused_at} IS NOT NULL")

#: The names of all paused stages, as a subquery: it is read once for a statement.
PAUSED_NAMES = (
    f"(SELECT p.stage FROM django_txmsg_stagestate p WHERE {PAUSED.sql('p')})"  # noqa: S608 - constants only
)
