"""Lists that count their rows only up to a cap, because counting a large table is
slow."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import Page, Paginator
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
    """Divides a list into pages, and counts rows only up to CAP. The list's filters are
    queried only once: one query returns the ids of the rows, and both the count and the
    pages use these ids. A filter without an index may have to read most of the
    table."""

    @property
    def cap(self) -> int:
        """The maximum number of rows on all pages together."""
        return CAP

    @cached_property
    def ids(self) -> list[Any]:
        """The primary keys of the first `cap` + 1 rows, in the list's order."""
        # Newest first: the oldest rows may not be in memory.
        rows: Any = self.object_list
        return list(rows.values_list("pk", flat=True)[: self.cap + 1])

    @cached_property
    def count(self) -> int:
        """The number of rows on all pages together."""
        return min(len(self.ids), self.cap)

    def page(self, number: Any) -> Page:  # type: ignore[type-arg]  # as above
        """Return a page. Its rows are read by their primary keys."""
        number = self.validate_number(number)
        begins = (number - 1) * self.per_page
        rows: Any = self.object_list
        shown = rows.filter(pk__in=self.ids[begins : begins + self.per_page])
        return Page(shown, number, self)


class WholePaginator(CappedPaginator):
    """Divides a list into pages that contain all rows. Used for lists that have no link
    to older rows."""

    cap = 1_000_000


class CappedList(ChangeList):
    """A list that counts its rows only up to CAP.

    The numbered pages end at the cap. A link then leads to the next rows, which have
    lower ids. An index finds these rows, so the oldest rows load as fast as the newest.
    """

    #: The address of the next pages, "" if all rows are on these.
    older = ""

    def get_filters_params(self, params: Any = None) -> Any:
        """Return the filters' query parameters, without the parameter `older`."""
        found = super().get_filters_params(params)
        found.pop(OLDER, None)
        return found

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        """Return the rows. If the parameter `older` is given, return only rows whose id
        is lower."""
        rows = super().get_queryset(request, *args, **options)
        begins = self.params.get(OLDER)
        if begins is None:
            return rows
        if not begins.isdecimal() or len(begins) > 18:
            raise IncorrectLookupParameters
        return rows.filter(pk__lt=int(begins))

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Return the query string of a link. A link to another page of the list keeps
        the parameter `older`. Any other link drops `older`: after the user has changed
        a filter or the order, the list begins with the newest rows."""
        if not new_params or not new_params.keys() & {OLDER, PAGE_VAR}:
            remove = [*(remove or ()), OLDER]
        return super().get_query_string(new_params, remove)

    @property
    def newest(self) -> str:
        """The query string of the first page, or "" if the list already shows the
        newest rows."""
        if OLDER not in self.params:
            return ""
        return self.get_query_string()

    def get_results(self, request: HttpRequest) -> None:
        """Set the number of results. If there are more than CAP, also set the link to
        older rows."""
        super().get_results(request)
        self.result_count = len(self.paginator.ids)
        if (self.show_all and self.can_show_all) or not self.multi_page:
            rows: Any = self.queryset
            self.result_list = rows.filter(pk__in=self.paginator.ids)
        if self.result_count > CAP and self.model_admin.ordering == ("-id",):
            last = self.paginator.ids[CAP - 1]
            self.older = self.get_query_string({OLDER: str(last)})


def listed(count: int) -> str:
    """Return a number of rows as text: "12", or "1,000+" for a number above the cap."""
    return display.capped(count, CAP)


def count(rows: QuerySet[Any]) -> int:
    """Count the rows, but stop at CAP + 1."""
    return rows.order_by()[: CAP + 1].values("pk").count()
