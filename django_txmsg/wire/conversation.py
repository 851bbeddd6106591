"""The headers by which a message belongs to a conversation: which message it answers,
which run waits for its answer, which flow it belongs to, what it undoes."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from .instants import format_instant, parse_instant

#: Where the answer to a request goes. Not `reply-to`, whose value RabbitMQ replaces.
REPLY_TO = "txmsg-reply-to"
#: Beside it for consumers that are not of this package: the name that JMS knows. Their
#: answers return the ticket as `correlation-id`.
JMS_REPLY_TO = "reply-to"
#: The part that the answer returns: the waiting run, and its turn.
TICKET = "txmsg-ticket"
#: The id of the first run, which has caused all the others.
FLOW = "txmsg-flow"
#: Steps since the last sleep or wait.
HOP = "txmsg-hop"
#: The request that an undo is for; or OWN_WORK.
UNDOES = "txmsg-undoes"
#: Of an undo of a step's own work, for which there was no request.
OWN_WORK = "own"
#: When a message expires; a request does so with its flow's deadline.
EXPIRES = "txmsg-expires"
#: The prefix of headers that all messages of a flow carry along.
PROP = "txmsg-prop-"

_NAMES = frozenset({REPLY_TO, TICKET, FLOW, HOP, UNDOES})


def of_conversation(name: str) -> bool:
    """Return whether a header is one of a conversation's."""
    return name in _NAMES or name.startswith(PROP)


def ticket(run_id: uuid.UUID, turn: uuid.UUID) -> str:
    """Return the ticket that continues a run waiting under this turn."""
    return f"{run_id.hex}.{turn.hex}"


def read_ticket(text: str) -> tuple[uuid.UUID, uuid.UUID]:
    """Return the run and the turn of a ticket. Raises ValueError."""
    run_id, _, turn = text.partition(".")
    if len(run_id) != 32 or len(turn) != 32:
        raise ValueError(text)
    return uuid.UUID(run_id), uuid.UUID(turn)


def is_request(headers: Mapping[str, str]) -> bool:
    """Return whether a flow waits for a message's answer. It expires with that wait, so
    an expired one is dropped, and not buried."""
    return TICKET in headers and REPLY_TO in headers


def conversation(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what a message's headers say of the conversation that it is part of."""
    found = {name: value for name, value in headers.items() if of_conversation(name)}
    for name in (EXPIRES, JMS_REPLY_TO):
        if name in headers and is_request(headers):
            found[name] = headers[name]
    return found


@dataclass(frozen=True, slots=True)
class Undone:
    """The request that an undo reverses: its id, when it was stored, and whether its
    answer has arrived, which proves that it was processed."""

    request_id: uuid.UUID
    at: dt.datetime
    answered: bool

    def __str__(self) -> str:
        answered = ";answered" if self.answered else ""
        return f"{self.request_id};at={format_instant(self.at)}{answered}"

    @classmethod
    def parse(cls, text: str) -> Undone:
        """Return the content of a header. Raises ValueError."""
        request_id, at, *more = text.split(";")
        if not at.startswith("at=") or more not in ([], ["answered"]):
            raise ValueError(text)
        return cls(uuid.UUID(request_id), parse_instant(at[3:]), bool(more))
