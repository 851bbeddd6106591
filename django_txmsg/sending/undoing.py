"""Runs an undo only if the request that it reverses has already been processed.
Otherwise the undo does nothing, and no stage processes the request later."""

from __future__ import annotations

import datetime as dt
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from .. import conf, wire
from ..envelope.handler import Handler
from ..envelope.message import Message
from ..errors import DecodeError
from ..models import Branch, DeadLetter, FlowUndo, InboxMessage, OutboxMessage, Run
from ..models.dead_letter import Resolution
from ..models.fields import clock
from ..models.run import WaitsFor
from ..rules.dead_letters import GONE_ON
from .answering import Address, Cancelled
from .outbox import foreign_names, send_part

#: The reason of an undo's dead letter if it is unknown whether its request was done.
IN_DOUBT = "undo_in_doubt"
#: How much earlier than the inbox forgets a request counts as old.
CLOCKS_DIFFER = dt.timedelta(hours=1)


def if_done(
    handler: Handler,
    destination: str,
    stages: Callable[[], Iterable[str]],
    using: Callable[[], str],
) -> Handler:
    """Return a handler for undos. An undo reverses an earlier request to `destination`.
    The new handler calls `handler` only if one of `stages` has processed that request.
    Otherwise the new handler revokes the request: no stage ever processes the request,
    so there is nothing to reverse. All this happens in the undo's transaction, on the
    database whose alias `using()` returns."""

    @functools.wraps(handler)
    def undo(message: Message) -> Any:
        given = message.conversation.get(wire.UNDOES)
        if given is None or given == wire.OWN_WORK:
            return handler(message)
        try:
            undone = wire.Undone.parse(given)
        except ValueError as error:
            raise DecodeError("undoes", f"illegible: {given[:80]!r}") from error
        consumers = list(stages())
        if not consumers:
            raise DecodeError(
                IN_DOUBT,
                f"no stage here consumes what request {undone.request_id} was sent to",
            )
        # Each of them: a topic's request may have been done by one and not by another.
        done = [was_done(undone, stage, destination, using()) for stage in consumers]
        return handler(message) if any(done) else None

    return undo


def was_done(undone: wire.Undone, stage: str, destination: str, using: str) -> bool:
    """Return whether a stage has processed a request to `destination`. If not, revoke
    the request, so that the stage never processes it.

    Raises DecodeError if the inbox may have deleted its record of the request. An
    operator must decide then.
    """
    if undone.answered:
        return True
    if revoke(undone, stage, destination, using):
        return False
    copies = _copies(undone, stage, using)
    inbox = InboxMessage.objects.using(using).filter(message_id__in=list(copies))
    return inbox.filter(stage=stage, processed_at__isnull=False).exists()


def revoke(undone: wire.Undone, stage: str, destination: str, using: str) -> bool:
    """Revoke a request to `destination`, and the edited copies of the request. Return
    False if one of them was processed or revoked before.

    Raises DecodeError, like `was_done()`.
    """
    inbox = InboxMessage.objects.db_manager(using)
    days = conf.get().RETENTION.INBOX
    # An hour earlier than pruned: the requester's clock may be ahead of the database's.
    kept = dt.timedelta(days=days or 0) - CLOCKS_DIFFER
    old = days is not None and undone.at < clock(using) - kept
    copies = list(_copies(undone, stage, using))
    known = inbox.filter(message_id__in=copies, stage=stage)
    if old and not known.exists():
        raise DecodeError(
            IN_DOUBT,
            f"request {undone.request_id} is older than what the inbox of stage "
            f"{stage!r} remembers: it is unknown whether it was done",
        )
    revoked = [inbox.revoke(stage, one, destination) for one in copies]
    return all(revoked)


def withdraw(undone: wire.Undone, stage: str, using: str) -> None:
    """Revoke the first message of a run that has not begun, and its edited copies, and
    close their dead letters, including a relay's. Otherwise an operator could redeliver
    one after the run is pruned, and a new run would begin."""
    inbox = InboxMessage.objects.db_manager(using)
    # Closes all dead letters before the first inbox row changes.
    copies = {*_copies(undone, "", using), *_copies(undone, stage, using)}
    for one in sorted(copies):
        inbox.revoke(stage, one, stage)


def given_up(undone: wire.Undone, stage: str, using: str) -> bool:
    """Return whether a request, or an edited copy of the request, was answered with
    `Dead` before it reached the stage. That answer leaves no row in the inbox."""
    copies = list(_copies(undone, stage, using))
    letters = DeadLetter.objects.using(using).filter(message_id__in=copies, stage="")
    found = letters.only("stage", "headers", "resolution", "reason")
    return any(one.given_up for one in found)


