"""When recorded failed attempts may be deleted: together with their message."""

from __future__ import annotations

from . import inbox
from .dead_letters import is_open
from .rule import Rule

#: The inbox still needs the message.
_REMEMBERED = Rule(
    "EXISTS (SELECT 1 FROM django_txmsg_inboxmessage i WHERE"  # noqa: S608 - constants only
    " i.message_id = {message_id} AND i.stage = {stage}"
    f" AND {(~inbox.SETTLED).sql('i', cutoff='{cutoff}')})"
)

#: The attempt may be deleted or archived: its stage no longer remembers the message,
#: and no open dead letter needs its traceback.
SETTLED = Rule("{failed_at} < {cutoff}") & ~_REMEMBERED & ~is_open("{stage}")
