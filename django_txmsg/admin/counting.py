"""Counts with a cap: no list counts a large table to its end."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from . import display

#: Most rows that a list counts; more are "1,000+". Finding a row by a filter without an
#: index may need reading a hundred others.
CAP = 1_000


class CappedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """Pages whose rows are counted only up to a cap."""

    @cached_property
    def count(self) -> int:
        """How many rows there are, or one more than the cap."""
        # In the list's own order, newest first: the oldest may not be in memory.
        rows: Any = self.object_list
        counted: int = rows[: CAP + 1].values("pk").count()
        return counted


class CappedList(ChangeList):
    """A list that shows when it has not counted all of its rows."""

    def get_results(self, request: HttpRequest) -> None:
        """Show the number of results beside the search only if it is known."""
        super().get_results(request)
        if self.result_count > CAP:
            self.full_result_count = self.result_count


def listed(count: int) -> str:
    """Return a list's number of rows, or the cap and a plus."""
    return display.capped(count, CAP)


def count(rows: QuerySet[Any]) -> int:
    """Count rows up to the cap."""
    return rows.order_by()[: CAP + 1].values("pk").count()
