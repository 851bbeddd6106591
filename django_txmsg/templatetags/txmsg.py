"""Template tags for counts, ages and states on the operator's pages.

Django imports the tags of every app, even if the admin is not installed. So this module
imports the admin's modules only when a tag is used.
"""

from __future__ import annotations

from typing import Any

from django import template

register = template.Library()


def _display() -> Any:
    from ..admin import display

    return display


def _filter(name: str) -> None:
    register.filter(name, lambda value: getattr(_display(), name)(value))


for _name in (
    "at_least",
    "badge",
    "capped",
    "duration",
    "exact",
    "first_line",
    "last_line",
    "moment",
):
    _filter(_name)


@register.filter
def listed(count: int) -> str:
    """Render the number of rows that a page lists."""
    from ..admin import counting

    return counting.listed(count)


@register.filter
def age(instant: Any, now: Any = None) -> Any:
    """Render the time since an instant, or until an instant in the future."""
    return _display().age(instant, now)


@register.filter
def ago(instant: Any, now: Any = None) -> Any:
    """Render an age in words."""
    return _display().ago(instant, now)


@register.filter
def focusable(table: str) -> str:
    """Make a table scrollable by the keyboard. A table may be wider than a phone's
    screen, and may contain no links to focus."""
    return table.replace('<div class="results">', '<div class="results" tabindex="0">')


@register.inclusion_tag("admin/django_txmsg/nav.html", takes_context=True)
def txmsg_nav(context: dict[str, Any]) -> dict[str, Any]:
    """Render the navigation at the top of each page."""
    from ..admin import overview

    apps = [one["app_label"] for one in context.get("available_apps", ())]
    pages = overview.pages(context["request"])
    return {"pages": pages if "django_txmsg" in apps else pages[1:]}


@register.inclusion_tag("admin/django_txmsg/overview.html", takes_context=True)
def txmsg_overview(context: dict[str, Any]) -> dict[str, Any]:
    """Render the state of messaging for the app's index page."""
    from ..admin import overview

    request = context["request"]
    more = {"perms": context["perms"], "request": request}
    return {**more, "live": "live" in request.GET, **overview.overview(request)}
