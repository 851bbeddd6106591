"""Filters that several lists share. Their choices show numbers of rows."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import PAGE_VAR
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from ..monitoring.status import NEWEST
from .counting import OLDER, count, listed


class CountingFilter(admin.SimpleListFilter):
    """A filter that shows the number of rows of each choice. It selects the rows whose
    column `parameter_name` has the chosen value. The empty text is a valid choice,
    which finds the relay's dead letters, because these have no stage."""

    def has_output(self) -> bool:
        """Return True if the filter is shown. A filter with a single choice is shown
        too, because the choice shows its number of rows. A filter that has a value is
        shown even if it has no choices."""
        return bool(self.lookup_choices) or self.value() is not None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Select the rows with the chosen value."""
        value = self.value()
        if value is None:
            return queryset
        return queryset.filter(**{str(self.parameter_name): value})


class StateFilter(CountingFilter):
    """Filters by state. Each choice shows its number of rows, up to a cap."""

    title = "state"
    parameter_name = "state"
    #: The label of a choice, if its name in the address is not readable.
    labels: ClassVar[dict[str, str]] = {}
    #: The choices whose rows no index finds.
    uncounted: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return the condition of each state, by name."""
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield the states with their numbers of rows."""
        rows = model_admin.get_queryset(request)
        for name, condition in self.conditions().items():
            label = self.labels.get(name, name)
            if name not in self.uncounted:
                label += f" ({listed(count(rows.filter(condition)))})"
            yield name, label

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Select the rows in the chosen state. An unknown state selects no rows."""
        if not self.value():
            return queryset
        condition = self.conditions().get(str(self.value()))
        return queryset.none() if condition is None else queryset.filter(condition)


class PlaceFilter(CountingFilter):
    """Filters by the column `parameter_name`. The choices are the values in the newest
    rows."""

    #: Values that are choices even if no row has them.
    known: Callable[[], Iterable[str]] = tuple

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield each value, and how many of the newest rows have this value."""
        using = model_admin.get_queryset(request).db
        rows = model_admin.model._default_manager.using(using).order_by("-pk")
        found = Counter(rows.values_list(self.parameter_name, flat=True)[:NEWEST])
        counts = dict.fromkeys(self.known(), 0) | found
        # "12+": there may be more.
        more = "+" if found.total() >= NEWEST else ""
        for name, number in sorted(counts.items()):
            yield name, f"{name} ({number:,}{more})"


class BetweenFilter(admin.SimpleListFilter):
    """Filters by time, from `since` (included) to `before` (not included)."""

    title, parameter_name = "time", "since"
    template = "admin/django_txmsg/between.html"
    column = "created_at"
    BOUNDS = {"since": "gte", "before": "lt"}

    def __init__(self, request: HttpRequest, params: Any, *args: Any) -> None:
        super().__init__(request, params, *args)
        if "before" in params:
            self.used_parameters["before"] = params.pop("before")[-1]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return a single choice. The template shows a form for it."""
        return [("", "")]

    def expected_parameters(self) -> list[str | None]:
        """Return the query parameters of both bounds."""
        return [*self.BOUNDS]

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield the form's values, and the other query parameters of the list."""
        kept = {*self.BOUNDS, OLDER, PAGE_VAR}
        yield {
            "bounds": [(one, self.used_parameters.get(one, "")) for one in self.BOUNDS],
            "others": [
                pair for pair in changelist.params.items() if pair[0] not in kept
            ],
        }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Select the rows between the bounds. If a bound is not a time, select no
        rows."""
        for name, comparison in self.BOUNDS.items():
            if text := self.used_parameters.get(name):
                instant = read_time(text)
                if instant is None:
                    return queryset.none()
                queryset = queryset.filter(**{f"{self.column}__{comparison}": instant})
        return queryset


def filter_of(base: type[Any], title: str, **attributes: str) -> Any:
    """Return a filter like `base`, with another title and other class attributes."""
    return type(base.__name__, (base,), {"title": title, **attributes})


def read_time(text: str) -> dt.datetime | None:
    """Return the instant of a date or time in ISO format. A time without an offset is
    in the current time zone. Return None if the text is neither a date nor a time."""
    try:
        found = parse_datetime(text)
        if found is None and (day := parse_date(text)) is not None:
            found = dt.datetime.combine(day, dt.time())
        if found is not None and found.tzinfo is None:
            found = timezone.make_aware(found)
        return found and found.astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None