def undo_delays(
    undos: QuerySet[FlowUndo], using: str
) -> dict[uuid.UUID | None, dt.timedelta]:
    """Return how long undos must wait before they are sent, by the ids of the requests.
    A foreign participant has no inbox in which an undo revokes its request. So its undo
    is sent after the request was answered, or after the request has expired."""
    waiting = undos.filter(answered=False, destination__in=foreign_names)
    requests = OutboxMessage.objects.using(using).filter(
        message_id__in=waiting.values("request_id"), expires_at__gt=Now()
    )
    # A request may have been sent again: the last expiry counts.
    rows = requests.order_by("expires_at").values_list("message_id", "expires_at")
    found = {message_id: until for message_id, until in rows if until is not None}
    if not found:
        return {}
    now = clock(using)
    return {one: max(until - now, dt.timedelta(0)) for one, until in found.items()}


def confirm(letter: DeadLetter, doing: Iterable[str], using: str) -> None:
    """Confirm an undo whose dead letter has the reason IN_DOUBT: it was unknown whether
    the request that the undo reverses was processed. Call this after an operator has
    checked that. The run continues. From now on, no stage processes the undo, and no
    stage in `doing` processes the request. Runs inside the caller's transaction.

    Raises DecodeError if no answer can be sent to the run.
    """
    undone = wire.Undone.parse(letter.headers[wire.UNDOES])
    inbox = InboxMessage.objects.db_manager(using)
    first = True
    for stage in doing:
        for one in _copies(undone, stage, using):
            first &= inbox.revoke(stage, one)
        first &= not given_up(undone, stage, using)
    inbox.revoke(letter.stage, letter.message_id)
    address = Address.of(letter.headers)
    if address is None:
        return
    if wire.HOP in letter.headers:
        address.send(None, using=using, broker=letter.broker)
    elif first:
        # It is the cancel of a run that has handed over. The address is that of the
        # run's caller, who has asked for work, and has no answer yet.
        address.send(Cancelled(IN_DOUBT), using=using, broker=letter.broker)


def cancel(run: Run, why: str, using: str, broker: str) -> None:
    """Store the message that cancels a run, in the caller's transaction."""
    given = {
        wire.UNDOES: str(wire.Undone(run.run_id, clock(using), False)),
        wire.FLOW: str(run.first_run),
    }
    send_part(
        run.flow + wire.STEPS,
        Cancelled(why),
        given,
        correlation_id=run.correlation_id,
        using=using,
        broker=broker,
    )


def overtaken(run: Run, turn: uuid.UUID, using: str) -> None:
    """Close the dead letters of requests and answers. The run has waited for these
    messages, and `turn` is the token of that wait. The wait is over: from now on, no
    stage processes these messages. Call this in the transaction that continues the
    run."""
    ticket = wire.ticket(run.run_id, turn)
    letters = DeadLetter.objects.using(using).filter(resolution=Resolution.OPEN)
    same = Q(correlation_id__in=(run.correlation_id, ticket))
    branches = Branch.objects.using(using).filter(batch__turn=turn)
    asked = branches.filter(destination__in=foreign_names)
    if run.waits_for == WaitsFor.JOIN and asked.exists():
        # The correlation id of a foreign request, and of its answer, is the ticket and
        # the branch. This reads all open letters: indexes find no beginnings of texts.
        same |= Q(correlation_id__startswith=f"{ticket}/")
    for one in letters.filter(same).only("stage", "message_id", "headers"):
        # The requests of a batch have no HOP. Without a deadline, they outlive it.
        unlimited = wire.EXPIRES not in one.headers and wire.HOP not in one.headers
        outlives = run.waits_for == WaitsFor.JOIN and unlimited
        waits = not outlives or wire.REPLY_TO not in one.headers
        given = one.headers.get(wire.TICKET) or one.headers.get(wire.CORRELATION_ID, "")
        if given.partition("/")[0] == ticket and waits:
            _close(letters.filter(pk=one.pk))
            if one.stage:
                inbox = InboxMessage.objects.db_manager(using)
                inbox.revoke(one.stage, one.message_id)


def _close(letters: QuerySet[DeadLetter]) -> None:
    """Discard dead letters whose run no longer waits for them. Call this before
    changing their inbox rows: a redelivery also locks first the dead letters and then
    the rows."""
    letters.filter(resolution=Resolution.OPEN).update(
        resolution=Resolution.DISCARDED,
        resolved_at=Now(),
        resolved_by=GONE_ON,
    )


def _copies(undone: wire.Undone, stage: str, using: str) -> Iterator[uuid.UUID]:
    """Yield the request's id, and the ids of the edited copies that an operator sent
    instead of the request."""
    one: uuid.UUID | None = undone.request_id
    while one is not None:
        letters = DeadLetter.objects.using(using).filter(message_id=one, stage=stage)
        _close(letters)
        yield one
        replaced = letters.filter(resolution=Resolution.REPLACED)
        one = replaced.values_list("replaced_by", flat=True).first()
