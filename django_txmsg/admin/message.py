"""The page of one message: facts, timeline, attempts, headers, body and related
messages.

A message may have rows in the outbox, in the inbox and among the dead letters. Its page
shows all of them. The page's address contains the message id.
"""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.contrib import messages
from django.db import router
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse

from .. import conf, wire
from ..consuming import deadline, message_acts
from ..dead_letters import resolution
from ..models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from ..models.dead_letter import Resolution
from ..models.fields import clock
from ..models.monitoring import Done
from ..monitoring import turns
from ..monitoring.dead import place
from ..rules.dead_letters import resolver
from ..rules.outbox import origin
from . import base
from . import body as bodies
from .audit import perform
from .base import MESSAGE, given, insist, led, may, operator, sees_messages
from .inbox import shown_state, with_state

# The messages that led to a message and that it led to: all with the same correlation
# id, as a tree.

#: Most messages of one flow that are shown.
MOST = 200


@dataclass
class Node:
    """One message in the tree of related messages."""

    message_id: uuid.UUID
    destination: str
    at: dt.datetime
    state: str
    stages: list[tuple[str, str]] = field(default_factory=list)
    session_id: uuid.UUID | None = None
    depth: int = 0
    current: bool = False


def flow(message_id: uuid.UUID, correlation_id: str, *, using: str) -> list[Node]:
    """Return the messages that are related to a message, as a tree in which each cause
    comes before its effects.

    The first message of a tree has no correlation id. The id of the first message is
    the correlation id of all others.
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
            row.message_id, row.destination, row.created_at, row.state,
            session_id=row.session_id,
        )  # fmt: skip
    for seen in received.order_by("pk")[:MOST]:
        node = nodes.get(seen.message_id)
        if node is None:
            at = seen.created_at or seen.first_received_at
            node = Node(seen.message_id, seen.destination, at, "received")
            nodes[seen.message_id] = node
        node.stages.append((seen.stage, shown_state(seen)))
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


# A message's history from the tables: stored, dispatched, received, processed.

NEXT_ATTEMPT = "next attempt"


@dataclass
class Event:
    """One event in a message's history. `gap` is the time from the previous event to
    this one."""

    at: dt.datetime
    what: str
    where: str
    detail: str = ""
    tone: str = "quiet"
    gap: dt.timedelta | None = None


def timeline(
    outbox: Iterable[OutboxMessage],
    inbox: Iterable[InboxMessage],
    attempts: Iterable[Attempt],
    letters: Iterable[DeadLetter],
) -> list[Event]:
    """Return all recorded events of one message, oldest first, and then the next
    attempt."""
    events = [event for row in outbox for event in _of_outbox(row)]
    received = list(inbox)
    for row in received if not events else ():
        if row.created_at is not None:
            events = [Event(row.created_at, "stored", row.service or "elsewhere")]
            break
    events += [event for row in received for event in _of_inbox(row)]
    error = ""
    for attempt in sorted(attempts, key=lambda one: one.failed_at):
        known, error = error, attempt.exception.partition("\n")[0]
        what = f"attempt {attempt.number} failed"
        shown = "" if error == known else error
        events.append(Event(attempt.failed_at, what, attempt.stage, shown, "bad"))
    events += [event for letter in letters for event in _of_letter(letter)]
    # The next attempt may be overdue, but it is still to come.
    events.sort(key=lambda event: (event.what == NEXT_ATTEMPT, event.at))
    for before, after in itertools.pairwise(events):
        after.gap = after.at - before.at if after.at >= before.at else None
    return events


def _of_outbox(row: OutboxMessage) -> Iterator[Event]:
    yield Event(row.created_at, "stored", row.destination, origin(row.replay_id))
    if row.due_at - row.created_at > dt.timedelta(seconds=1) and not (
        row.attempts or row.last_error
    ):
        yield Event(row.due_at, "due", row.destination, "it was stored with a delay")
    if row.dispatched_at is not None:
        times = f"{row.attempts} rejection{'s' * (row.attempts != 1)}"
        detail = f"after {times}" if row.attempts else ""
        yield Event(row.dispatched_at, "dispatched", row.destination, detail, "good")
    if row.cancelled_at is not None:
        why = row.last_error.partition(": ")[2]
        yield Event(row.cancelled_at, "cancelled", row.destination, why)
    elif row.dead_at is not None:
        yield Event(row.dead_at, "given up", row.destination, row.last_error, "bad")


def _of_inbox(row: InboxMessage) -> Iterator[Event]:
    yield Event(row.first_received_at, "received", row.stage)
    if row.deliveries > 1:
        copy = f"received copy {row.deliveries}"
        yield Event(row.last_received_at, copy, row.stage, "", "warn")
    if row.started_at is not None and row.attempts > 1:
        yield Event(row.started_at, f"attempt {row.attempts} began", row.stage)
    if row.processed_at is not None:
        yield Event(row.processed_at, "processed", row.stage, "", "good")
    if row.due_at is not None and row.waits_for is None:
        yield Event(row.due_at, NEXT_ATTEMPT, row.stage, "", "warn")


def _of_letter(letter: DeadLetter) -> Iterator[Event]:
    where = letter.stage or letter.destination
    times = f", death {letter.deaths}" if letter.deaths > 1 else ""
    yield Event(letter.created_at, "buried", where, f"{letter.reason}{times}", "bad")
    if letter.resolved_at is not None:
        by = resolver(letter.resolved_by)
        yield Event(letter.resolved_at, letter.resolution, where, by, "good")


#: Most attempts that are shown, newest first.
MOST_ATTEMPTS = 50


def page(
    admin: base.ReadOnlyAdmin, request: HttpRequest, message_id: uuid.UUID
) -> HttpResponse:
    """Show all rows of a message in one page."""
    insist(sees_messages(request))
    outgoing = may(request, "view_outboxmessage")
    incoming = may(request, "view_inboxmessage")
    dead = may(request, "view_deadletter")
    using = router.db_for_write(OutboxMessage)
    now = clock(using)
    outbox = inbox = letters = attempts = []
    if outgoing:
        rows: Any = OutboxMessage.objects.using(using).filter(message_id=message_id)
        outbox = list(rows.defer("body", "headers").order_by("pk"))
        for row in outbox:
            row.key = bodies.shown_key(row)
            row.origin = origin(row.replay_id)
            row.expired = row.expires_at and row.expires_at <= now
    if incoming:
        rows = InboxMessage.objects.using(using).filter(message_id=message_id)
        inbox = list(with_state(rows).defer("body", "headers").order_by("pk"))
        for one in inbox:
            one.shown = shown_state(one)  # type: ignore[attr-defined]  # the page's
            if one.waits_for is not None:
                one.before = turns.predecessor(one)  # type: ignore[attr-defined]  # as above
        rows = Attempt.objects.using(using).filter(message_id=message_id)
        attempts = list(rows.order_by("-pk")[:MOST_ATTEMPTS])
    if dead:
        rows = DeadLetter.objects.using(using).filter(message_id=message_id)
        letters = list(rows.defer("body").order_by("pk"))
        for letter in letters:
            letter.order = turns.note(letter)
            letter.by = resolver(letter.resolved_by)
            letter.place = place(letter.stage, letter.destination, letter.reason)
            if letter.resolution == Resolution.DISCARDED:
                stage = letter.stage or letter.destination
                # Read also for a user who may not see it: restore() reads it, too.
                rows = InboxMessage.objects.using(using).filter(
                    message_id=message_id, stage=stage
                )
                letter.revoked = resolution.revoked_why(letter, rows.first(), now)
    known = [*outbox, *inbox, *letters]
    if not known:
        why = (
            ": it was never stored or received, or was pruned after its retention"
            if outgoing and incoming and dead
            else ", or only in tables that you may not see"
        )
        text = f"Message {message_id} is not here{why}."
        if conf.get().LAKE is not None:
            text += f" If it is in the lake: manage.py pipeline show {message_id}"
        messages.warning(request, text)
        return led(request, "admin:app_list", "django_txmsg")
    first = known[0]
    correlation_id = next((one.correlation_id for one in known), "")
    context = {
        "now": now,
        "message_id": message_id,
        "destination": first.destination,
        "state": state_of(outbox, inbox, letters),
        "service": next((row.service for row in inbox if row.service), ""),
        "correlation_id": correlation_id,
        "outbox": outbox,
        "inbox": inbox,
        "letters": letters,
        "attempts": attempts,
        "events": timeline(outbox, inbox, attempts, letters),
        "flow": flow(message_id, correlation_id, using=using)
        if outgoing and incoming
        else [],
        "content": _content(request, using, outbox, inbox, letters),
        "raw": raw(known),
        "editable": conf.get().EDIT_DEAD_LETTERS,
        "stoppable": may(request, "stop_inboxmessage")
        and any(one.state == "received" for one in inbox)
        and bool(deadline.stoppable(message_id, using)),
    }
    return admin.show(request, "message", f"Message to {first.destination}", context)


def body(
    request: HttpRequest, message_id: uuid.UUID, table: str, pk: int
) -> HttpResponse:
    """Return the whole body, masked, as plain text that the browser does not
    execute."""
    insist(sees_messages(request))
    if table not in bodies.TABLES:
        raise Http404
    row = bodies.TABLES[table]._meta.model_name
    insist(may(request, "view_message_body", f"view_{row}"))
    using = router.db_for_write(OutboxMessage)
    content = bodies.read(
        table, pk, using=using, message_id=message_id, bodies=True, whole=True
    )
    if content is None:
        raise Http404
    if content.unmaskable:
        text = "The body is too large to be masked, so it is not shown.\n"
        return HttpResponse(text, status=413, content_type="text/plain")
    return HttpResponse(
        content.text if content.raw is None else content.raw,
        content_type="text/plain; charset=utf-8",
        headers={
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "Cache-Control": "no-store",
        },
    )


def act(name: str, request: HttpRequest, message_id: uuid.UUID) -> HttpResponse:
    """Cancel, reschedule or stop the message, and show its page again."""
    one, by = message_acts.ACTS[name], operator(request)
    insist(sees_messages(request) and may(request, one.permission))
    using = router.db_for_write(one.model)

    def change() -> Done | None:
        why, when = given(request)[:255], {}
        if name == "reschedule":
            minutes = given(request, "minutes") or "0"
            why, when = f"due in {minutes} minutes", {"delay": _minutes(minutes)}
        return message_acts.act(name, message_id, using=using, by=by, why=why, **when)

    perform(request, using, change, f"Not {one.done}: {one.unless}.")
    return led(request, MESSAGE, message_id)


def _content(
    request: HttpRequest, using: str, outbox: Any, inbox: Any, letters: Any
) -> bodies.Content | None:
    for table, rows in (("outbox", outbox), ("dead", letters), ("inbox", inbox)):
        for row in rows:
            content = bodies.read(
                table, row.pk, using=using, message_id=row.message_id,
                bodies=may(request, "view_message_body"),
            )  # fmt: skip
            if content is not None:
                found: bodies.Content = content
                return found
    return None


def _minutes(text: str) -> dt.timedelta:
    """Return the duration of a number of minutes, which is given as text. Raises
    ValueError if the text is not a number, or if the number is negative."""
    with suppress(OverflowError, ValueError):
        if (found := dt.timedelta(minutes=float(text))) >= dt.timedelta():
            return found
    raise ValueError(f"{text[:20]!r} is not a number of minutes.")


def state_of(outbox: list[Any], inbox: list[Any], letters: list[Any]) -> str:
    """Return the state to show for a message that may have several rows. The state
    comes from the first of these that exists: an open dead letter, the last outbox row
    if it is not dispatched, a parked inbox row, the last inbox row."""
    if any(letter.resolution == "open" for letter in letters):
        return "dead"
    for row in outbox[-1:]:
        if row.state != "dispatched":
            return str(row.state)
    for row in inbox:
        if row.due_at:
            return shown_state(row)
    if inbox:
        return shown_state(inbox[-1])
    return "dispatched" if outbox else str(letters[-1].resolution)


def raw(rows: list[Any]) -> str:
    """Return rows as text, one column per line. Columns that are long, or shown
    elsewhere on the page, are left out."""
    shown = []
    for row in rows:
        # Headers are shown elsewhere, masked.
        deferred = row.get_deferred_fields() | {"traceback", "headers"}
        fields = [
            f"  {field.name} = {getattr(row, field.attname)!s}"
            for field in row._meta.concrete_fields
            if field.attname not in deferred
        ]
        shown.append("\n".join([f"{row._meta.verbose_name} {row.pk}", *fields]))
    return "\n\n".join(shown)
