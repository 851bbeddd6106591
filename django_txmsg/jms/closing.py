"""What is closed at the end of its `with` block, whatever happened inside."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TypeVar

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
