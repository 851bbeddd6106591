"""The class Message: the immutable envelope that passes through all nine hops.

Pure: no Django, no I/O. The functions `check_…()` refuse a message that some broker
could not carry.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from .. import wire
from ..errors import MAX_SECONDS, InvalidMessage

MAX_NAME_LENGTH = 255
#: ActiveMQ accepts 10 KB for a header line, and every broker must be able to carry a
#: header.
MAX_HEADER_BYTES = 8192
MAX_HEADERS = 200
#: Most characters of all headers: half of what a stage reads. The rest is left for the
#: headers that the package and the brokers add.
MAX_HEADER_BLOCK = 64 * 1024

_DESTINATION = re.compile(r"(?:topic:)?[A-Za-z0-9_][A-Za-z0-9_.\-]*")
# NUL ends a STOMP frame. The other control characters, except \n, \r and \t, are
# useless in a header and break tools that read it.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# No encoding can hold half a surrogate pair. ActiveMQ loses characters above U+FFFF in
# headers when it restarts: its store cannot hold them.
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ABOVE = re.compile(r"[\U00010000-\U0010ffff]")
_REFUSED = re.compile("|".join(one.pattern for one in (_CONTROL, _SURROGATE, _ABOVE)))


_UNCARRIED = (
    "a character above U+FFFF, such as an emoji, which not every broker carries "
    "unchanged. Put it into the body."
)
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


#: Whether the handler that runs in this context should end.
should_end: ContextVar[Callable[[], bool]] = ContextVar("django_txmsg_should_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. The sender gets this object from `send_message()`, and a handler
    receives one with the same content.

    `body` is the JSON value, the text, or the bytes. `headers` are the headers that the
    sending code has set. `delivery_attempt` is the number of started executions of the
    receiving stage, and 0 at the sender. `redelivered` is false only at the first
    delivery.
    """

    id: uuid.UUID
    destination: str
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    created_at: dt.datetime | None = None
    delivery_attempt: int = 0
    redelivered: bool = False
    correlation_id: str | None = None
    service: str | None = None
    #: The headers that say whom it answers, and who waits for its answer
    #: (`wire.conversation()`).
    conversation: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.headers
        own = MappingProxyType(dict(given)) if given else _NO_HEADERS
        object.__setattr__(self, "headers", own)

    def __repr__(self) -> str:
        # Bodies and header values may hold personal data: neither may be logged.
        return (
            f"<Message {self.id} to {self.destination!r}"
            f" attempt {self.delivery_attempt}>"
        )

    def attempted(self, attempt: int) -> Message:
        """Return a copy of this message for execution number `attempt`."""
        if attempt == self.delivery_attempt:
            return self
        return replace(self, delivery_attempt=attempt)

    def cancelled(self) -> bool:
        """Return True if an operator has stopped the message, or if the stage's
        `timeout` has passed. The handler should then end.

        An operator cannot stop a message at a stage without a timeout. At such a stage,
        this method always returns False. It also returns False in threads that the
        handler starts.
        """
        ends = should_end.get(None)
        return ends is not None and ends()

    def __reduce__(self) -> Any:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["headers"] = dict(self.headers)
        # As an argument, so that a deep copy has a body of its own.
        return _rebuild, (values,)


def _rebuild(values: dict[str, Any]) -> Message:
    return Message(**values)


def check_destination(destination: object) -> str:
    """Return the destination as plain text: str() of an enum's member may be the
    member's name, not its value.

    Raises InvalidMessage if some broker could not carry its name.
    """
    if not isinstance(destination, str) or not destination:
        raise InvalidMessage(
            f"The destination must be a non-empty string, not {destination!r}."
        )
    return _checked(str.__str__(destination))


@lru_cache(1000)
def _checked(destination: str) -> str:
    for prefix, ours in (("/queue/", ""), ("/topic/", wire.TOPIC_PREFIX)):
        if destination.startswith(prefix):
            plain = ours + destination.removeprefix(prefix)
            raise InvalidMessage(
                f"The destination {destination[:80]!r} begins with {prefix!r}: write "
                f"{plain[:80]!r}. Each broker's own prefix is added when it is sent."
            )
    if len(destination) > MAX_NAME_LENGTH or not _DESTINATION.fullmatch(destination):
        raise InvalidMessage(
            f"The destination {destination[:80]!r} has characters that not every "
            f"broker can carry: use letters, digits, '.', '-' and '_', at most "
            f"{MAX_NAME_LENGTH} of them, with {wire.TOPIC_PREFIX!r} in front for a "
            f"topic."
        )
    return destination


