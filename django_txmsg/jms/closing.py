"""`with` blocks: what is closed at their end, and what happens as a whole in them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import MessagingError

Self = TypeVar("Self", bound="Closing")


class Closing(abc.ABC):
    """A context manager that ends with `close()`."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it. More than once does no harm."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Whole:
    """A `with` block, the lock held, of what happens as a whole or ends the link: an
    exception that a signal raises may come between any two of its lines."""

    def __init__(self, lose: Callable[[str], None]) -> None:
        """Call it with the reason."""
        self._lose = lose

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.broken_by(error)

    def broken_by(self, error: BaseException) -> None:
        """End the link if this is no answer of its own."""
        if not isinstance(error, MessagingError):
            self._lose(f"a send was interrupted by {error!r}")
