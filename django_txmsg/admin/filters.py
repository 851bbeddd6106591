"""Filters that several lists share, with the number of rows for each choice."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import PAGE_VAR
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from ..monitoring import recent
from .counting import OLDER, count, listed


class CountingFilter(admin.SimpleListFilter):
    """A filter that shows the number of rows of each choice. It narrows the list to the
    rows whose column `parameter_name` has the chosen value."""

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
        """Return True: show the filter even if there is only one choice, because of its
        count. A filter that is set narrows the list even if its value is not among the
        choices."""
        return bool(self.lookup_choices) or self.value() is not None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list."""
        value = self.value()
        if not value:
            return queryset
        return queryset.filter(**{str(self.parameter_name): value})


class StateFilter(CountingFilter):
    """Filters by a row's state. Each choice shows its number of rows, counted up to a
    limit."""

    title = "state"
    parameter_name = "state"
    #: The label of a choice, if its name in the address is not readable.
    labels: ClassVar[dict[str, str]] = {}
    #: The choices whose rows no index finds.
    uncounted: ClassVar[frozenset[str]] = frozenset()

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
            counts = name not in self.uncounted
            yield name, label, count(rows.filter(condition)) if counts else None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list. For an unknown state the list is empty, because rows of all
        states would be taken for rows in that state."""
        if not self.value():
            return queryset
        condition = self.conditions().get(str(self.value()))
        return queryset.none() if condition is None else queryset.filter(condition)


class PlaceFilter(CountingFilter):
    """Filters by the column that `parameter_name` names. The choices are the values in
    the newest rows."""

    @staticmethod
    def newest(using: str) -> dict[str, int]:
        """Return the choices, each with its count among the newest rows."""
        raise NotImplementedError

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each among the newest."""
        counts = self.newest(model_admin.get_queryset(request).db)
        # "12+": there may be more.
        more = "+" if sum(counts.values()) >= recent.RECENT else ""
        for name, number in sorted(counts.items()):
            yield name, f"{name} ({number:,}{more})", None


class AgeFilter(admin.SimpleListFilter):
    """Filters by age, in steps."""

    title = "age"
    parameter_name = "age"
    column = "created_at"
    steps = {"1h": ("last hour", 1), "24h": ("last day", 24), "7d": ("last week", 168)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the steps."""
        return [(key, label) for key, (label, _) in self.steps.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list. For an unknown age the list is empty."""
        if not self.value():
            return queryset
        step = self.steps.get(str(self.value()))
        if step is None:
            return queryset.none()
        since = Now() - dt.timedelta(hours=step[1])
        return queryset.filter(**{f"{self.column}__gte": since})


class BetweenFilter(admin.SimpleListFilter):
    """Filters by the time between two instants: `since` is included, `before` is
    not."""

    title, parameter_name = "time", "since"
    template = "admin/django_txmsg/between.html"
    column = "created_at"
    BOUNDS = {"since": "gte", "before": "lt"}

    def __init__(self, request: HttpRequest, params: Any, *args: Any) -> None:
        super().__init__(request, params, *args)
        if "before" in params:
            self.used_parameters["before"] = params.pop("before")[-1]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return one choice, the form."""
        return [("", "")]

    def expected_parameters(self) -> list[str | None]:
        """Return both bounds."""
        return [*self.BOUNDS]

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the form's values, and the list's other parameters."""
        kept = {*self.BOUNDS, OLDER, PAGE_VAR}
        yield {
            "bounds": [(one, self.used_parameters.get(one, "")) for one in self.BOUNDS],
            "others": [
                pair for pair in changelist.params.items() if pair[0] not in kept
            ],
        }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list. If a bound is not a time, the list is empty."""
        for name, comparison in self.BOUNDS.items():
            if text := self.used_parameters.get(name):
                instant = read_time(text)
                if instant is None:
                    return queryset.none()
                queryset = queryset.filter(**{f"{self.column}__{comparison}": instant})
        return queryset


def read_time(text: str) -> dt.datetime | None:
    """Return the instant of a date or a time, in the current time zone unless it names
    one; None if it is neither."""
    try:
        found = parse_datetime(text)
        if found is None and (day := parse_date(text)) is not None:
            found = dt.datetime.combine(day, dt.time())
        if found is not None and found.tzinfo is None:
            found = timezone.make_aware(found)
        return found and found.astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None
