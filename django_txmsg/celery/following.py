"""Sends the messages that follow the transaction of a OnceTask. These are the message
of the task's retry or replacement, the calls of the task's links, and the call of the
next task of its chain.

If the task has committed, but these messages cannot be sent, the task's own message
goes back to its queue. The next delivery of the task then sends these messages, without
running the task again.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celery import signature
from celery.exceptions import ImproperlyConfigured, Reject
from kombu.exceptions import EncodeError

from .. import wire
from ..brokers.base import Outgoing
from ..brokers.celery import CelerySession, open_session
from ..brokers.celery_publication import HEADER, Publication
from ..errors import DestinationUnavailable, DispatchRejected
from . import calling

#: Each thread's session, by its process and its broker.
_open = threading.local()


def publish(app: Any, publications: Sequence[Publication]) -> None:
    """Send messages to the app's broker. If the broker has not confirmed all of them,
    raises BrokerError. Some of the messages may have been sent then."""
    left = [
        Outgoing(
            one.headers.get("task", ""),
            {
                HEADER: one.text(),
                wire.CONTENT_TYPE: one.content_type,
                # The task's id, by which the broker returns the message.
                wire.MESSAGE_ID: one.properties.get("correlation_id", ""),
            },
            one.body,
        )
        for one in publications
    ]
    while True:
        session, used = _session(app)
        outcomes = session.send(left)
        unsure = [
            (one, error)
            for one, error in zip(left, outcomes, strict=True)
            if error is not None
        ]
        if not unsure:
            return
        close()
        left = [one for one, _ in unsure]
        error = unsure[0][1]
        # An idle session may have been closed by the broker meanwhile.
        if not used or isinstance(error, DispatchRejected | DestinationUnavailable):
            raise error


def close() -> None:
    """Close this thread's session. In a forked child, only discard the object, because
    the session belongs to the parent."""
    kept, _open.kept = getattr(_open, "kept", None), None
    if kept is not None and kept[0][0] == os.getpid():
        kept[1].close()


def _session(app: Any) -> tuple[CelerySession, bool]:
    """Return this thread's session, and whether it was open before."""
    place = app.connection_for_write().as_uri(include_password=True)
    key = os.getpid(), app, place
    kept = getattr(_open, "kept", None)
    if kept is not None and kept[0] == key:
        return kept[1], True
    close()
    session = open_session(app)
    _open.kept = key, session
    return session, False


# Celery creates the id of a link when it calls the link: a copy of the task would call
# it under another id, and the link's work would be done twice.
def cause_of(request: Any) -> str:
    """Return the text from which the ids of a task's links are derived. In Celery a
    task and its replacement have the same id, but these texts differ."""
    return f"celery/{request.id}/{request.replaced_task_nesting or 0}"


def identified(calls: Iterable[Any] | Mapping[str, Any] | None, cause: str) -> Any:
    """Return copies of signatures in which each task has an id. A task without an id
    gets an id that is derived from `cause` and the task's position. So a repeated call
    gives the same ids.

    A group gets no derived id, because a chord counts the group's tasks separately for
    each call.
    """
    if not calls:
        return []
    if isinstance(calls, Mapping):  # Celery also takes one that is in no list
        calls = [calls]
    return [_one(call, f"{cause}/{place}") for place, call in enumerate(calls)]


def _one(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    options = dict(call.get("options") or {})
    kwargs = dict(call.get("kwargs") or {})
    kind = call.get("subtask_type")
    if kind in ("chain", "group"):
        kwargs["tasks"] = identified(kwargs["tasks"], place)
    elif kind == "chord":
        header = kwargs["header"]
        if isinstance(header, Mapping):
            kwargs["header"] = _one(header, f"{place}/header")
        else:
            kwargs["header"] = identified(header, f"{place}/header")
        if kwargs.get("body"):
            kwargs["body"] = _one(kwargs["body"], f"{place}/body")
    else:
        options.setdefault("task_id", str(uuid.uuid5(wire.NAMESPACE, place)))
        # Not those of a chain or a chord: Celery passes them to each of its tasks, of
        # which several may fail.
        if "link_error" in options:
            options["link_error"] = identified(options["link_error"], f"{place}/error")
    if "link" in options:
        options["link"] = identified(options["link"], f"{place}/link")
    return {**call, "options": options, "kwargs": kwargs}


log = logging.getLogger("django_txmsg.celery")

#: Seconds before a delivery goes back to the broker while the database, or a server
#: that the task's chain needs, is away.
PAUSE = 2.0
#: Errors in the call of what follows that would occur again the next time.
HOPELESS = (EncodeError, ImproperlyConfigured, TypeError, ValueError, LookupError)


def go_on(task: Any, result: Any) -> None:
    """Call the task's links and the rest of its chain, and report the task to its
    chord. Raises Reject if that fails.

    Celery itself does this only after the task has returned. If the broker or a chord's
    backend were unavailable then, Celery would treat the task as failed and acknowledge
    the task's message. So the task's work would be committed, but its chain or its
    chord would be lost.
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
    run, outer = calling.Run(ended=True), calling.current_run.get()
    calling.current_run.set(run)
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
        calling.current_run.set(outer)
    send(task, run.later)
    if request.chord:
        # Not within `run`: the chord counts as called once its body is handed over.
        kept = not _ignores_result(task)
        try:
            task.backend.mark_as_done(request.id, result, request, kept)
        except HOPELESS:
            raise
        except Exception as error:
            raise _not_yet(task, error) from error
        request.chord = None  # reported once: some backends only count


def report_failure(task: Any, failure: Exception) -> None:
    """Report a failed task to its chord, or to the chord in which its chain ends.
    Raises Reject if the result backend is unavailable.

    Celery reports the failure only after that. If the backend were unavailable then,
    Celery would acknowledge the task's message, and the chord would wait for ever.
    """
    request = task.request
    options = [one.get("options") or {} for one in request.chain or ()]
    if not (request.chord or any("chord" in one for one in options)):
        return
    kept = task.store_errors_even_if_ignored or not _ignores_result(task)
    try:
        task.backend.mark_as_failure(
            request.id, failure, None, request, kept, call_errbacks=False
        )
    except HOPELESS:
        return
    except Exception as error:
        raise _not_yet(task, error) from error
    request.chord = request.chain = None  # reported once: some backends only count


def _ignores_result(task: Any) -> bool:
    ignored = vars(task.request).get("ignore_result")  # the call's option comes first
    return bool(task.ignore_result if ignored is None else ignored)


def identify_errbacks(request: Any) -> None:
    """Assign an id to each errback of a task. The id is the same at each delivery of
    the task."""
    if request.errbacks:
        request.errbacks = identified(request.errbacks, f"{cause_of(request)}/error")


def send(task: Any, later: list[Publication]) -> None:
    """Send the messages in `later` to Celery's broker. Raises Reject if that fails. The
    task's message is then redelivered, and the redelivery sends these messages."""
    if not later:
        return
    try:
        publish(task.app, later)
    except Exception as error:
        raise _not_yet(task, error) from error


def _not_yet(task: Any, error: Exception) -> Reject:
    log.warning(
        "task %s[%s] has ended, but its links, chain or chord cannot be called yet; it "
        "goes back to its queue: %s", task.name, task.request.id, error,
    )  # fmt: skip
    threading.Event().wait(PAUSE)
    return Reject(error, requeue=True)
