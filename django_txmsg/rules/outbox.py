"""The states of a stored message: `pending → dispatched | dead | cancelled`."""

from __future__ import annotations

from .dead_letters import is_open
from .rule import Rule

#: It must leave yet. In the words of the index that a claim walks.
PENDING = Rule("{dispatched_at} IS NULL AND {dead_at} IS NULL")

#: The same in other words than those of the index that the claim walks: that one looks
#: short to a planner that counted when nothing was pending, and it would be walked from
#: end to end for a few ids or a key. The index of keys is in these words.
PENDING_OTHERWISE = Rule("COALESCE({dispatched_at}, {dead_at}) IS NULL")

#: It should leave now. It is overdue if this held OVERDUE ago already.
DUE = PENDING & Rule("{due_at} <= {now}")

DISPATCHED = Rule("{dispatched_at} IS NOT NULL")

#: It has ended without having left: a relay has given it up.
DEAD = Rule("{dead_at} IS NOT NULL AND {cancelled_at} IS NULL")

#: Somebody has called it back. It is dead by intent, and has no dead letter. (`dead_at`
#: is said for its index.)
CANCELLED = Rule("{dead_at} IS NOT NULL AND {cancelled_at} IS NOT NULL")

#: It may be forgotten, or archived. In words that no index knows: who asks goes by the
#: primary key, and a planner that took a BRIN index for a help would read all of that
#: for each page.
SETTLED = Rule("COALESCE({dispatched_at}, {dead_at}) < {cutoff}") & (
    Rule("{dead_at} IS NULL") | ~is_open("''")
)
