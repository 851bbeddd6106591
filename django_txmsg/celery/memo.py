"""What a OnceTask's first delivery stores in its row for copies of its message.

Its result, in Celery's format; whether the result was to be ignored; and the messages
to send after the commit, in case the worker is killed before that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery.exceptions import Ignore
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads
from kombu.utils import json

from .. import wire
from ..brokers.celery.publication import Publication

log = logging.getLogger("django_txmsg.celery")

_NOTE, _ENCODING = "celery", "content-encoding"


def written(
    task: Any, result: Any, later: Sequence[Publication], ignored: Ignore | None
) -> dict[str, Any]:
    """Return the columns that record the result; none if a copy has nothing to return
    or send."""
    if result is None and ignored is None and not later:
        return {}
    note: dict[str, Any] = {}
    if ignored is not None:
        note["ignored"] = str(ignored)
    if later:
        note["later"] = [[one.text(), one.body, one.content_type] for one in later]
    serializer = task.serializer or task.app.conf.task_serializer
    try:
        content_type, encoding, data = dumps(result, serializer=serializer)
    except EncodeError as error:
        log.warning(
            "the result of %s cannot be kept for copies of its message, which "
            "will return None: %s", task.name, error,
        )  # fmt: skip
        content_type, encoding, data = dumps(None, serializer="json")
    return {
        "headers": {
            wire.CONTENT_TYPE: content_type,
            _ENCODING: encoding,
            _NOTE: json.dumps(note),
        },
        "body": data.encode(encoding) if isinstance(data, str) else data,
    }


class Memo:
    """The stored values of a row."""

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        self._headers, self._body = headers, body
        self._note = json.loads(headers[_NOTE])

    @property
    def later(self) -> list[Publication]:
        """The messages to send after the commit."""
        return [Publication.read(*one) for one in self._note.get("later", ())]

    def result(self) -> Any:
        """Return the task's result. Raises Ignore if the task did."""
        if "ignored" in self._note:
            raise Ignore(self._note["ignored"])
        content_type = self._headers[wire.CONTENT_TYPE]
        encoding = self._headers[_ENCODING]
        return loads(self._body, content_type, encoding, accept={content_type})
