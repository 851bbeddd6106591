"""Converts CloudEvents 1.0, in structured or binary mode, to messages.

The attributes of the event become headers. Headers that the sender has set take
precedence. The data of the event becomes the body. Pure: no Django, no I/O.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from .. import wire
from ..errors import DecodeError
from .codec import from_json, to_json
from .message_type import is_name
from .serializers import is_json

STRUCTURED = "application/cloudevents+json"
_ANY = "application/cloudevents"
#: Prefixes of attributes as headers: that of HTTP, of Kafka and of AMQP, and the latter
#: as JMS property names.
_PREFIXES = ("ce-", "ce_", "cloudEvents:", "cloudEvents_")
_MARKS = frozenset(f"{prefix}specversion" for prefix in _PREFIXES)
_NEEDED = ("id", "source", "type")
_DATA = ("data", "data_base64")
#: Control characters and lone surrogates: neither an attribute nor one of our headers
#: may contain them.
_NO_TEXT = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def headers_of(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return our headers for an event's attributes, or an empty dict if the message is
    not an event. The message id is derived from the attributes `source` and `id`, which
    together are unique."""
    try:
        event = _attributes(headers, body)
    except DecodeError:
        return {}  # reported when the body is read
    if event is None or not all(event.get(name) for name in _NEEDED):
        return {}
    found = {
        wire.MESSAGE_ID: str(wire.event_id(event["source"], event["id"])),
        wire.SERVICE: event["source"],
    }
    if is_name(event["type"]):
        found[wire.TYPE] = event["type"]
    for ours, theirs in (
        (wire.CREATED, "time"),
        (wire.KEY, "partitionkey"),
        (wire.TRACEPARENT, "traceparent"),
    ):
        if event.get(theirs):
            found[ours] = event[theirs]
    return found


def is_structured(content_type: str) -> bool:
    """Return whether the content type is that of a structured event, whose body
    contains attributes and data."""
    return content_type.strip().lower().startswith(_ANY)


def data(body: bytes) -> tuple[bytes, str]:
    """Return the data of a structured event as bytes, and its content type.

    Raises DecodeError if the body is not an event, or is a batch of events.
    """
    event = _event(body)
    content_type = str(event.get("datacontenttype") or wire.JSON)
    if "data_base64" in event:
        try:
            return base64.b64decode(event["data_base64"], validate=True), content_type
        except (TypeError, ValueError, binascii.Error) as error:
            raise DecodeError("undecodable_body", f"data_base64: {error}") from error
    value = event.get("data")
    try:
        if isinstance(value, str) and not is_json(content_type):
            return value.encode(), content_type
        return to_json(value), wire.JSON
    except (ValueError, RecursionError) as error:
        raise DecodeError("undecodable_body", f"data: {error}") from error


def _attributes(headers: Mapping[str, str], body: bytes) -> dict[str, str] | None:
    if is_structured(headers.get(wire.CONTENT_TYPE, "")):
        event = _event(body)
        return {name: one for name, one in event.items() if isinstance(one, str)}
    if _MARKS.isdisjoint(headers):
        return None
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in headers.items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }


def _event(body: bytes) -> dict[str, Any]:
    event = from_json(body)
    if not isinstance(event, dict) or not str(event.get("specversion")).startswith("1"):
        raise DecodeError("undecodable_body", "not a single CloudEvent of version 1")
    for name, value in event.items():
        if name not in _DATA and isinstance(value, str) and _NO_TEXT.search(value):
            raise DecodeError("undecodable_body", f"{name[:80]!r} is no text")
    return event
