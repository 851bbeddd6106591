"""Encodes and parses STOMP 1.2 frames, without any I/O.

Hops 4 and 6 of a message. The encoder refuses a header value that the broker could read
as another frame. The parser accepts the bytes in pieces of any size, and has a fast
path for RECEIPT frames. A frame may have a broken header, a NUL in a header, or a body
that is too long. The parser then returns the readable part of the frame with a
`problem`, so that one bad message never stops the frames behind it. The parser raises
``ProtocolError`` only if it cannot find the end of a frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import MessageFormatError

#: A longer header block means that the stream is out of step.
MAX_HEADER_BYTES = 1 << 24
#: A longer body is skipped instead of filling the memory ...
MAX_BODY_BYTES = 1 << 28
#: ... except its beginning.
KEPT_OF_TOO_LONG = 1 << 16
#: No broker sends a length with more digits.
_MOST_DIGITS = 12

_RECEIPT = re.compile(rb"RECEIPT\r?\nreceipt-id:([0-9a-z-]+)\r?\n\r?\n\x00")
_HEADERS_END = re.compile(rb"\r?\n\r?\n")
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_UNESCAPED = {"r": "\r", "n": "\n", "c": ":", "\\": "\\"}


class ProtocolError(Exception):
    """The received bytes are not STOMP, so the connection cannot be used any more."""


class Frame(NamedTuple):
    """One frame from the broker. ``problem`` describes the fault of its headers or the
    length of its body, if any. ``cut`` means that ``body`` is only a beginning."""

    command: str
    headers: dict[str, str]
    body: bytes = b""
    problem: str | None = None
    cut: bool = False


class Receipt(bytes):
    """A RECEIPT frame, represented by its receipt id."""

    __slots__ = ()


def escape(text: str) -> str:
    """Escape carriage return, line feed, colon and backslash as STOMP 1.2 requires."""
    return (
        text.replace("\\", "\\\\")
        .replace("\n", "\\n")
        .replace(":", "\\c")
        .replace("\r", "\\r")
    )


def _header_line(name: str, value: str) -> str:
    line = f"{name}:{value}\n"
    # Most headers contain nothing to escape, and checking that is cheaper than
    # escaping.
    text = type(name) is str and type(value) is str
    plain = line.count(":") == 1 and line.count("\n") == 1
    if text and plain and "\\" not in line and "\r" not in line:
        return line
    return f"{escape(name)}:{escape(value)}\n"


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the escaped header lines as bytes, each with its line end.

    Raises ``MessageFormatError`` for an empty name, and for a name or value that is not
    text, contains NUL or cannot be encoded.
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
        raise MessageFormatError(f"A header is not valid Unicode: {error}") from error


def encode(command: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Encode one frame. The caller sets every header, including content-length."""
    return b"%s\n%s\n%s\x00" % (command.encode(), header_lines(headers.items()), body)


def encode_connect(headers: Mapping[str, str]) -> bytes:
    """Encode the CONNECT frame, whose headers STOMP does not escape.

    Raises ``ValueError`` if a credential contains a character that could start another
    header line.
    """
    for name, value in headers.items():
        if any(character in value for character in "\r\n\x00"):
            raise ValueError(f"{name} holds a line break or NUL; CONNECT cannot.")
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    return f"CONNECT\n{lines}\n\x00".encode()


class _TooLong:
    """A frame whose body is too long to keep. The parser keeps only the beginning of
    the body."""

    def __init__(self, frame: Frame, length: int | None) -> None:
        """``length`` is the length of the body, or None if only a NUL marks the end of
        the body."""
        self._frame = frame
        self._left = length
        self._kept = b""

    def take(self, data: bytes) -> int | None:
        """Read more bytes of the body. Return the position in these bytes at which the
        frame ends, or None if the frame is still incomplete.

        Raises ``ProtocolError`` if no NUL follows the body.
        """
        end = data.find(b"\x00") if self._left is None else self._left
        if len(self._kept) < KEPT_OF_TOO_LONG:
            body = data if end < 0 else data[:end]
            self._kept += body[: KEPT_OF_TOO_LONG - len(self._kept)]
        if self._left is None:
            return None if end < 0 else end + 1
        if end >= len(data):
            self._left -= len(data)
            return None
        if data[end]:
            raise ProtocolError("no NUL after the body of a frame that was too long")
        return end + 1

    def frame(self) -> Frame:
        """Return the frame with only the beginning of its body."""
        return self._frame._replace(body=self._kept)


