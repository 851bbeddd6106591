"""A body that is read once it is known what it is to be: the run's row says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..envelope.typed_body import BodyReader, BodyType, TypeHeader


@dataclass(frozen=True, slots=True)
class Unread:
    """The bytes of a body, and what its headers say of them."""

    body: bytes
    content_type: str
    header: str | None

    @property
    def type(self) -> str:
        """The name of its type, "" where it brings none."""
        return "" if self.header is None else TypeHeader.parse(self.header).name

    def read(self, reader: BodyReader) -> Any:
        """Return the object that it stands for. Raises DecodeError."""
        return reader.read(self.body, self.content_type, self.header)


class UnreadReader(BodyReader):
    """Hands bodies on as they are. `reads` says which versions the code knows."""

    def __init__(self, reads: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._reads = reads

    @property
    def types(self) -> tuple[BodyType, ...]:
        """None: what comes is between a flow and those it asks."""
        return ()

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """What code has to know of the runs whose messages wait."""
        return tuple(self._reads())

    def read(self, body: bytes, content_type: str, header: str | None) -> Unread:
        """Return the body, unread."""
        return Unread(body, content_type, header)
