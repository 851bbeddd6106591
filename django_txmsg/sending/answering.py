"""Hop 9 of a request: the result of the stage is sent to the requester as the
answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import conf, wire
from ..envelope.handler import Handler
from ..envelope.message import MAX_NAME_LENGTH, Message, correlation_id
from ..envelope.message_type import message_type
from ..errors import DecodeError
from ..models import DeadLetter, InboxMessage
from .destination import TypedName
from .outbox import send_part

#: Destinations of answers: the steps of a flow, and views that wait.
_ANSWERED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.(steps|answers)")
#: The longest ticket that is carried back, in characters.
MAX_TICKET = 300
#: Reasons for which a request died, but an operator or a deployment may still save it.
_UNDECIDED = frozenset(
    {"attempts_exhausted", "worker_lost", "needs_newer_code", "broker"}
)


@message_type("txmsg.Dead")
@dataclass(frozen=True)
class Dead:
    """The answer to a request that no stage will process: the stage refused the
    request, the broker rejected it, no code can read it, an operator discarded it, or
    it was cancelled. `reason` is the same code as in the dead letter, or
    `cancelled`."""

    reason: str


@message_type("txmsg.Cancelled")
@dataclass(frozen=True)
class Cancelled:
    """The answer of a cancelled run."""

    why: str = ""


@message_type("txmsg.Buried")
@dataclass(frozen=True)
class Buried:
    """Reports to a gather that one of its requests is a dead letter, so that the gather
    sends its next request. This is not the answer: an operator may still redeliver the
    dead letter."""

    reason: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where the answer to a message is sent. `given` contains the headers of that
    message. The answer repeats some of them."""

    destination: str
    given: Mapping[str, str]

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Address | None:
        """Return the address in the headers, or None if the headers request no answer.
        Raises DecodeError if no answer may be sent to that destination."""
        destination = given.get(wire.REPLY_TO)
        if destination is None:
            return None
        allowed = destination in conf.get().REPLY_TO or (
            len(destination) <= MAX_NAME_LENGTH and _ANSWERED.fullmatch(destination)
        )
        if not allowed:
            raise DecodeError(
                "reply_to",
                f"no answer goes to {destination[:80]!r}: it is neither the steps of a "
                f'flow nor in TXMSG["REPLY_TO"]',
            )
        if len(given.get(wire.TICKET, "")) > MAX_TICKET:
            raise DecodeError("ticket", f"longer than {MAX_TICKET} characters")
        return cls(destination, given)

    def send(
        self,
        answer: object,
        annotation: Any = None,
        *,
        using: str | None = None,
        broker: str = "default",
    ) -> Message:
        """Store the answer. If an annotation is given, encode the answer as an object
        of that type. The answer gets the correlation id of the request. If the request
        has none, the answer gets the correlation id of the message that the stage is
        processing."""
        destination: str | TypedName[Any] = self.destination
        # An undo that had nothing to undo answers None, whatever its type says.
        nothing = answer is None and wire.UNDOES in self.given
        if annotation is not None and not nothing and not isinstance(answer, Dead):
            destination = TypedName(self.destination, annotation)
        back = {
            name: value
            for name, value in self.given.items()
            if name in (wire.TICKET, wire.FLOW)
        }
        back[wire.HOP] = str(hop(self.given))
        return send_part(
            destination,
            answer,
            back,
            correlation_id=correlation_id(self.given) or "",
            using=using,
            broker=broker,
        )


def hop(given: Mapping[str, str]) -> int:
    """Return the number of steps that the run of the flow has made since its last sleep
    or wait."""
    text = given.get(wire.HOP, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def replying(handler: Handler, annotation: Any, broker: str) -> Handler:
    """Return a handler that sends its result as the answer, if the message requests
    one."""

    @functools.wraps(handler)
    def handle(message: Message) -> Any:
        if wire.REPLY_TO not in message.conversation:
            return handler(message)
        address = Address.of(message.conversation)  # before there is work to lose
        result = handler(message)
        if address is not None:
            address.send(result, annotation, broker=broker)
        return result

    return handle


def answer_dead(
    request: DeadLetter, reason: str, *, using: str, receivers: Iterable[str] = ()
) -> None:
    """Report to the requester that no stage will process a request, and ensure that no
    stage processes it. Runs inside the open transaction. `receivers` are stages at
    which the request may still arrive.

    If an operator can still redeliver the request, no answer is sent. But if the
    requester is a gather that holds back further requests, the gather gets `Buried`. If
    the dead message is an undo, nothing is reported, because an undo must be done.
    """
    headers, broker = request.headers, request.broker
    if wire.UNDOES in headers:
        return
    try:
        address = Address.of(headers)
    except DecodeError:
        return
    if address is None or wire.TICKET not in headers:
        return
    if reason in _UNDECIDED:
        if wire.holds_back(headers[wire.TICKET]):
            address.send(Buried(reason), using=using, broker=broker)
        return
    inbox, stages = InboxMessage.objects.db_manager(using), [request.stage]
    if not request.stage:
        # Any stage may have received a copy. If one has processed it, that stage has
        # answered. If the run of a flow is cancelled before this first message reaches
        # the flow, the cancel revokes the message and answers.
        rows = inbox.filter(message_id=request.message_id)
        if rows.exclude(processed_at=None, revoked_at=None).exists():
            return
        stages = sorted({*rows.values_list("stage", flat=True), *receivers})
    # False if a stage has processed the request meanwhile, or it is revoked already.
    place = request.destination
    if all(inbox.revoke(stage, request.message_id, place) for stage in stages):
        address.send(Dead(reason), using=using, broker=broker)
