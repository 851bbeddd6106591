"""Counts with a limit: no list counts a large table to its end."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from . import display

#: Most rows that a list counts; more are "1,000+". Finding a row by a filter without an
#: index may need reading a hundred others.
CAP = 1_000

#: The parameter that continues a list: only rows with a lower id are shown.
OLDER = "older"


class CappedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """Pages of a list. Rows are counted only up to a limit, the cap."""

    @cached_property
    def count(self) -> int:
        """How many rows there are, or one more than the cap."""
        # In the list's own order, newest first: the oldest may not be in memory.
        rows: Any = self.object_list
        counted: int = rows[: CAP + 1].values("pk").count()
        return counted


class CappedList(ChangeList):
    """A list that shows when it has not counted all of its rows.

    Its pages end at the cap. A link leads to further pages, which begin after the last
    counted row. The row is found by its id, so the oldest rows cost no more than the
    newest.
    """

    #: The address of the next pages, "" if all rows are on these.
    older = ""

    def get_filters_params(self, params: Any = None) -> Any:
        """Return the parameters of the filters, without the parameter for the beginning
        of the list."""
        found = super().get_filters_params(params)
        found.pop(OLDER, None)
        return found

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        """Return the rows below the id in the address."""
        rows = super().get_queryset(request, *args, **options)
        begins = self.params.get(OLDER)
        if begins is None:
            return rows
        if not begins.isdecimal() or len(begins) > 18:
            raise IncorrectLookupParameters
        return rows.filter(pk__lt=int(begins))

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Return the query of an address, without the parameter for the beginning of
        the list. So if a filter changes, the list begins with the newest row."""
        if not new_params or not new_params.keys() & {OLDER, PAGE_VAR}:
            remove = [*(remove or ()), OLDER]
        return super().get_query_string(new_params, remove)

    @property
    def newest(self) -> str:
        """Return the address of the first pages; "" on those pages."""
        if OLDER not in self.params:
            return ""
        return self.get_query_string()

    def get_results(self, request: HttpRequest) -> None:
        """Show the number of results beside the search, if the number is known."""
        super().get_results(request)
        if self.result_count > CAP:
            self.full_result_count = self.result_count
        if self.result_count > CAP and self.model_admin.ordering == ("-id",):
            rows: Any = self.queryset
            last = rows[CAP - 1 : CAP].values_list("pk", flat=True)
            self.older = self.get_query_string({OLDER: str(last[0])})


def listed(count: int) -> str:
    """Return the number of rows of a list, or the cap and a plus."""
    return display.capped(count, CAP)


def count(rows: QuerySet[Any]) -> int:
    """Count rows up to the cap."""
    return rows.order_by()[: CAP + 1].values("pk").count()
