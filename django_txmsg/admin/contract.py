"""The contract as a page: what this service sends and receives, and breaking changes.

It describes the code of the web process. Workers may run newer or older code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render

from ..contracts import comparison, document
from ..contracts.document import READABLE_FROM, VERSION, Contract
from ..errors import ConfigurationError


@dataclass
class Channel:
    """One destination: the stages that consume it, whether this service sends to it,
    and its messages."""

    address: str
    sent: bool = False
    stages: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


@dataclass
class Message:
    """One type of messages, as it is shown."""

    name: str
    version: int | None
    readable_from: int | None
    schema: str


def show(request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
    """Return the page, or with `?format=json` the document itself."""
    file = document.path()
    try:
        before = document.read(file) if file.exists() else {}
        contract = document.build(before)
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
            "breaking": comparison.breaking(before, contract),
        },
    )


def channels(contract: Contract) -> list[Channel]:
    """Return the contract's channels, by address."""
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
