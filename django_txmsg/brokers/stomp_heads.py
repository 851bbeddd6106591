"""Encodes the frames of a batch of messages for the `jms` client."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from .. import jms, wire
from ..jms import destination as destinations
from ..jms.batch import Item
from ..jms.dialect import MAX_PROPERTY
from ..jms.frames import escape
from ..jms.message import DEFAULT, Encoded, Provided
from . import java
from .base import Outgoing

#: Headers that differ for each message.
_OWN = frozenset(
    {
        wire.MESSAGE_ID,
        wire.CREATED,
        wire.KEY,
        wire.AFTER,
        wire.EXPIRES,
        wire.CORRELATION_ID,
        wire.TRACEPARENT,
    }
)


class Heads:
    """Encodes the frames of one batch. Header lines that several messages share are
    encoded only once.

    If a batch has several messages of one kind, the jms client encodes one of them with
    placeholders. The result is a template, into which `Heads` puts the values of each
    later message of this kind.
    """

    def __init__(
        self, session: jms.Session, message: Callable[[Outgoing], jms.Message]
    ) -> None:
        """`message` creates the `jms.Message` for an outgoing message."""
        self._session = session
        self._message = message
        self._serves_jms = session.link.dialect.serves_jms
        #: None: only one message so far, perhaps the only one of its kind.
        self._templates: dict[tuple[object, ...], str | None] = {}
        # Random: no header can contain it.
        self._mark = uuid.uuid4().hex

    def item(self, one: Outgoing) -> Item:
        """Return a message's encoded frame, made from a template. If no template fits,
        return the message's destination and its `jms.Message`, which the session then
        checks and encodes."""
        try:
            encoded = self._encoded(one)
        except (AttributeError, TypeError, UnicodeEncodeError):  # a header is not text
            encoded = None
        return encoded or (one.destination, self._message(one))

    def _encoded(self, one: Outgoing) -> Encoded | None:
        own, shared = {}, []
        for item in one.headers.items():
            name, value = item
            if name in _OWN:
                own[name] = escape(value)
            else:
                shared.append(item)
        long = len(own.get(wire.CORRELATION_ID, "")) * 4 > MAX_PROPERTY
        if not own.get(wire.MESSAGE_ID) or long or one.time_to_live is not None:
            return None
        body, text = one.body, None
        if self._serves_jms:
            kind = one.headers.get(wire.CONTENT_TYPE, wire.BYTES)
            text = java.text_for_java(kind, body)
            body = body if text is None else text
        key = (one.destination, text is None, *own, *shared)
        if key not in self._templates:
            self._templates[key] = None
            return None
        template = self._templates[key] or self._template(one, key, list(own))
        if template is None:
            return None
        lines = template % own
        if "\x00" in lines:
            return None
        return Encoded(lines.encode(), body, Provided(one.headers[wire.MESSAGE_ID]))

    def _template(
        self, one: Outgoing, key: tuple[object, ...], names: list[str]
    ) -> str | None:
        """Encode a message with placeholders for its individual headers, and store the
        result as a template."""
        marks = {name: f"{self._mark}{place}." for place, name in enumerate(names)}
        marked = Outgoing(one.destination, {**one.headers, **marks}, one.body)
        try:
            target = destinations.parse(one.destination)
            message = self._message(marked)
            head = self._session.encode(target, message, DEFAULT).head
        except jms.MessagingError:
            return None
        template = head.decode().replace("%", "%%")
        for name, mark in marks.items():
            template = template.replace(mark, f"%({name})s")
        self._templates[key] = template
        return template
