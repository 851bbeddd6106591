"""Messages after a OnceTask's commit: its own, its links, the rest of its chain.

If they cannot be sent, the task's message goes back to its queue, and its copy sends
them, without running the task again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import signature
from celery.exceptions import ImproperlyConfigured, Reject
from kombu.exceptions import EncodeError

from ..brokers.celery.publication import Publication
from . import publishing, running
from .link_ids import cause_of, identified

log = logging.getLogger("django_txmsg.celery")

#: Seconds before a delivery goes back to the broker while the database, or a server
#: that the task's chain needs, is away.
PAUSE = 2.0
#: Errors in the call of what follows that would occur again the next time.
HOPELESS = (EncodeError, ImproperlyConfigured, TypeError, ValueError, LookupError)


def go_on(task: Any, result: Any) -> None:
    """Call the task's links and the rest of its chain.

    Celery itself would do so when the task returns. If its broker were away, or the
    backend that a chord needs, Celery would take the task for failed and acknowledge
    it: its work would be committed and its chain lost. Raises Reject instead.
    """
    request, app = task.request, task.app
    cause = cause_of(request)
    links = identified(request.callbacks, f"{cause}/link")
    chain = identified(request.chain, f"{cause}/chain")
    request.callbacks = request.chain = None
    given: dict[str, Any] = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": None,
    }
    if app.conf.task_inherit_parent_priority:
        given["priority"] = (request.delivery_info or {}).get("priority")
    run, outer = running.Run(ended=True), running.current_run()
    running.enter(run)
    try:
        for link in links:
            signature(link, app=app).apply_async((result,), **given)
        if chain:
            following = signature(chain[-1], app=app)
            following.apply_async((result,), chain=chain[:-1], **given)
    except HOPELESS:
        raise
    except Exception as error:
        # The errors of an unreachable backend differ from one to the other.
        raise _not_yet(task, error) from error
    finally:
        running.enter(outer)
    send(task, run.later)


def identify_errbacks(request: Any) -> None:
    """Give the errbacks of a failed task the same ids at each delivery."""
    if request.errbacks:
        request.errbacks = identified(request.errbacks, f"{cause_of(request)}/error")


def send(task: Any, later: list[Publication]) -> None:
    """Send the messages that continue the task to Celery's broker. Raises Reject if
    that fails: then the task's message is delivered again, and these are sent then."""
    if not later:
        return
    try:
        publishing.publish(task.app, later)
    except Exception as error:
        raise _not_yet(task, error) from error


def _not_yet(task: Any, error: Exception) -> Reject:
    log.warning(
        "task %s[%s] has ended, and what follows cannot be called yet; it goes "
        "back to its queue: %s", task.name, task.request.id, error,
    )  # fmt: skip
    threading.Event().wait(PAUSE)
    return Reject(error, requeue=True)
