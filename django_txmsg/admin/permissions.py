"""The page "May I?": every permission, what it allows, and whether the user has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.apps import apps
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from .addresses import address
from .base import ReadOnlyAdmin

#: The apps with pages of ours.
APPS = ("django_txmsg", "txmsg_spark")


@dataclass(frozen=True)
class Allowance:
    """One permission, and whether the user has it."""

    permission: str
    what: str
    """What it allows, in words."""
    granted: bool
    """Whether the user has it."""
    page: str
    """The address of the list that it is about; "" if the user may not see it."""


def show(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the page. Every user of the admin site may see it."""
    found = [
        one
        for model in apps.get_models()
        if model._meta.app_label in APPS and admin.admin_site.is_registered(model)
        for one in _allowances(admin, request, model)
    ]
    context = {
        **admin.page_context(request, "May I?"),
        "parts": [
            ("You may", [one for one in found if one.granted]),
            ("You may not", [one for one in found if not one.granted]),
        ],
    }
    return render(request, "admin/django_txmsg/permissions.html", context)


def _allowances(
    admin: ReadOnlyAdmin, request: HttpRequest, model: type[Model]
) -> Iterator[Allowance]:
    """Yield each permission for one model's list, whether the user has it or not."""
    label, name = model._meta.app_label, model._meta.model_name
    rows = model._meta.verbose_name_plural
    named = [(f"view_{name}", f"Can view {rows}"), *model._meta.permissions]
    of_model = admin.admin_site.get_model_admin(model)
    if isinstance(of_model, ReadOnlyAdmin) and of_model.deletes:
        named.append((f"delete_{name}", f"Can delete {rows}"))
    sees = of_model.has_view_permission(request)
    page = address(request, f"admin:{label}_{name}_changelist") if sees else ""
    for codename, what in named:
        permission = f"{label}.{codename}"
        granted = request.user.has_perm(permission)
        yield Allowance(permission, str(what).removeprefix("Can "), granted, page)
