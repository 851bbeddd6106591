"""The filters of the dead letters' list, and the single query that counts for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from ..models import DeadLetter
from ..models.dead_letter import Resolution
from ..monitoring import dead
from . import display
from .counting import count
from .filters import BetweenFilter, CountingFilter

#: The most choices of a filter. Those with the most dead letters are offered.
MOST_CHOICES = 100


class DeadFilter(CountingFilter):
    """A filter whose choices show their number of open dead letters."""

    column = ""

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count the open dead letters of each choice. All filters share one query."""
        for value, number in open_counts(request, model_admin)[self.column].items():
            yield value, f"{value or '(relay)'} ({number})", None

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> QuerySet[DeadLetter]:
        """Narrow the list."""
        if self.value() is None:
            return queryset
        return queryset.filter(**{self.column: self.value()})


class StageFilter(DeadFilter):
    """Filters by the stage that has given up."""

    title = parameter_name = column = "stage"


class DestinationFilter(DeadFilter):
    """Filters by the message's destination."""

    title = parameter_name = column = "destination"


class FingerprintFilter(DeadFilter):
    """Filters by the error. A choice shows the text of the error's newest dead
    letter."""

    title = "error"
    parameter_name = column = "fingerprint"

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count the open dead letters of each error."""
        counts = open_counts(request, model_admin)
        letters = model_admin.get_queryset(request).filter(
            pk__in=[counts["newest"][value] for value in counts[self.column]]
        )
        exceptions = dict(letters.values_list("fingerprint", "exception").order_by())
        for value, number in counts[self.column].items():
            text = display.cut(display.first_line(exceptions.get(value, "")), 60)
            yield value, f"{text or value} ({number})", None


class ResolutionFilter(CountingFilter):
    """Filters by how a dead letter was resolved. By default it shows open ones."""

    title = "resolution"
    parameter_name = "resolution"

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count the dead letters of each resolution."""
        rows = model_admin.get_queryset(request)
        for state in Resolution.values:
            yield state, state, count(rows.filter(resolution=state))

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> QuerySet[DeadLetter]:
        """Narrow the list."""
        if self.value() is None:
            return queryset
        return queryset.filter(resolution=self.value())


class AgainFilter(admin.SimpleListFilter):
    """Filters for dead letters that died again after a redelivery."""

    title = "failed again"
    parameter_name = "again"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the one choice."""
        return [("1", "failed again")]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> QuerySet[DeadLetter]:
        """Narrow the list."""
        return queryset.filter(deaths__gt=1) if self.value() else queryset


class DiedFilter(BetweenFilter):
    """Filters by the time of the last burial."""

    title = "time of death"


class ReasonFilter(DeadFilter):
    """Filters by the reason of the burial."""

    title = parameter_name = column = "reason"


FILTERS = (
    ResolutionFilter,
    StageFilter,
    DestinationFilter,
    ReasonFilter,
    AgainFilter,
    FingerprintFilter,
    DiedFilter,
)


def open_counts(request: HttpRequest, model_admin: Any) -> dict[str, dict[str, Any]]:
    """Count the open dead letters by each filtered column, the largest count first, in
    one query per page. "newest" has the primary key of the latest letter of each
    fingerprint."""
    kept: dict[str, dict[str, Any]] | None = getattr(request, "_txmsg_counts", None)
    if kept is not None:
        return kept
    found = dead.by_error(model_admin.get_queryset(request).db)
    kept = {"newest": {}}
    for name in ("stage", "destination", "fingerprint", "reason"):
        counts: Counter[str] = Counter()
        for one in found:
            counts[getattr(one, name)] += one.count
        kept[name] = {v: f"{n:,}" for v, n in counts.most_common(MOST_CHOICES)}
    for one in sorted(found, key=lambda each: each.example):
        kept["newest"][one.fingerprint] = one.example
    request._txmsg_counts = kept  # type: ignore[attr-defined]  # kept on the request
    return kept
