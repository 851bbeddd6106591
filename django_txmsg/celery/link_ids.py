"""The ids of a OnceTask's links, derived from the task's own.

Celery creates the id of a link when it calls the link, so a copy of the task would call
it under another id, and the link's work would be done twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from .. import wire


def cause_of(request: Any) -> str:
    """Return the value from which the ids of a request's links are derived. It differs
    between a task and its replacement, which has the same id."""
    return f"celery/{request.id}/{request.replaced_task_nesting or 0}"


def identified(calls: Iterable[Any] | Mapping[str, Any] | None, cause: str) -> Any:
    """Return copies of signatures in which each task has an id: the caller's, or one
    derived from `cause` and the task's place.

    Groups keep no id of their own: a chord counts its tasks for each call, and its
    tasks and its body have the same ids in each.
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
