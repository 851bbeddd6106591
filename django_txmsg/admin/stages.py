"""The pages of stages and of recurring messages, with buttons to pause and resume them.
Recurring messages can also be made and removed. The contract has a page, too."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin
from django.db import router
from django.http import HttpRequest, HttpResponse

from .. import contracts
from ..consuming import rates
from ..contracts import READABLE_FROM, VERSION, Contract
from ..errors import ConfigurationError
from ..models import Schedule, StageState
from ..models.monitoring import Done
from ..monitoring import pausing, schedule, status
from ..stages import all_stages
from .audit import perform
from .base import ReadOnlyAdmin, given, insist, may, operator


class PausableAdmin(ReadOnlyAdmin):
    """A list whose rows have buttons to pause and resume, and a field for the
    reason."""

    #: The paused kind of object, in names of addresses and of the permission.
    kind: ClassVar[str]
    #: The same as people read it.
    noun: ClassVar[str]
    #: The page's template and title.
    page: ClassVar[str]
    title: ClassVar[str]
    #: The form's field with the name.
    field: ClassVar[str] = "name"

    #: Pauses or resumes the one with this name. Returns None if nothing changed. Raises
    #: ConfigurationError for an unknown name.
    change: Callable[..., Done | None]

    def database(self, name: str) -> str:
        """Return the database that stores whether `name` is paused."""
        return router.db_for_write(self.model)

    def get_urls(self) -> list[Any]:
        """Add the URLs of the buttons."""
        return [
            self.button(
                f"{verb}/", partial(self.move, paused=paused), f"{self.kind}_{verb}"
            )
            for verb, paused in (("pause", True), ("resume", False))
        ] + super().get_urls()

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show all rows on one page."""
        insist(self.has_view_permission(request))
        return self.show(request, self.page, self.title, self.rows(request))

    def rows(self, request: HttpRequest) -> dict[str, Any]:
        """Return the template context with the rows."""
        raise NotImplementedError

    def move(self, request: HttpRequest, *, paused: bool) -> HttpResponse:
        """Pause or resume a stage or a recurring message."""
        insist(may(request, f"pause_{self.kind}"))
        name, by, why = given(request, self.field), operator(request), given(request)
        change = partial(self.change, name, paused=paused, by=by, why=why)
        state = "already" if paused else "not"
        refusal = f"Nothing was changed: {self.noun} {name} is {state} paused."
        perform(request, self.database(name), change, refusal)
        return self.led_to_list(request)


# The contract as a page: what this service sends and receives, and breaking changes.


def channels(contract: Contract) -> list[dict[str, Any]]:
    """Return the contract's channels, sorted by address: each with its messages,
    whether this service sends to it, and the stages that consume it."""
    types = contract["components"]["messages"]
    found: dict[str, dict[str, Any]] = {}
    for address, channel in sorted(contract["channels"].items()):
        messages = [_message(one, types[one]) for one in sorted(channel["messages"])]
        found[address] = {"address": address, "stages": [], "messages": messages}
    for name, operation in sorted(contract["operations"].items()):
        action, _, who = name.partition(".")
        at = found[operation["channel"]["$ref"].rpartition("/")[2]]
        if action == "send":
            at["sent"] = True
        else:
            at["stages"].append(who)
    return list(found.values())


def _message(name: str, given: Contract) -> dict[str, Any]:
    schema = given.get("payload", {}).get("schema", {})
    return {
        "name": name,
        "version": given.get(VERSION),
        "readable_from": given.get(READABLE_FROM),
        "schema": json.dumps(schema, indent=2, ensure_ascii=False),
    }


#: How long a rate holds that the page sets.
LIMITED = dt.timedelta(hours=1)


@admin.register(StageState)
class StageAdmin(PausableAdmin):
    """The page of stages: those declared in this process, and those known only from the
    database."""

    kind, noun, field = "stage", "stage", "stage"
    page, title = "stages", "Stages"
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
            for one in StageState.objects.using(router.db_for_write(StageState))
            if one.rate_until is not None and one.rate_until > picture.now
        }
        return {
            "now": picture.now,
            "rows": [
                (place, declared.get(place.name), limited.get(place.name))
                for _, place in sorted(picture.stages.items())
            ],
            "limits": any(one.rate for one in declared.values()),
        }

    def limit(self, request: HttpRequest) -> HttpResponse:
        """Set another rate for a stage, for an hour. If the user enters no rate,
        restore the stage's declared rate."""
        insist(may(request, "limit_stage"))
        name, rate = given(request, "stage"), given(request, "rate")
        change: Callable[[], Done | None] = partial(rates.reset, name)
        if rate:
            change = partial(rates.limit, name, rate, LIMITED, by=operator(request))
        refusal = f"Stage {name} has its own rate already."
        perform(request, rates.states().db, change, refusal)
        return self.led_to_list(request)

    def contract(self, request: HttpRequest) -> HttpResponse:
        """Show the contract: which messages this service sends and receives."""
        insist(self.has_view_permission(request))
        file = contracts.path()
        context: dict[str, Any]
        try:
            before = contracts.read(file) if file.exists() else {}
            contract = contracts.build(before)
        except ConfigurationError as error:
            context = {"problem": str(error)}
        else:
            context = {
                "channels": channels(contract),
                "committed": bool(before),
                "changed": before != contract,
                "breaking": contracts.breaking(before, contract),
            }
        return self.show(request, "contract", "Contract", context)


@admin.register(Schedule)
class ScheduleAdmin(PausableAdmin):
    """The page of recurring messages: those declared in this process, and those that
    exist only in the database."""

    kind, noun = "schedule", "recurring message"
    page, title = "schedule", "Recurring messages"
    exclude = ("made",)  # it contains a body
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(schedule.database_of)

    def rows(self, request: HttpRequest) -> dict[str, Any]:
        """Return the recurring messages."""
        return {"rows": schedule.read()}

    def get_urls(self) -> list[Any]:
        """Add the URLs that make and remove a recurring message."""
        return [
            self.button("make/", self.make, "schedule_make"),
            self.button("remove/", self.remove, "schedule_remove"),
            *super().get_urls(),
        ]

    def make(self, request: HttpRequest) -> HttpResponse:
        """Make a recurring message from the form's values, or change it."""
        name, expression, destination, body, tz = (
            given(request, field)
            for field in ("name", "expression", "destination", "body", "tz")
        )
        return self._change(
            request,
            partial(
                schedule.make, name, expression, destination, body or "null", tz or None
            ),
        )

    def remove(self, request: HttpRequest) -> HttpResponse:
        """Remove a recurring message that was made at run time."""
        return self._change(request, partial(schedule.remove, given(request, "name")))

    def _change(self, request: HttpRequest, change: Callable[[], Done]) -> HttpResponse:
        insist(may(request, "make_schedule"))
        perform(request, router.db_for_write(Schedule), change, refusal="")
        return self.led_to_list(request)
