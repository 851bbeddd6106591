"""Hooks that make a process wait at one step, so that a test can kill it there.

Environment variables control the process. CRASH_STAGES is a JSON list of stages, and
CRASH_POINT is the step. CRASH_GO is a path: when that file exists, the process
continues.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django_txmsg import stages
from django_txmsg.consuming import decoding, inbox, modes
from django_txmsg.consuming.protocol import StageTransaction
from django_txmsg.consuming.stage_thread import StageThread
from django_txmsg.envelope.message import Message
from django_txmsg.relaying import relay
from django_txmsg.relaying.settlement import Settlement
from django_txmsg.sending.outbox import send_message

RELAY_STEPS = ["before the claim", "claimed", "half sent", "sent", "settled"]

_stood = threading.Event()


def stand(step: str) -> None:
    """If `step` is CRASH_POINT, wait until the file CRASH_GO exists. Each process waits
    only once."""
    if step != os.environ.get("CRASH_POINT") or _stood.is_set():
        return
    _stood.set()
    print(f"at {step}", flush=True)  # noqa: T201 - the test waits for it
    go = Path(os.environ["CRASH_GO"])
    while not go.exists():
        threading.Event().wait(0.05)


def consumer() -> None:
    """Declare the stages, and make the consumer wait at the step CRASH_POINT."""
    for one in json.loads(os.environ["CRASH_STAGES"]):
        next_destination = one.pop("next")
        stages.stage(**one)(_handler(one["transaction"], one["name"], next_destination))
    after(decoding, "read", "received")
    after(inbox, "_recorded", "recorded")
    before(StageTransaction, "__exit__", "before the commit")
    before(StageTransaction, "__exit__", "broker proven alive")
    after(StageTransaction, "__exit__", "committed")
    after(modes.BrokerOnly, "_commit", "broker committed")
    before(StageThread, "_note", "acknowledged")


def relays() -> None:
    """Make the relay wait at the step CRASH_POINT."""
    before(relay.Lane, "_claim", "before the claim")
    after(relay.Lane, "_claim", "claimed")
    before(Settlement, "settle", "sent")
    after(Settlement, "settle", "settled")
    real = relay.Lane._send

    def half(lane: Any, rows: Any, *given: Any, **named: Any) -> None:
        if rows and os.environ.get("CRASH_POINT") == "half sent":
            session = lane._open()
            handed_over = session.send

            def send(batch: Any, **options: Any) -> Any:
                outcomes = handed_over(batch[: len(batch) // 2], **options)
                stand("half sent")
                return outcomes + handed_over(batch[len(batch) // 2 :], **options)

            session.send = send
        real(lane, rows, *given, **named)

    relay.Lane._send = half  # type: ignore[method-assign]


def before(owner: Any, name: str, step: str) -> None:
    """Make the process wait at `step`, before it calls the function `name` of
    `owner`."""
    real: Callable[..., Any] = getattr(owner, name)

    def standing(*given: Any, **named: Any) -> Any:
        stand(step)
        return real(*given, **named)

    setattr(owner, name, standing)


def after(owner: Any, name: str, step: str) -> None:
    """Make the process wait at `step`, after the function `name` of `owner` has
    returned."""
    real: Callable[..., Any] = getattr(owner, name)

    def standing(*given: Any, **named: Any) -> Any:
        result = real(*given, **named)
        if name != "_claim" or result:
            stand(step)
        return result

    setattr(owner, name, standing)


def _handler(mode: str, name: str, next_destination: str) -> Callable[[Message], None]:
    def handler(message: Message) -> None:
        from tests.app.models import Effect

        stand("begun")
        if mode != "broker_only":
            Effect.objects.create(name=name, message_id=str(message.id))
        send_message(next_destination, {"from": str(message.id)})
        stand("handled")

    handler.__qualname__ = name
    return handler
