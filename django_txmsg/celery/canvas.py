"""Hop 1 for Celery's canvas: a chain, group or chord that a stage calls again gets the
same ids.

Celery draws a random id for each task of a canvas. In a stage, the ids are derived from
the incoming message and from the content of the canvas. So the outbox recognises the
tasks of an earlier attempt.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import celery
from celery import canvas
from kombu.utils import json

from .. import wire

#: Returns the id of a canvas that is called with these arguments and options, or None
#: if Celery is to draw the ids.
Identify = Callable[[tuple[object, ...], dict[str, Any]], uuid.UUID | None]


class _Ids:
    """The ids that the parts of one canvas get."""

    def __init__(self, base: uuid.UUID) -> None:
        self._base = base
        self.given: set[str] = set()

    def next(self) -> str:
        one = wire.derived_id("celery", self._base, "canvas", len(self.given))
        self.given.add(str(one))
        return str(one)


_ids: ContextVar[_Ids | None] = ContextVar("django_txmsg_canvas", default=None)


def is_derived(task_id: str) -> bool:
    """Return True if this id was derived for a task of the canvas whose call is in
    progress."""
    ids = _ids.get()
    return ids is not None and task_id in ids.given


def derive_ids(identify: Identify) -> None:
    """Make chains, groups and chords ask `identify` before they draw random ids."""
    usual = canvas.uuid

    def next_id() -> str:
        ids = _ids.get()
        return str(usual()) if ids is None else ids.next()

    canvas.uuid = next_id
    for kind in (canvas._chain, canvas.group, canvas._chord):
        kind.apply_async = _deriving(kind.apply_async, identify)


def _deriving(usual: Any, identify: Identify) -> Any:
    @functools.wraps(usual)
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        if _ids.get() is not None:  # it is a part of another canvas
            return usual(self, *args, **options)
        # Another version of Celery may number the parts of a canvas differently.
        base = identify((celery.__version__, self, *args), options)
        token = _ids.set(None if base is None else _Ids(base))
        try:
            return usual(self, *args, **options)
        finally:
            _ids.reset(token)

    return apply_async


class _Encoder(json.JSONEncoder):  # type: ignore[misc]  # published without type hints
    """Encodes every value. Equal sets give equal text in every process."""

    def default(self, o: Any) -> Any:
        if isinstance(o, set | frozenset):
            return {"set": sorted(map(self.encode, o))}
        try:
            return super().default(o)
        except TypeError:
            return repr(o)


def content(value: object) -> object:
    """Return a text that identifies the arguments of a call in every process, if they
    are JSON values, sets, or values that kombu can write as JSON."""
    try:
        return json.dumps(value, cls=_Encoder)
    except Exception:
        return repr(value)  # a key of a dict is no text
