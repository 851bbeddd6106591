"""Two context managers: ``Closing`` closes an object, and ``Whole`` guards a critical
section."""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import MessagingError

Self = TypeVar("Self", bound="Closing")


class Closing(abc.ABC):
    """A context manager that calls `close()` at the end of its block."""

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
    """A critical section, used with the link's lock held. If an exception interrupts
    the section, the client disconnects.

    A signal handler may raise an exception between any two lines of the section. The
    state of the link would then be unknown.
    """

    def __init__(self, lose: Callable[[str], None]) -> None:
        """To disconnect the link, the section calls `lose` with the reason."""
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
        """Disconnect the link after an exception. Do nothing after a
        ``MessagingError``, which leaves the link in a known state."""
        if not isinstance(error, MessagingError):
            self._lose(f"a send was interrupted by {error!r}")
