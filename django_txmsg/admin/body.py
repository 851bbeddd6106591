"""Headers and body of a message as shown to an operator: indented, masked and
shortened."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db.models import BinaryField, Model
from django.db.models.functions import Length, Substr

from .. import conf, wire
from ..dead_letters import masking
from ..models import DeadLetter, InboxMessage, OutboxMessage

#: Most of a body that its message's page shows.
SHOWN = 64 * 1024

#: A larger body is loaded only when asked for, and never to be masked: a mask needs it
#: decoded, which takes dozens of times its size.
LARGE = 1024 * 1024

#: The tables that keep whole messages, by their name in an address.
TABLES: dict[str, type[Model]] = {
    "outbox": OutboxMessage,
    "dead": DeadLetter,
    "inbox": InboxMessage,
}


@dataclass
class Content:
    """One stored copy of a message, as shown on a page."""

    table: str
    pk: int
    content_type: str
    size: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    #: A large body that was requested, unmodified.
    raw: bytes | None = None
    cut: bool = False
    #: Whether no part of the body is shown, because it is too large to be masked.
    unmaskable: bool = False
    #: The path of the task, masked.
    task: str = ""


def read(
    table: str,
    pk: int,
    *,
    using: str,
    message_id: uuid.UUID,
    bodies: bool,
    whole: bool = False,
) -> Any:
    """Return the Content of a message's row. Return None if the row does not exist or
    has no body.

    Without `bodies`, only the headers are read. Without `whole`, the body is shortened.
    The database shortens it, unless a mask is configured.
    """
    rows: Any = TABLES[table]._default_manager.using(using)
    rows = rows.filter(pk=pk, message_id=message_id)
    rows = rows.filter(body__isnull=False).annotate(
        size=Length("body"), head=Substr("body", 1, SHOWN, output_field=BinaryField())
    )
    row = rows.defer("body").first()
    if row is None:
        return None
    kind = getattr(row, "content_type", "") or (row.headers or {}).get(
        "content-type", ""
    )
    content = Content(table, pk, kind, row.size)
    masks, cut = conf.get().MASK is not None, row.size > SHOWN and not whole
    large = row.size > LARGE and (whole or masks)
    if not bodies or large or (cut and not masks):
        body = None
    else:
        body = bytes(row.head if row.size <= SHOWN else row.body)
    content.headers, shown = masking.shown(
        row.destination, row.headers or {}, body, kind
    )
    content.task = content.headers.get(wire.TASK, "")
    if body is not None:
        content.text = pretty(shown)
        if cut and len(content.text) > SHOWN:
            content.text, content.cut = content.text[:SHOWN], True
    elif large and bodies:
        content.unmaskable = masks
        content.raw = None if masks else bytes(row.body)
    elif bodies:
        content.text, content.cut = _text(bytes(row.head)), True
    return content


def shown_key(row: OutboxMessage) -> str:
    """Return the key of a stored message, masked like the header that contains it."""
    headers, _ = masking.shown(row.destination, {wire.KEY: row.key}, None, "")
    return headers.get(wire.KEY, masking.MASKED) if row.key else ""


def pretty(body: Any) -> str:
    """Return a decoded body as readable text."""
    if isinstance(body, bytes):
        return _text(body)
    if not isinstance(body, str):
        body = json.dumps(body, indent=2, ensure_ascii=False, default=str)
    return masking.encodable(body)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        if error.start >= len(body) - 3:  # cut within a character
            return body[: error.start].decode()
    lines = (body[at : at + 32] for at in range(0, min(len(body), SHOWN // 4), 32))
    return "\n".join(f"{at * 32:08x}  {line.hex(' ')}" for at, line in enumerate(lines))
