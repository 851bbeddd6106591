"""Context managers for objects that a block closes at its end, and for critical
sections."""

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
        """Close the object. Further calls have no effect."""

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
    """A critical section, under the lock. If an exception interrupts the section, the
    link ends.

    A signal handler may raise an exception between any two lines of the section, which
    would leave the link in an unknown state.
    """

    def __init__(self, lose: Callable[[str], None]) -> None:
        """`lose` is a function that ends the link. Its argument is the reason."""
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
        """End the link, unless the exception is a ``MessagingError``, which is a
        regular outcome."""
        if not isinstance(error, MessagingError):
            self._lose(f"a send was interrupted by {error!r}")
