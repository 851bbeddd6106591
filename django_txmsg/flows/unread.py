"""How the two stages of a flow read bodies.

One stage starts runs. This stage decodes a body immediately. The other stage continues
runs. It first looks up, in the run's row, which type the body must have. Then it
decodes the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import codecs
from ..envelope.typed_body import BodyReader, BodyType, TypeHeader
from ..errors import NewerCodeNeeded


@dataclass(frozen=True, slots=True)
class Unread:
    """The bytes of a body, with its content type and type header."""

    body: bytes
    content_type: str
    header: str | None

    @property
    def type(self) -> str:
        """The name of the body's type, or "" without a type header."""
        return "" if self.header is None else TypeHeader.parse(self.header).name

    def read(self, reader: BodyReader, expected: str = "") -> Any:
        """Return the decoded body. Raises DecodeError if the body does not fit the
        reader's type. `expected` has the type headers that the code took when the run
        began to wait, one per line. Raises NewerCodeNeeded if the body has one of these
        types, and the reader does not know it: this code is older."""
        names = {one.name for one in reader.types}
        for one in map(TypeHeader.parse, expected.splitlines()):
            if one.name == self.type and not names & {one.name, ""}:
                raise NewerCodeNeeded(one.name, one.oldest_reader, 0)
        return reader.read(self.body, self.content_type, self.header)


class UnreadReader(BodyReader):
    """Returns bodies undecoded. The argument `reads` is a function that returns the
    names and versions that this code can read."""

    def __init__(self, reads: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._reads = reads

    @property
    def types(self) -> tuple[BodyType, ...]:
        """Return no types, so that contracts do not list these messages: only the flow
        itself, and the stages and flows to which it sends requests, exchange them."""
        return ()

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """The names that this code can read, each with its latest version. This code
        claims no parked message that needs another name or a later version."""
        return tuple(self._reads())

    def read(self, body: bytes, content_type: str, header: str | None) -> Unread:
        """Return the undecoded body."""
        return Unread(body, content_type, header)


class StartReader(BodyReader):
    """Reads the bodies that start runs. `reads` also contains the versions of the
    flow's state: if the run's row exists already, this code must be able to read its
    state."""

    def __init__(
        self, annotation: Any, reads: Callable[[], Sequence[tuple[str, int]]]
    ) -> None:
        super().__init__(annotation, codecs.reader(annotation).types)
        self._declared = reads

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """The names that this code can read, each with its latest version. This code
        claims no parked message that needs another name or a later version."""
        return (*super().reads, *self._declared())
