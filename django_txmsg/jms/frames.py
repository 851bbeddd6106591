"""STOMP 1.2 frames as bytes and back, without any I/O.

Hop 4 and 6 of a message. The encoder refuses what would let a header become another
frame; the parser takes bytes in any split, reads RECEIPT frames by a short cut, and
hands a frame with a broken header on with the problem noted, so that one bad message
never stops the stream behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from django_txmsg.jms.errors import MessageFormatError

#: A header block longer than this is no header block: the stream is out of step.
MAX_HEADER_BYTES = 1 << 20
#: A body longer than this is refused instead of filling the memory.
MAX_BODY_BYTES = 1 << 28

_RECEIPT = re.compile(rb"RECEIPT\r?\nreceipt-id:([0-9a-z-]+)\r?\n\r?\n\x00")
_HEADERS_END = re.compile(rb"\r?\n\r?\n")
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_UNESCAPED = {"r": "\r", "n": "\n", "c": ":", "\\": "\\"}


class ProtocolError(Exception):
    """The bytes are no STOMP: the connection cannot be used any further."""


class Frame(NamedTuple):
    """One frame from the broker; ``problem`` says what is wrong with its headers."""

    command: str
    headers: dict[str, str]
    body: bytes = b""
    problem: str | None = None


class Receipt(bytes):
    """The id of a RECEIPT frame, all there is to it."""

    __slots__ = ()


def escape(text: str) -> str:
    """Write carriage return, line feed, colon and backslash as STOMP 1.2 does."""
    return (
        text.replace("\\", "\\\\")
        .replace("\n", "\\n")
        .replace(":", "\\c")
        .replace("\r", "\\r")
    )


def _header_line(name: str, value: str) -> str:
    line = f"{name}:{value}\n"
    # Most headers have nothing to escape, and to see that is cheaper than to try.
    text = type(name) is str and type(value) is str
    plain = line.count(":") == 1 and line.count("\n") == 1
    if text and plain and "\\" not in line and "\r" not in line:
        return line
    return f"{escape(name)}:{escape(value)}\n"


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode headers, escaped, each line ended.

    Raises ``MessageFormatError`` for a name or value that is no text, is empty (a
    name), holds NUL or cannot be encoded.
    """
    try:
        text = "".join([_header_line(name, value) for name, value in headers])
        if "\x00" in text or text.startswith(":") or "\n:" in text:
            raise MessageFormatError(
                "A header holds NUL or has an empty name; STOMP cannot carry it."
            )
        return text.encode()
    except (AttributeError, TypeError) as error:
        raise MessageFormatError(
            "Header names and values are text (str); convert numbers yourself."
        ) from error
    except UnicodeEncodeError as error:
        raise MessageFormatError(f"A header is no valid Unicode: {error}") from error


def encode(command: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Encode one frame; the caller has decided on every header, content-length too."""
    return b"%s\n%s\n%s\x00" % (command.encode(), header_lines(headers.items()), body)


def encode_connect(headers: Mapping[str, str]) -> bytes:
    """Encode the CONNECT frame, whose headers STOMP leaves unescaped.

    Raises ``ValueError`` when a credential could end its line and start another.
    """
    for name, value in headers.items():
        if any(character in value for character in "\r\n\x00"):
            raise ValueError(f"{name} holds a line break or NUL; CONNECT cannot.")
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    return f"CONNECT\n{lines}\n\x00".encode()


class FrameParser:
    """Turns the bytes of one connection, in any split, into frames."""

    __slots__ = ("_chunks", "_have", "_need", "_tail", "_wants_nul")

    def __init__(self) -> None:
        """Start at a frame border."""
        self._tail = b""
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 0
        self._wants_nul = False

    def feed(self, data: bytes) -> list[Frame | Receipt]:
        """Return the frames completed by these bytes; heart-beats give none.

        Raises ``ProtocolError`` when the stream is out of step.
        """
        waits = self._wants_nul and 0 not in data
        if waits or self._have + len(data) < self._need:
            # Joined and searched once, not again for every packet of a long body.
            self._chunks.append(data)
            self._have += len(data)
            return []
        buffer = b"".join([self._tail, *self._chunks, data])
        self._chunks.clear()
        self._wants_nul = False
        found: list[Frame | Receipt] = []
        position, size = 0, len(buffer)
        while position < size:
            if buffer[position] in b"\r\n":
                position += 1
                continue
            receipt = _RECEIPT.match(buffer, position)
            if receipt is not None:
                found.append(Receipt(receipt[1]))
                position = receipt.end()
                continue
            end, frame = self._read_frame(buffer, position)
            if frame is None:
                self._need = end - position
                break
            found.append(frame)
            position = end
        else:
            self._need = 0
        self._tail = buffer[position:]
        self._have = len(self._tail)
        return found

    def _read_frame(self, buffer: bytes, start: int) -> tuple[int, Frame | None]:
        """Read one frame; without a whole one, say how far the buffer must reach."""
        blank = _HEADERS_END.search(buffer, start)
        nul = buffer.find(b"\x00", start, blank.start() if blank else len(buffer))
        if nul >= 0 or (blank is None and len(buffer) - start > MAX_HEADER_BYTES):
            raise ProtocolError(
                f"frame without end of headers: {buffer[start : start + 80]!r}"
            )
        if blank is None:
            return len(buffer) + 1, None
        command, headers, problem = _read_headers(buffer[start : blank.start()])
        length = headers.get("content-length", "")
        if length and not (length.isascii() and length.isdigit()):
            problem = problem or f"content-length {length!r} is no number"
            length = ""
        if not length:
            end = buffer.find(b"\x00", blank.end())
            if end < 0:
                self._wants_nul = True
                return len(buffer) + 1, None
        else:
            if len(length) > 12 or int(length) > MAX_BODY_BYTES:
                raise ProtocolError(f"frame of {length} bytes, more than is taken")
            end = blank.end() + int(length)
            if end >= len(buffer):
                return end + 1, None
            if buffer[end]:
                raise ProtocolError(f"no NUL after the {length} bytes of the body")
        return end + 1, Frame(command, headers, buffer[blank.end() : end], problem)


def _read_headers(block: bytes) -> tuple[str, dict[str, str], str | None]:
    problem = None
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        problem = f"headers are no UTF-8: {error.reason} at byte {error.start}"
        text = block.decode(errors="replace")
    command, *lines = text.replace("\r\n", "\n").split("\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name:
            problem = problem or f"header line without a name or colon: {line[:80]!r}"
            continue
        if "\\" in line and command != "CONNECTED":
            name, bad_name = _unescape(name)
            value, bad_value = _unescape(value)
            bad = bad_name or bad_value
            problem = problem or (bad and f"unknown escape {bad!r} in header {name!r}")
        headers.setdefault(name, value)
    return command, headers, problem


def _unescape(text: str) -> tuple[str, str | None]:
    """Undo the escapes; an unknown one is left as it stands, and reported."""
    unknown: list[str] = []

    def replace(match: re.Match[str]) -> str:
        character = _UNESCAPED.get(match[1])
        if character is None:
            unknown.append(match[0])
            return match[0]
        return character

    return _ESCAPE.sub(replace, text), unknown[0] if unknown else None
