"""What the templates of the operator's pages say about counts, ages and states.

Django imports every app's tags, also where the admin is not installed: so the admin's
modules are imported when a tag is used, not before.
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
    """Write how many rows a list has."""
    from ..admin import counting

    return counting.listed(count)


@register.filter
def age(instant: Any, now: Any = None) -> Any:
    """Write how long ago, or in how long, an instant is."""
    return _display().age(instant, now)


@register.filter
def ago(instant: Any, now: Any = None) -> Any:
    """Write an age in a sentence's words."""
    return _display().ago(instant, now)


@register.inclusion_tag("admin/django_txmsg/nav.html", takes_context=True)
def txmsg_nav(context: dict[str, Any]) -> dict[str, Any]:
    """Show the way to the other pages, the same at the top of each."""
    from ..admin import nav

    return {"pages": nav.pages(context["request"])}


@register.inclusion_tag("admin/django_txmsg/overview.html", takes_context=True)
def txmsg_overview(context: dict[str, Any]) -> dict[str, Any]:
    """Show how messaging is doing, on the app's index page."""
    from ..admin import overview

    request = context["request"]
    more = {"perms": context["perms"], "request": request}
    return {**more, "live": "live" in request.GET, **overview.overview(request)}
