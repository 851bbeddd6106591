"""Encodes and decodes STOMP 1.2 frames for the scripted broker, without any I/O.

This codec is only for tests. It is separate from the client's codec, because tests
cannot find a mistake in a codec that both sides use. The codec is as strict as the
specification requires of a server: an unknown escape or a missing NUL is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ESCAPES = {"\\": "\\\\", "\r": "\\r", "\n": "\\n", ":": "\\c"}
_UNESCAPES = {code[1]: raw for raw, code in _ESCAPES.items()}
#: These frames are exchanged before the version is agreed: never escaped.
_UNESCAPED = frozenset({"CONNECT", "STOMP", "CONNECTED"})
_BLANK_LINE = re.compile(rb"\n\r?\n")


class FrameError(Exception):
    """The bytes are not a STOMP 1.2 frame. No later bytes of the connection
    can be read."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: its command, its headers and its body. If a header is repeated, its
    first value counts."""

    command: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def __getitem__(self, header: str) -> str:
        """Return the value of a header. Raises ``KeyError`` with the name of a missing
        header."""
        return self.headers[header]

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    @property
    def destination(self) -> str:
        """The destination header, or "" if there is none."""
        return self.headers.get("destination", "")

    @property
    def receipt(self) -> str | None:
        """The id of the receipt that the frame requests, if any."""
        return self.headers.get("receipt")

    @property
    def transaction(self) -> str | None:
        """The name of the frame's transaction, if any."""
        return self.headers.get("transaction")


def encode(frame: Frame) -> bytes:
    """Return a frame as bytes, with escaped headers."""
    escapes = {} if frame.command in _UNESCAPED else _ESCAPES
    lines = [frame.command]
    for name, value in frame.headers.items():
        lines.append(f"{_escape(name, escapes)}:{_escape(value, escapes)}")
    return "\n".join([*lines, "", ""]).encode() + frame.body + b"\x00"


def _escape(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


class Decoder:
    """Turns bytes, in pieces of any size, into frames."""

    def __init__(self) -> None:
        """Create a decoder that expects the start of a frame."""
        #: End-of-line bytes seen between frames: the client's heart-beats.
        self.heartbeats = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that these bytes complete.

        Raises ``FrameError`` if the bytes are not a frame. The decoder cannot be used
        after that.
        """
        self._buffer += data
        found: list[Frame] = []
        while frame := self._next_frame():
            found.append(frame)
        return found

    def _next_frame(self) -> Frame | None:
        buffer = self._buffer
        beats = buffer[: len(buffer) - len(buffer.lstrip(b"\r\n"))]
        self.heartbeats += beats.count(b"\n")
        del buffer[: len(beats)]
        blank = _BLANK_LINE.search(buffer)
        nul = buffer.find(b"\x00", 0, blank.start() if blank else len(buffer))
        if nul >= 0:
            raise FrameError(f"NUL in the headers: {bytes(buffer[:nul])!r}")
        if blank is None:
            return None
        start = blank.end()
        command, headers = self._read_headers(bytes(buffer[: blank.start()]))
        stop = self._end_of_body(start, headers.get("content-length"))
        if not 0 <= stop < len(buffer):
            return None
        if buffer[stop]:
            raise FrameError(f"no NUL after a body of {stop - start} bytes")
        frame = Frame(command, headers, bytes(buffer[start:stop]))
        del buffer[: stop + 1]
        return frame

    def _end_of_body(self, start: int, length: str | None) -> int:
        if length is None:
            return self._buffer.find(b"\x00", start)
        if not (length.isascii() and length.isdigit()):
            raise FrameError(f"content-length is not a number: {length!r}")
        return start + int(length)

    def _read_headers(self, block: bytes) -> tuple[str, dict[str, str]]:
        try:
            lines = block.decode().split("\n")
        except UnicodeDecodeError as error:
            raise FrameError(f"headers are not UTF-8: {error}") from error
        command, *lines = (line.removesuffix("\r") for line in lines)
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise FrameError(f"header line without a colon: {line!r}")
            if command not in _UNESCAPED:
                name, value = _unescape(name), _unescape(value)
            headers.setdefault(name, value)
        return command, headers


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    result, characters = [], iter(text)
    for character in characters:
        if character == "\\":
            code = next(characters, "")
            if code not in _UNESCAPES:
                raise FrameError(f"unknown escape \\{code} in {text!r}")
            character = _UNESCAPES[code]
        result.append(character)
    return "".join(result)