def check_key(key: object) -> str:
    """Return the ordering key, or "" for None. Raises InvalidMessage if the key is
    invalid."""
    if key is None:
        return ""
    if not isinstance(key, str) or not key:
        raise InvalidMessage(f"key must be a non-empty string or None, not {key!r}.")
    if len(key) > MAX_NAME_LENGTH or _CONTROL.search(key) or _SURROGATE.search(key):
        raise InvalidMessage(
            f"key {key[:80]!r} is longer than {MAX_NAME_LENGTH} characters or has a "
            f"control character or half of a surrogate pair."
        )
    if _ABOVE.search(key):
        raise InvalidMessage(f"key {key!r} has {_UNCARRIED}")
    return key


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of the caller's headers. Raises InvalidMessage for headers that a
    broker could not carry unchanged, and for reserved names."""
    if headers is None:
        return {}
    if len(headers) > MAX_HEADERS:
        raise InvalidMessage(
            f"{len(headers)} headers; at most {MAX_HEADERS} are allowed."
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"Headers map str to str; {name!r} maps to {type(value).__name__}."
            )
        if not name or name != name.strip() or _CONTROL.search(name) or "\n" in name:
            raise InvalidMessage(f"{name!r} is not a header name.")
        if wire.reserved(name):
            raise InvalidMessage(
                f"The header {name!r} is set by django_txmsg or the broker; use "
                f"another name."
            )
        if _CONTROL.search(value):
            raise InvalidMessage(
                f"The header {name!r} has a control character that no broker carries."
            )
        if _ABOVE.search(name) or _ABOVE.search(value):
            raise InvalidMessage(f"The header {name!r} has {_UNCARRIED}")
        try:
            size = len(name.encode()) + len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"The header {name!r} is not encodable as UTF-8: {error.reason}."
            ) from error
        if size > MAX_HEADER_BYTES:
            raise InvalidMessage(
                f"The header {name!r} has {size} bytes; at most {MAX_HEADER_BYTES} "
                "are allowed. Put it into the body."
            )
    total = sum(len(name) + len(value) for name, value in headers.items())
    if total > MAX_HEADER_BLOCK:
        raise InvalidMessage(
            f"The headers have {total} characters; at most {MAX_HEADER_BLOCK} are "
            "allowed. Put them into the body."
        )
    return dict(headers)


def carried(text: str, most: int | None = None) -> str:
    """Return the text of a foreign header in a form that `check_headers()` accepts: in
    place of each character that a broker could not carry, it has U+FFFD. The text has
    at most `most` characters."""
    return _REFUSED.sub("\ufffd", text[:most])


def correlation_id(headers: Mapping[str, str]) -> str | None:
    """Return the correlation id that a message's headers name, as the messages that
    follow from it can have it: its length is that of the column."""
    found = headers.get(wire.CORRELATION_ID)
    return None if found is None else carried(found, wire.MAX_CORRELATION_ID)


def check_duration(name: str, value: object) -> dt.timedelta | None:
    """Return the delay or expiry unchanged. Raises InvalidMessage unless it is a
    non-negative timedelta or None."""
    if value is None:
        return None
    if not isinstance(value, dt.timedelta) or value < dt.timedelta(0):
        raise InvalidMessage(
            f"{name} must be a datetime.timedelta of zero or more, not {value!r}."
        )
    if value.total_seconds() > MAX_SECONDS:
        raise InvalidMessage(f"{name} is longer than a hundred years: {value!r}.")
    return value


def new_id() -> uuid.UUID:
    """Return a UUID of version 7 (RFC 9562).

    The UUID begins with the time, so that an index on UUIDs grows at one end. The
    random part comes from the operating system. A generator in the process would not be
    safe: a forked process would copy its state, and produce the same ids.
    """
    value = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    return uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62)
