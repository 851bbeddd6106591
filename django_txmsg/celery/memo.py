"""What a OnceTask's first delivery leaves for the copies of its message, in its row.

Its result, as Celery would write it; whether it was to be ignored; and what is sent
after its commit, in case that it is killed before that.
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
    """Return the columns that keep what was done; none where a copy has nothing to
    return and to send."""
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
    """What a row keeps, read."""

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        self._headers, self._body = headers, body
        self._note = json.loads(headers[_NOTE])

    @property
    def later(self) -> list[Publication]:
        """What was to be sent after the commit."""
        return [Publication.read(*one) for one in self._note.get("later", ())]

    def result(self) -> Any:
        """Return what the task returned. Raises Ignore where it did."""
        if "ignored" in self._note:
            raise Ignore(self._note["ignored"])
        content_type = self._headers[wire.CONTENT_TYPE]
        encoding = self._headers[_ENCODING]
        return loads(self._body, content_type, encoding, accept={content_type})
