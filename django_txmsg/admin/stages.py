"""The page of stages, with buttons to pause and resume them, and the contract's
page."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field
from typing import Any

from django.contrib import admin, messages
from django.db import router
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from .. import contracts
from ..consuming import rates
from ..contracts import READABLE_FROM, VERSION, Contract
from ..errors import ConfigurationError
from ..models import StageState
from ..models.monitoring import Deed
from ..monitoring import pausing, status
from ..stages import all_stages
from .audit import audit, audited
from .base import given, insist
from .inbox import attempts_allowed
from .pausing import PausableAdmin

# The contract as a page: what this service sends and receives, and breaking changes.


@dataclass
class Channel:
    """One destination in the contract, with its messages. `sent` is true if this
    service sends to the destination. `stages` are the stages that consume it."""

    address: str
    sent: bool = False
    stages: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


@dataclass
class Message:
    """One message type in the contract."""

    name: str
    version: int | None
    readable_from: int | None
    schema: str


def show_contract(request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
    """Show the contract. `?format=json` returns the document itself."""
    file = contracts.path()
    try:
        before = contracts.read(file) if file.exists() else {}
        contract = contracts.build(before)
    except ConfigurationError as error:
        return render(request, _TEMPLATE, {**context, "problem": str(error)})
    if request.GET.get("format") == "json":
        return JsonResponse(contract, json_dumps_params={"indent": 2})
    return render(
        request,
        _TEMPLATE,
        {
            **context,
            "channels": channels(contract),
            "committed": bool(before),
            "changed": before != contract,
            "breaking": contracts.breaking(before, contract),
        },
    )


def channels(contract: Contract) -> list[Channel]:
    """Return the contract's channels, sorted by address."""
    found = {name: Channel(name) for name in sorted(contract["channels"])}
    types = contract["components"]["messages"]
    for name, channel in found.items():
        channel.messages = [
            _message(one, types[one])
            for one in sorted(contract["channels"][name]["messages"])
        ]
    for name, operation in sorted(contract["operations"].items()):
        action, _, who = name.partition(".")
        at = found[operation["channel"]["$ref"].rpartition("/")[2]]
        if action == "send":
            at.sent = True
        else:
            at.stages.append(who)
    return list(found.values())


def _message(name: str, given: Contract) -> Message:
    schema = given.get("payload", {}).get("schema", {})
    return Message(
        name,
        given.get(VERSION),
        given.get(READABLE_FROM),
        json.dumps(schema, indent=2, ensure_ascii=False),
    )


_TEMPLATE = "admin/django_txmsg/contract.html"

#: How long a rate holds that the page sets.
LIMITED = dt.timedelta(hours=1)


@admin.register(StageState)
class StageAdmin(PausableAdmin):
    """The page of stages: those declared in this process, and those known only from the
    database."""

    kind, noun, called, field = "stage", "stage", "stage", "stage"
    title, change_list_template = "Stages", "admin/django_txmsg/stages.html"
    follows = " Its consumers obey within two seconds."
    change = staticmethod(pausing.set_stage)

    def get_urls(self) -> list[Any]:
        """Add the URLs of the contract's page and of the button for a rate."""
        return [
            self.button("limit/", self.limit, "stage_limit"),
            self.at("contract/", self.contract, "contract"),
            *super().get_urls(),
        ]

    def rows(self, request: HttpRequest) -> dict[str, Any]:
        """Return all stages, with their waiting and dead messages, workers and
        rates."""
        picture = status.read()
        declared = {one.name: one for one in all_stages()}
        limited = {
            one.stage: one
            for one in StageState.objects.using(router.db_for_read(StageState))
            if one.rate_until is not None and one.rate_until > picture.now
        }
        return {
            "now": picture.now,
            "rows": [
                (
                    place,
                    declared.get(place.name),
                    attempts_allowed().get(place.name),
                    place.workers,
                    limited.get(place.name),
                )
                for _, place in sorted(picture.stages.items())
            ],
            "may_limit": request.user.has_perm("django_txmsg.limit_stage"),
            "limits": any(one.rate for one in declared.values()),
        }

    def limit(self, request: HttpRequest) -> HttpResponse:
        """Set another rate for a stage, for an hour. If the user enters no rate,
        restore the stage's declared rate."""
        insist(request.user.has_perm("django_txmsg.limit_stage"))
        name, rate = given(request, "stage"), given(request, "rate")
        states, said = rates.states(), f"Stage {name} has its own rate again."
        with audited(states.db):
            try:
                if rate:
                    by = request.user.get_username()
                    rates.limit(name, rate, LIMITED, by=by)
                    said = f"Stage {name} has a rate of {rate} for an hour."
                elif not states.unlimit(name):
                    said = ""
            except ConfigurationError as error:
                messages.error(request, str(error))
            else:
                if said:
                    audit(request, states.get(stage=name), Deed.LIMIT, said)
                    messages.success(request, said)
        return self.led_to_list(request)

    def contract(self, request: HttpRequest) -> HttpResponse:
        """Show the contract: which messages this service sends and receives."""
        insist(self.has_view_permission(request))
        return show_contract(request, self.page_context(request, "Contract"))
