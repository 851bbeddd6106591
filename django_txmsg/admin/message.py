"""A message's page: facts, timeline, attempts, headers, body, and related messages.

A message may be stored, received and dead here, in three tables; it has one page, whose
address contains its id.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render

from .. import conf
from ..consuming import deadline
from ..errors import InvalidMessage
from ..models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from ..monitoring import turns
from ..sending.pending import cancel_message, reschedule_message
from . import body as bodies
from .addresses import MESSAGE, led
from .audit import audit, audited
from .base import ReadOnlyAdmin, plain
from .flow import flow
from .received import shown_state, with_state
from .timeline import timeline

#: Most attempts that are shown, newest first.
MOST_ATTEMPTS = 50


class MessagePages:
    """The page of a message, and its whole body as plain text."""

    def __init__(self, admin: ReadOnlyAdmin) -> None:
        self._admin = admin

    def page(self, request: HttpRequest, message_id: uuid.UUID) -> HttpResponse:
        """Show everything known here about one message."""
        may = allowed(request)
        using = router.db_for_read(OutboxMessage)
        outbox = inbox = letters = attempts = []
        if may["outbox"]:
            rows: Any = OutboxMessage.objects.using(using).filter(message_id=message_id)
            outbox = list(rows.defer("body", "headers").order_by("pk"))
        if may["inbox"]:
            rows = InboxMessage.objects.using(using).filter(message_id=message_id)
            inbox = list(with_state(rows).defer("body", "headers").order_by("pk"))
            for one in inbox:
                one.shown = shown_state(one)  # type: ignore[attr-defined]  # the page's
            rows = Attempt.objects.using(using).filter(message_id=message_id)
            attempts = list(rows.order_by("-pk")[:MOST_ATTEMPTS])
        if may["dead"]:
            rows = DeadLetter.objects.using(using).filter(message_id=message_id)
            letters = list(rows.defer("body").order_by("pk"))
            for letter in letters:
                letter.order = turns.note(letter)
        known = [*outbox, *inbox, *letters]
        if not known:
            why = (
                ": it was never stored or received, or was pruned after its retention"
                if all(may[name] for name in ("outbox", "inbox", "dead"))
                else ", or only in tables that you may not see"
            )
            messages.warning(request, f"Message {message_id} is not here{why}.")
            return led(request, "admin:app_list", "django_txmsg")
        first = known[0]
        correlation_id = next((one.correlation_id for one in known), "")
        context = {
            **self._admin.page_context(request, f"Message to {first.destination}"),
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
            if may["outbox"] and may["inbox"]
            else [],
            "content": self._content(using, outbox, inbox, letters, may["body"]),
            "raw": raw([*outbox, *inbox, *letters]),
            "may": may,
            "editable": conf.get().EDIT_DEAD_LETTERS,
            "stoppable": may["stop"]
            and any(one.state.value == "received" for one in inbox)
            and bool(deadline.stoppable(message_id, using)),
        }
        return render(request, "admin/django_txmsg/message.html", context)

    def body(
        self, request: HttpRequest, message_id: uuid.UUID, table: str, pk: int
    ) -> HttpResponse:
        """Return the whole body, masked, as text that no browser executes."""
        may = allowed(request)
        if table not in bodies.TABLES:
            raise Http404
        if not may["body"] or not may[table]:
            raise PermissionDenied
        using = router.db_for_read(OutboxMessage)
        content = bodies.read(
            table, pk, using=using, message_id=message_id, bodies=True, whole=True
        )
        if content is None:
            raise Http404
        if content.unmaskable:
            text = f"{content.size_text}: too large to be masked, so it is not shown.\n"
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

    def cancel(self, request: HttpRequest, message_id: uuid.UUID) -> HttpResponse:
        """Cancel a pending message."""
        user: Any = request.user
        if not user.has_perm("django_txmsg.cancel_outboxmessage"):
            raise PermissionDenied
        allowed(request)
        why = plain(request.POST.get("why", "")).strip()[:255]
        by = f"by {user.get_username()}" + (f": {why}" if why else "")
        return self._done(
            request, message_id, "Cancelled", why,
            lambda: cancel_message(message_id, why=by),
        )  # fmt: skip

    def reschedule(self, request: HttpRequest, message_id: uuid.UUID) -> HttpResponse:
        """Reschedule a pending message. It will be sent in the entered number of
        minutes."""
        user: Any = request.user
        if not user.has_perm("django_txmsg.reschedule_outboxmessage"):
            raise PermissionDenied
        allowed(request)
        given = request.POST.get("minutes", "")
        entry = f"due in {given or 0} minutes"
        try:
            delay = dt.timedelta(minutes=float(given or 0))
            return self._done(
                request, message_id, "Rescheduled", entry,
                lambda: reschedule_message(message_id, delay=delay),
            )  # fmt: skip
        except (InvalidMessage, OverflowError, ValueError):
            messages.error(request, f"{given[:20]!r} is not a number of minutes.")
            return led(request, MESSAGE, message_id)

    def stop(self, request: HttpRequest, message_id: uuid.UUID) -> HttpResponse:
        """Stop a message that a handler is processing."""
        user: Any = request.user
        if not user.has_perm("django_txmsg.stop_inboxmessage"):
            raise PermissionDenied
        allowed(request)
        why = plain(request.POST.get("why", "")).strip()[:200]
        by = f"by {user.get_username()}" + (f": {why}" if why else "")
        using = router.db_for_write(InboxMessage)
        return self._done(
            request, message_id, "Asked to stop", why,
            lambda: deadline.ask_to_stop(message_id, using=using, why=by),
            of=InboxMessage,
            unless="it has ended, or its stage has no timeout.",
        )  # fmt: skip

    def _done(
        self,
        request: HttpRequest,
        message_id: uuid.UUID,
        verb: str,
        detail: str,
        deed: Callable[[], bool],
        of: Any = OutboxMessage,
        unless: str = "the message is no longer pending, or a relay is sending it now.",
    ) -> HttpResponse:
        using = router.db_for_write(of)
        with audited(using):
            done = deed()
            if done:
                rows = of.objects.using(using).filter(message_id=message_id)
                entry = f"{verb} message {message_id}"
                entry += f": {detail}" if detail else "."
                audit(request, rows.order_by("-pk")[0], entry)
        if done:
            messages.success(request, f"{verb} the message.")
        else:
            messages.warning(request, f"Not {verb.lower()}: {unless}")
        return led(request, MESSAGE, message_id)

    def _content(
        self, using: str, outbox: Any, inbox: Any, letters: Any, allowed: bool
    ) -> bodies.Content | None:
        for table, rows in (("outbox", outbox), ("dead", letters), ("inbox", inbox)):
            for row in rows:
                content = bodies.read(
                    table, row.pk, using=using, message_id=row.message_id,
                    bodies=allowed,
                )  # fmt: skip
                if content is not None:
                    found: bodies.Content = content
                    return found
        return None


def allowed(request: HttpRequest) -> dict[str, bool]:
    """Return what this user may see and do. Raises PermissionDenied if that is
    nothing."""
    user: Any = request.user
    may = {
        name: user.has_perm(f"django_txmsg.{permission}")
        for name, permission in (
            ("outbox", "view_outboxmessage"),
            ("inbox", "view_inboxmessage"),
            ("dead", "view_deadletter"),
            ("body", "view_message_body"),
            ("redeliver", "redeliver_deadletter"),
            ("discard", "discard_deadletter"),
            ("edit", "edit_deadletter"),
            ("cancel", "cancel_outboxmessage"),
            ("reschedule", "reschedule_outboxmessage"),
            ("stop", "stop_inboxmessage"),
        )
    }
    if not (may["outbox"] or may["inbox"] or may["dead"]):
        raise PermissionDenied
    return may


def state_of(outbox: list[Any], inbox: list[Any], letters: list[Any]) -> str:
    """Return the state of the message: the worst state that it has in a table, or else
    the latest."""
    if any(letter.resolution == "open" for letter in letters):
        return "dead"
    for row in outbox:
        if row.state.value != "dispatched":
            return str(row.state.value)
    for row in inbox:
        if row.due_at:
            return shown_state(row)
    if inbox:
        return shown_state(inbox[-1])
    return "dispatched" if outbox else str(letters[-1].resolution)


def raw(rows: list[Any]) -> str:
    """Return rows as text, without values that are long or that the page shows
    elsewhere."""
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
