"""The messages that led to a message and that it led to: all with the same correlation
id, as a tree.

A message from a stage has a `session_id` that is derived from the message which the
stage processed. So each message's cause can be found without being stored.
"""

from __future__ import annotations

import datetime as dt
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from django.db.models import Q

from .. import conf, wire
from ..models import InboxMessage, OutboxMessage

#: Most messages of one flow that are shown.
MOST = 200


@dataclass
class Node:
    """One message of the tree."""

    message_id: uuid.UUID
    destination: str
    at: dt.datetime
    state: str
    stages: list[tuple[str, str]] = field(default_factory=list)
    session_id: uuid.UUID | None = None
    depth: int = 0
    current: bool = False


def flow(message_id: uuid.UUID, correlation_id: str, *, using: str) -> list[Node]:
    """Return the tree of a message, causes before their effects.

    A message that started a tree has no correlation id; the others then have its
    message id as theirs.
    """
    name = correlation_id or str(message_id)
    same = Q(correlation_id=name)
    with suppress(ValueError):
        same |= Q(message_id=uuid.UUID(name))
    stored = OutboxMessage.objects.using(using).filter(same).defer("body", "headers")
    received = InboxMessage.objects.using(using).filter(same).defer("body", "headers")
    nodes: dict[uuid.UUID, Node] = {}
    for row in stored.order_by("pk")[:MOST]:
        nodes[row.message_id] = Node(
            row.message_id, row.destination, row.created_at, row.state.value,
            session_id=row.session_id,
        )  # fmt: skip
    for seen in received.order_by("pk")[:MOST]:
        node = nodes.get(seen.message_id)
        if node is None:
            at = seen.created_at or seen.first_received_at
            node = Node(seen.message_id, seen.destination, at, "received")
            nodes[seen.message_id] = node
        state = "redelivering" if seen.due_at else seen.state.value
        node.stages.append((seen.stage, state))
    if message_id in nodes:
        nodes[message_id].current = True
    return _in_order(nodes)


def _in_order(nodes: dict[uuid.UUID, Node]) -> list[Node]:
    service = conf.get().SERVICE
    marks = {
        wire.session_id(service, node.message_id, stage): node.message_id
        for node in nodes.values()
        for stage, _ in node.stages
    }
    children: dict[uuid.UUID | None, list[Node]] = {}
    for node in nodes.values():
        cause = marks.get(node.session_id) if node.session_id else None
        if cause == node.message_id:
            cause = None
        children.setdefault(cause, []).append(node)
    ordered: list[Node] = []

    def walk(cause: uuid.UUID | None, depth: int) -> None:
        for node in sorted(children.pop(cause, []), key=lambda one: one.at):
            node.depth = min(depth, 12)
            ordered.append(node)
            walk(node.message_id, depth + 1)

    walk(None, 0)
    for left in [one for rest in children.values() for one in rest]:
        ordered.append(left)  # a circle of causes, which only a foreign id can make
    return ordered
