"""Applies TXMSG["MASK"] to the texts in which Celery shows a task's arguments.

`argsrepr` and `kwargsrepr` travel in headers and events, to the logs of workers and to
monitors. The arguments themselves are in the body, which is masked where it is shown.
"""

from __future__ import annotations

from typing import Any

from celery.utils.saferepr import saferepr
from kombu.utils import json

from .. import conf, wire
from ..dead_letters import masking

HIDDEN = "(masked)"
#: As long as Celery's own.
_LONGEST = 1024
#: The third part of a body, if nothing follows the task.
_NOTHING = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))


def hidden(destination: str, arguments: tuple[Any, Any]) -> dict[str, str]:
    """Return Celery's options with the masked texts of a call's arguments; none without
    a mask."""
    if conf.get().MASK is None:
        return {}
    args, kwargs = arguments
    shown: Any = None
    try:
        body = json.dumps([args or [], kwargs or {}, _NOTHING]).encode()
    except Exception:
        body = None  # it is for another serializer, and not to be shown
    if body is not None:
        _, shown = masking.shown(destination, {}, body, wire.JSON)
    texts = (HIDDEN, HIDDEN)
    if isinstance(shown, list | tuple) and len(shown) == 3:
        texts = (saferepr(shown[0], _LONGEST), saferepr(shown[1], _LONGEST))
    return dict(zip(("argsrepr", "kwargsrepr"), texts, strict=True))
