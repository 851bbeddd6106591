"""Template tags for counts, ages and states on the operator's pages.

Django imports the tags of every app, even if the admin is not installed.
"""

from __future__ import annotations

from typing import Any

from django import template
from django.apps import apps

register = template.Library()

if apps.is_installed("django.contrib.admin"):
    from ..admin import counting, display, overview

    for shown in (
        display.age,
        display.ago,
        display.amount,
        display.at_least,
        display.badge,
        display.capped,
        display.duration,
        display.exact,
        display.first_line,
        display.last_line,
        counting.listed,
        display.moment,
    ):
        register.filter(shown)


@register.filter
def focusable(table: str) -> str:
    """Make a table scrollable by the keyboard. A table may be wider than a phone's
    screen, and may contain no links to focus."""
    return table.replace('<div class="results">', '<div class="results" tabindex="0">')


@register.inclusion_tag("admin/django_txmsg/nav.html", takes_context=True)
def txmsg_nav(context: dict[str, Any]) -> dict[str, Any]:
    """Render the navigation at the top of each page."""
    labels = [one["app_label"] for one in context.get("available_apps", ())]
    pages = overview.pages(context["request"])
    return {"pages": pages if "django_txmsg" in labels else pages[1:]}


@register.inclusion_tag("admin/django_txmsg/overview.html", takes_context=True)
def txmsg_overview(context: dict[str, Any]) -> dict[str, Any]:
    """Render the state of messaging for the app's index page."""
    request = context["request"]
    more = {"perms": context["perms"], "request": request}
    return {**more, "live": "live" in request.GET, **overview.overview(request)}
