"""Filters that several lists share, with the number of rows for each choice."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest

from ..monitoring import recent
from .counting import count, listed


class CountingFilter(admin.SimpleListFilter):
    """A filter with the number of rows for each choice."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[Any]:
        """Return the choices, each with the number of rows that it would show."""
        for value, label, number in self.counted(request, model_admin):
            yield value, label if number is None else f"{label} ({listed(number)})"

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Return value, label and count of each choice."""
        raise NotImplementedError

    def has_output(self) -> bool:
        """Show the filter even if there is only one choice, for its count. A filter
        that is set narrows the list even if its value is not among the choices."""
        return bool(self.lookup_choices) or self.value() is not None


class StateFilter(CountingFilter):
    """A filter by a row's state. Each choice shows its number of rows, counted up to
    a limit."""

    title = "state"
    parameter_name = "state"
    #: The label of a choice, if its name in the address is not readable.
    labels: ClassVar[dict[str, str]] = {}

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return the condition of each choice."""
        raise NotImplementedError

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each state."""
        rows = model_admin.get_queryset(request)
        for name, condition in self.conditions().items():
            label = self.labels.get(name, name)
            yield name, label, count(rows.filter(condition))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list. An unknown state has no rows: all of them would pass for
        rows in that state."""
        if not self.value():
            return queryset
        condition = self.conditions().get(str(self.value()))
        return queryset.none() if condition is None else queryset.filter(condition)


class PlaceFilter(CountingFilter):
    """By the column of the parameter's name, with the values of the newest rows."""

    @staticmethod
    def newest(using: str) -> dict[str, int]:
        """Return the choices, each with its count among the newest rows."""
        raise NotImplementedError

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each among the newest."""
        return among_newest(self.newest(model_admin.get_queryset(request).db))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list."""
        if not self.value():
            return queryset
        return queryset.filter(**{str(self.parameter_name): self.value()})


def among_newest(counts: dict[str, int]) -> Iterator[tuple[str, str, None]]:
    """Return choices counted among the newest rows: "12+" if there are more."""
    more = "+" if sum(counts.values()) >= recent.RECENT else ""
    for name, number in sorted(counts.items()):
        yield name, f"{name} ({number:,}{more})", None


class AgeFilter(admin.SimpleListFilter):
    """How long ago, in steps."""

    title = "age"
    parameter_name = "age"
    column = "created_at"
    steps = {"1h": ("last hour", 1), "24h": ("last day", 24), "7d": ("last week", 168)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the steps."""
        return [(key, label) for key, (label, _) in self.steps.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list. An unknown age has no rows, like an unknown state."""
        if not self.value():
            return queryset
        step = self.steps.get(str(self.value()))
        if step is None:
            return queryset.none()
        since = Now() - dt.timedelta(hours=step[1])
        return queryset.filter(**{f"{self.column}__gte": since})
