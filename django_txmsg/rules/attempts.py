"""When the failed attempts at a message may be forgotten: with the message."""

from __future__ import annotations

from . import inbox
from .dead_letters import is_open
from .rule import Rule

#: The inbox has yet to remember the message.
_REMEMBERED = Rule(
    "EXISTS (SELECT 1 FROM django_txmsg_inboxmessage i WHERE"  # noqa: S608 - constants only
    " i.message_id = {message_id} AND i.stage = {stage}"
    f" AND {(~inbox.SETTLED).sql('i', cutoff='{cutoff}')})"
)

#: It may be forgotten, or archived: neither does its stage remember the message, nor
#: has an operator to read the tracebacks of its dead letter.
SETTLED = Rule("{failed_at} < {cutoff}") & ~_REMEMBERED & ~is_open("{stage}")
