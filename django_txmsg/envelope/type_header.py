"""The header `txmsg-type: NAME;v=N;min=M`: a body's type, and who can read it.

Pure: no Django, no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ..errors import DecodeError
from .message_type import MAX_VERSION, is_name

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class TypeHeader:
    """A message type's name, the version of the body, and the oldest version that can
    read it.

    `version` is None if the sender gave only the name: the body is then read as the
    reader's own version.
    """

    name: str
    version: int | None = None
    oldest_reader: int = 1

    def __str__(self) -> str:
        return f"{self.name};v={self.version};min={self.oldest_reader}"

    @classmethod
    @lru_cache(1000)
    def parse(cls, text: str) -> TypeHeader:
        """Read the header; parameters of later releases are ignored.

        Raises DecodeError, reason `invalid_body`, if it names no type or version.
        """
        name, *parts = (part.strip() for part in text.split(";"))
        given = dict(part.partition("=")[::2] for part in parts)
        version = cls._number(given.get("v"), text)
        oldest = cls._number(given.get("min"), text)
        if not is_name(name) or (version or MAX_VERSION) < (oldest or 1):
            raise cls._absurd(text)
        return cls(name, version, oldest or version or 1)

    @classmethod
    def _number(cls, text: str | None, whole: str) -> int | None:
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MAX_VERSION:
            raise cls._absurd(whole)
        return int(text)

    @staticmethod
    def _absurd(text: str) -> DecodeError:
        return DecodeError(
            "invalid_body", f"txmsg-type: no type and version: {text[:80]!r}"
        )
