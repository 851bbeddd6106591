"""Redelivers an edited copy of a dead letter. The user edits headers and body, sees the
changes, and sends the copy.

Off unless TXMSG["EDIT_DEAD_LETTERS"] is true. The copy of a stage's dead letter has its
own id. Headers that identify the original are shown, but cannot be changed.
"""

from __future__ import annotations

import difflib
from typing import Any

from django.contrib import messages
from django.db import router
from django.http import HttpRequest, HttpResponse

from .. import conf, wire
from ..dead_letters import masking, resolution
from ..envelope import serializers
from ..envelope.message import check_headers
from ..errors import DecodeError, TxmsgError
from ..models import DeadLetter
from ..models.dead_letter import Resolution
from ..models.monitoring import Deed
from . import body as bodies
from .audit import audit, audited
from .base import MESSAGE, ReadOnlyAdmin, insist, led, may, operator

#: Largest body, in bytes, for which a text field is offered.
LONGEST = 256 * 1024


def copy(admin: ReadOnlyAdmin, request: HttpRequest, pk: int) -> HttpResponse:
    """Show the form (GET), show the changes (POST), or send the copy (POST with
    `send`)."""
    needed = ("edit_deadletter", "view_deadletter", "view_message_body")
    insist(conf.get().EDIT_DEAD_LETTERS and may(request, *needed))
    using = router.db_for_write(DeadLetter)
    letter = DeadLetter.objects.using(using).filter(pk=pk).first()
    if letter is None:
        messages.warning(request, f"There is no dead letter {pk} here.")
        return admin.led_to_list(request)
    problem = unfit(letter)
    if problem:
        messages.warning(request, problem)
        return led(request, MESSAGE, letter.message_id)
    sent = wire.senders(letter.headers)
    # One header a line: values with line ends cannot be edited, and stay as is.
    fixed = {n: value for n, value in sent.items() if set(value) & set("\r\n")}
    before = headers_text({n: v for n, v in sent.items() if n not in fixed})
    form: dict[str, Any] = {"headers": before, "body": body_text(letter)}
    if request.method == "POST":
        # Browsers send line ends as CR LF, whatever the original had.
        for name in ("headers", "body"):
            form[name] = by_lines(request.POST.get(name, ""))
        try:
            headers = check_headers(parse_headers(str(form["headers"])) | fixed)
            encoded = encode(str(form["body"]), letter)
            serializers.decode(encoded, letter.content_type)
            if "send" in request.POST:
                return _send(request, letter, headers, encoded)
            form["diff"] = [
                *difference(
                    "headers", before, headers_text(parse_headers(form["headers"]))
                ),
                *difference("body", body_text(letter), str(form["body"])),
            ]
            form["checked"] = True
        except (TxmsgError, DecodeError, ValueError) as error:
            form["error"] = str(error)
    context = {
        "letter": letter,
        "form": form,
        "locked": [
            (name, value)
            for name, value in sorted(letter.headers.items())
            if name not in sent or name in fixed
        ],
        "masked": conf.get().MASK is not None,
    }
    return admin.show(request, "copy", "Redeliver a copy", context)


def _send(
    request: HttpRequest, letter: DeadLetter, headers: dict[str, str], body: bytes
) -> HttpResponse:
    by = operator(request)
    with audited(router.db_for_write(DeadLetter)):
        copy_id = resolution.redeliver_copy(letter, headers=headers, body=body, by=by)
        said = f"Redelivered an edited copy as message {copy_id}."
        audit(request, letter, Deed.COPY, said)
    messages.success(request, f"A copy was stored as message {copy_id}.")
    return led(request, MESSAGE, copy_id)


def unfit(letter: DeadLetter) -> str:
    """Return the reason why this dead letter cannot be edited, or "" if it can be
    edited."""
    if letter.resolution != Resolution.OPEN:
        return f"Dead letter {letter.pk} is not open any more: {letter.resolution}."
    if len(letter.body) > LONGEST:
        return "Its body is too long to be edited here."
    try:
        text = bytes(letter.body).decode()
    except UnicodeDecodeError:
        return "Its body is not text, so it cannot be edited here."
    if line_end(text) is None:
        return "The lines of its body end in several ways, so it cannot be edited here."
    return ""


def by_lines(text: str) -> str:
    """Return a text with LF as its only line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def line_end(text: str) -> str | None:
    """Return the line end that a text uses, or None if it uses different ones."""
    bare = text.replace("\r\n", "")
    found = {"\r\n": "\r\n" in text, "\r": "\r" in bare, "\n": "\n" in bare}
    ends = [end for end, is_there in found.items() if is_there]
    return None if len(ends) > 1 else (ends or ["\n"])[0]


def body_text(letter: DeadLetter) -> str:
    """Return the body as text to edit. JSON that is not nested too deeply is
    indented."""
    raw = bytes(letter.body)
    decoded = masking.decoded(raw, letter.content_type)
    # A text may be a JSON string, which needs its quotes and escapes.
    return raw.decode() if isinstance(decoded, bytes | str) else bodies.pretty(decoded)


def encode(text: str, letter: DeadLetter) -> bytes:
    """Return the edited text as the body to send, with the line ends of the original.
    If the text was not edited, return the bytes of the original."""
    before = body_text(letter)
    if text == by_lines(before):
        return bytes(letter.body)
    return text.replace("\n", line_end(before) or "\n").encode()


def headers_text(headers: Any) -> str:
    """Return headers as text to edit, one header per line."""
    return "\n".join(f"{name}: {value}" for name, value in sorted(headers.items()))


def parse_headers(text: str) -> dict[str, str]:
    """Return the headers from this text, one per line. Raises ValueError if a line is
    not a header."""
    headers: dict[str, str] = {}
    for line in text.split("\n"):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"Not a header: {line!r}. Write one a line, name: value.")
        headers[name.strip()] = value.removeprefix(" ")
    return headers


def difference(title: str, before: str, after: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with its kind ("added", "removed", "same",
    "place"). The first line is a title. Return [] if nothing differs."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    found = [
        (kinds.get(line[:1], "same"), line)
        for line in lines
        if not line.startswith(("---", "+++"))
    ]
    return [("title", title), *found] if found else []
