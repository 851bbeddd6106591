"""Breaking changes of the contract.

A change is breaking in two cases: new code cannot read messages that are already on
their way, or old code (of other services or of running processes) cannot read new
messages. This module also finds rows that still wait for a destination or a type which
the contract no longer has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.db.models import Q

from .. import wire
from ..envelope import message_type as message_types
from ..envelope.schema_reader import faults
from ..models import DeadLetter, InboxMessage, OutboxMessage, QueueMessage
from ..models.dead_letter import Resolution
from ..models.outbox import PENDING
from ..models.queue import queue_name
from ..stages import all_stages
from .document import READABLE_FROM, READERS, VERSION, Contract, schema_of

#: The two directions, as reported.
OLD_MESSAGES = "new code cannot read messages that are on their way"
OLD_READERS = "running code cannot read the new messages"
#: Of what the contract no longer has.
WAITS = "rows still wait for it"


class Change(NamedTuple):
    """One breaking change: where it is, what has changed, and what breaks."""

    where: str
    what: str
    breaks: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.breaks}"


def breaking(committed: Contract, current: Contract) -> list[Change]:
    """Return the changes from `committed` to `current` that break other code."""
    return [
        *_received(committed, current),
        *_sent(committed, current),
        *_bodies(committed, current),
    ]


def _received(old: Contract, new: Contract) -> Iterator[Change]:
    now = _of_operations(new, "receive")
    for channel, types in _of_operations(old, "receive").items():
        if channel not in now:
            yield Change(channel, "no stage consumes it any more", OLD_MESSAGES)
            continue
        if not now[channel]:
            continue  # a handler that takes every message
        gone = sorted(types - now[channel])
        for name in gone:
            yield Change(channel, f"no stage takes {name} any more", OLD_MESSAGES)
        if not types:
            what = "its stage took every message, and now takes typed ones only"
            yield Change(channel, what, OLD_MESSAGES)


def _sent(old: Contract, new: Contract) -> Iterator[Change]:
    before = _of_operations(old, "send")
    for channel, types in _of_operations(new, "send").items():
        if channel not in before:
            continue
        for name in sorted(types - before[channel]):
            yield Change(channel, f"{name} is sent to it now", OLD_READERS)


def _bodies(old: Contract, new: Contract) -> Iterator[Change]:
    received, sent = _named(new, "receive"), _named(new, "send")
    for name, message in _messages(new).items():
        before = _messages(old).get(name)
        if before is None:
            continue
        was, now = before.get(VERSION, 1), message.get(VERSION, 1)
        if now < was:
            yield Change(name, f"version {was} has become {now}", OLD_READERS)
            continue
        schema = schema_of(message)
        if schema is None:
            continue
        seen = set()
        for version, other in _versions(before, was):
            found = []
            if name in received and not message_types.needed(name, version, now):
                found += [(one, OLD_MESSAGES) for one in faults(schema, other)]
            if name in sent and message.get(READABLE_FROM, 1) <= version:
                there = faults(other, schema, ours=True)
                found += [(one, OLD_READERS) for one in there]
            for fault, breaks in found:
                change = Change(name, f"{fault.path}: {fault.kind}", breaks)
                if change not in seen:
                    yield change
                seen.add(change)


def _versions(message: Contract, version: int) -> Iterator[tuple[int, Contract]]:
    """Yield the versions of a message for which the contract has a schema, each with
    that schema, the newest version first."""
    schema = schema_of(message)
    if schema is not None:
        yield version, schema
    for older, one in sorted(
        message.get(READERS, {}).items(), key=lambda item: -int(item[0])
    ):
        yield int(older), one


def _of_operations(contract: Contract, action: str) -> dict[str, set[str]]:
    """Return the messages of all operations with this action, by channel."""
    found: dict[str, set[str]] = {}
    for operation in contract.get("operations", {}).values():
        if operation["action"] == action:
            channel = _last(operation["channel"]["$ref"])
            names = {_last(one["$ref"]) for one in operation.get("messages", ())}
            found.setdefault(channel, set()).update(names)
    return found


def _named(contract: Contract, action: str) -> set[str]:
    return set().union(*_of_operations(contract, action).values())


def _messages(contract: Contract) -> dict[str, Contract]:
    found: dict[str, Contract] = contract.get("components", {}).get("messages", {})
    return found


def _last(pointer: str) -> str:
    return pointer.rpartition("/")[2].replace("~1", "/").replace("~0", "~")


def waiting(committed: Contract, current: Contract, using: str) -> Iterator[Change]:
    """Yield each entry that the contract no longer has although rows still wait for
    it."""
    now = current["channels"]
    for channel in committed.get("channels", {}):
        if channel not in now:
            yield from _rows(channel, Q(destination=channel), using)
            yield from _queued(channel, queue_name(channel, None), using)
    here = {one.name for one in all_stages()}
    for operation in committed.get("operations", {}):
        kind, _, stage = operation.partition(".")
        if kind == "receive" and stage not in here:
            rows = InboxMessage.objects.using(using).filter(
                stage=stage, due_at__isnull=False
            )
            yield from _counted(f"stage {stage}", "parked", rows)
    types = current["components"]["messages"]
    for name in committed.get("components", {}).get("messages", {}):
        if name not in types:
            begins = Q(**{f"headers__{wire.TYPE}__startswith": f"{name};"})
            yield from _rows(name, begins, using)


def _rows(where: str, condition: Q, using: str) -> Iterator[Change]:
    pending = OutboxMessage.objects.using(using).filter(PENDING, condition)
    yield from _counted(where, "pending in the outbox", pending)
    parked = InboxMessage.objects.using(using).filter(condition, due_at__isnull=False)
    yield from _counted(where, "parked", parked)
    dead = DeadLetter.objects.using(using).filter(condition, resolution=Resolution.OPEN)
    yield from _counted(where, "open dead letters", dead)


def _queued(where: str, queue: str, using: str) -> Iterator[Change]:
    rows = QueueMessage.objects.using(using).filter(queue=queue)
    yield from _counted(where, "in the embedded broker", rows)


def _counted(where: str, what: str, rows: Any) -> Iterator[Change]:
    count = rows.count()
    if count:
        yield Change(where, f"{count} {what}", WAITS)
