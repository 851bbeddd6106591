"""What Celery writes of a task's arguments for people to read respects TXMSG["MASK"].

`argsrepr` and `kwargsrepr` travel in the headers, into the logs of workers and into
monitors; the arguments themselves are the body, which is masked where it is shown.
"""

from __future__ import annotations

import json

from celery.utils.saferepr import saferepr

from .. import conf
from ..brokers.celery.publication import Publication
from ..dead_letters import masking

HIDDEN = "(masked)"
#: As long as Celery's own.
_LONGEST = 1024


def apply(destination: str, task: Publication) -> None:
    """Replace the arguments' text in the headers of a task, and of its events, by what
    the mask leaves of them."""
    if conf.get().MASK is None:
        return
    _, shown = masking.shown(destination, {}, task.body, task.content_type)
    if isinstance(shown, list | tuple) and len(shown) == 3:
        args, kwargs = (saferepr(one, _LONGEST) for one in shown[:2])
    else:
        args = kwargs = HIDDEN
    task.headers["argsrepr"], task.headers["kwargsrepr"] = args, kwargs
    for event in task.then:
        event.body = json.dumps(
            {**json.loads(event.body), "args": args, "kwargs": kwargs}
        ).encode()
