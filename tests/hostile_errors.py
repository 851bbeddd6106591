"""Exceptions whose own code raises when they are inspected."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError


class SilentError(LookupError):
    """An exception whose `str()`, `repr()` and `format()` raise."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __format__ = __str__


class ExitingError(LookupError):
    """An exception whose `str()` raises SystemExit."""

    def __str__(self) -> str:
        raise SystemExit(3)


class NoTextError(LookupError):
    """An exception whose `__str__()` does not return a string."""

    def __str__(self) -> Any:
        return 7


class UntracedError(LookupError):
    """An exception whose traceback cannot be formatted."""

    @property
    def _hidden(self) -> Any:
        raise KeyError("no such thing")

    @_hidden.setter
    def _hidden(self, value: object) -> None:
        """Accept the attributes that contextlib sets."""

    __cause__ = __context__ = __traceback__ = _hidden
    __notes__ = __suppress_context__ = _hidden


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__", "__name__"):
            raise KeyError(name)
        return super().__getattribute__(name)


class NamelessError(LookupError, metaclass=_Nameless):
    """An exception whose class raises when its names are read."""


class DurableError(RuntimeError, LookupError):
    """An exception whose `str()` raises. It has two base classes."""

    def __str__(self) -> str:
        raise KeyError("no text")


def misspelt() -> ValidationError:
    """Return a ValidationError whose `str()` raises KeyError, because a parameter of
    its message is missing."""
    return ValidationError("%(value)s is no colour", params={"vlaue": 1})


#: Each with what is kept of it.
HOSTILE: dict[str, tuple[type[Exception], str]] = {
    "silent": (SilentError, "SilentError: <str() raised KeyError>"),
    "exiting": (ExitingError, "ExitingError: <str() raised SystemExit>"),
    "no text": (NoTextError, "NoTextError: <str() raised TypeError>"),
    "untraced": (UntracedError, "UntracedError"),
    "nameless": (NamelessError, "NamelessError"),
    "durable": (DurableError, "DurableError: <str() raised KeyError>"),
}
