"""Exceptions whose own code raises when they are inspected."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError


class SilentError(LookupError):
    """Its text raises, in one way or another."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __format__ = __str__


class ExitingError(LookupError):
    """Its text ends the thread that asks for it."""

    def __str__(self) -> str:
        raise SystemExit(3)


class NoTextError(LookupError):
    """Its text is none."""

    def __str__(self) -> Any:
        return 7


class UntracedError(LookupError):
    """Nothing that a traceback is written from can be read."""

    @property
    def _hidden(self) -> Any:
        raise KeyError("no such thing")

    @_hidden.setter
    def _hidden(self, value: object) -> None:
        """contextlib sets them."""

    __cause__ = __context__ = __traceback__ = _hidden
    __notes__ = __suppress_context__ = _hidden


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__", "__name__"):
            raise KeyError(name)
        return super().__getattribute__(name)


class NamelessError(LookupError, metaclass=_Nameless):
    """The names of its class raise."""


class DurableError(RuntimeError, LookupError):
    """Asked whether it is one of Django's own, it raises."""

    def __str__(self) -> str:
        raise KeyError("no text")


def misspelt() -> ValidationError:
    """Return Django's own, with a parameter that its text does not find."""
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