class FrameParser:
    """Parses the bytes of one connection, in pieces of any size, into frames."""

    def __init__(self, max_body: int = MAX_BODY_BYTES) -> None:
        """Create a parser that expects the start of a frame. If a body is longer than
        ``max_body`` bytes, the parser keeps only its beginning."""
        self._max_body = max_body
        self._tail = b""
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 0
        self._wants_nul = False
        self._too_long: _TooLong | None = None

    def feed(self, data: bytes) -> list[Frame | Receipt]:
        """Return the frames that these bytes complete. Heartbeats are not frames.

        Raises ``ProtocolError`` if the stream is not STOMP.
        """
        found: list[Frame | Receipt] = []
        while True:
            if self._too_long is not None:
                end = self._too_long.take(data)
                if end is None:
                    return found
                found.append(self._too_long.frame())
                data, self._too_long = data[end:], None
            data = self._read(data, found)
            if self._too_long is None:
                return found

    def _read(self, data: bytes, found: list[Frame | Receipt]) -> bytes:
        """Append the complete frames to ``found``, and keep the bytes of an incomplete
        frame. If a frame is too long, set ``_too_long`` and return the bytes that
        follow its headers."""
        have = self._have + len(data)
        waits = (
            self._wants_nul and 0 not in data and have <= self._need + self._max_body
        )
        if waits or have < self._need:
            # Joined and searched once, not again for every packet of a long body.
            self._chunks.append(data)
            self._have = have
            return b""
        buffer = b"".join([self._tail, *self._chunks, data])
        self._chunks.clear()
        self._wants_nul = False
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
        if self._too_long is not None:
            self._tail, self._have, self._need = b"", 0, 0
            return buffer[end:]
        self._tail = buffer[position:]
        self._have = len(self._tail)
        return b""

    def _read_frame(self, buffer: bytes, start: int) -> tuple[int, Frame | None]:
        """Read the frame that begins at ``start``. Return the position of its end, and
        the frame. If the frame is incomplete, return the size that the buffer needs,
        and None."""
        blank = _HEADERS_END.search(buffer, start)
        nul = buffer.find(b"\x00", start, blank.start() if blank else len(buffer))
        # RabbitMQ forwards a NUL in a header of a message from another protocol. A
        # blank line still follows, and the header gives the length of the body.
        lost = nul >= 0 and not buffer.startswith(b"MESSAGE", start)
        if lost or (blank is None and len(buffer) - start > MAX_HEADER_BYTES):
            raise ProtocolError(
                f"frame without end of headers: {buffer[start : start + 80]!r}"
            )
        if blank is None:
            return len(buffer) + 1, None
        command, headers, problem = _read_headers(buffer[start : blank.start()])
        length = headers.get("content-length", "")
        if length and not (length.isascii() and length.isdigit()):
            problem = problem or f"content-length {length[:80]!r} is not a number"
            length = ""
        if len(length.lstrip("0")) > _MOST_DIGITS:
            raise ProtocolError(f"a frame of {length[:80]} bytes is far too large")
        expected = int(length) if length else None
        begin = blank.end()
        if expected is None:
            end = buffer.find(b"\x00", begin)
            size = (end if end >= 0 else len(buffer)) - begin
        else:
            size, end = expected, begin + expected
        if size > self._max_body:
            much = "without end" if expected is None else f"of {expected} bytes"
            problem = problem or f"a body {much} is more than is accepted"
            frame = Frame(command, headers, b"", problem, cut=True)
            self._too_long = _TooLong(frame, expected)
            return begin, None
        if end < 0:
            self._wants_nul = True
            return len(buffer) + 1, None
        if end >= len(buffer):
            return end + 1, None
        if buffer[end]:
            raise ProtocolError(f"no NUL after the {length} bytes of the body")
        return end + 1, Frame(command, headers, buffer[begin:end], problem)


def _read_headers(block: bytes) -> tuple[str, dict[str, str], str | None]:
    problem = None
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        problem = f"headers are not UTF-8: {error.reason} at byte {error.start}"
        text = block.decode(errors="replace")
    if "\x00" in text:
        problem = problem or "a header holds NUL"
        text = text.replace("\x00", "\ufffd")  # which PostgreSQL cannot store
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
    """Undo the escapes of a header. Keep an unknown escape unchanged, and report it."""
    unknown: list[str] = []

    def replace(match: re.Match[str]) -> str:
        character = _UNESCAPED.get(match[1])
        if character is None:
            unknown.append(match[0])
            return match[0]
        return character

    return _ESCAPE.sub(replace, text), unknown[0] if unknown else None
