"""Hides personal data in the messages that an operator sees: TXMSG["MASK"].

The setting names a function `mask(destination, headers, body)` that returns the headers
and the body to show. Stored and sent messages are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

from django.utils.module_loading import import_string

from .. import conf, wire
from ..envelope import serializers
from ..errors import DecodeError

log = logging.getLogger("django_txmsg.masking")

#: Shown in place of a value that the mask removes.
MASKED = "(masked)"

#: Most levels of a body that is shown decoded. Python's parser accepts more levels than
#: the encoder that indents.
DEEPEST = 500


def shown(
    destination: str, headers: Mapping[str, str], body: bytes | None, content_type: str
) -> tuple[dict[str, str], Any]:
    """Return the headers and the body, both masked. The body is decoded as `decoded()`
    does. Without a `body`, only the headers are masked.

    If the mask raises an exception, everything is hidden.
    """
    value = None if body is None else decoded(body, content_type)
    path = conf.get().MASK
    if path is None:
        return dict(headers), value
    try:
        masked_headers, masked_body = import_string(path)(
            destination, dict(headers), value
        )
        return dict(masked_headers), masked_body
    except Exception as error:
        log.exception('TXMSG["MASK"] failed for a message to %r', destination)
        return {}, f'hidden, because TXMSG["MASK"] failed: {type(error).__name__}'


def decoded(body: bytes, content_type: str) -> Any:
    """Return the decoded body. A body that cannot be decoded, or that is nested more
    than DEEPEST levels, stays bytes."""
    try:
        value = serializers.decode(body, content_type)
    except DecodeError:
        return body
    level = [value]
    for _ in range(DEEPEST):
        inner = [
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        level = list(chain.from_iterable(inner))
        if not level:
            return value
    return body


def encodable(text: str) -> str:
    """Return a text that can be encoded. JSON can contain half of a surrogate pair,
    which is shown as its escape, such as "\\ud83d"."""
    return text.encode("utf-8", "backslashreplace").decode()


def of_run(flow: str, text: str) -> Any:
    """Return a state or an answer of a flow's run, masked."""
    value = shown(flow, {}, text.encode(), wire.JSON)[1]
    return value.decode() if isinstance(value, bytes) else value
