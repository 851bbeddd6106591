"""`manage.py txmsg cancel`, `reschedule`, `stop` and `bulk`: change messages that have
not been sent yet, messages that a handler is processing, and bulk operations."""

from __future__ import annotations

import argparse
import datetime as dt
import logging
import re
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from .. import wire
from ..consuming.message_acts import ACTS, act
from ..dead_letters import bulk
from ..models import BulkOperation, OutboxMessage
from ..models.fields import local
from .terminal import (
    add_actions,
    chosen_database,
    operator,
    perform,
    print_list,
    read_age,
    read_ids,
    read_option,
    say,
    values,
    whole_number,
)

log = logging.getLogger("django_txmsg.pending")


class _PerMessage(BaseCommand):
    """A command that applies an action to messages, each in a separate transaction."""

    #: Its name in ACTS.
    action: str
    #: The help text of `--why`, if the command takes a reason.
    reason = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", nargs="+", metavar="ID")
        if self.reason:
            parser.add_argument("--why", default="", help=self.reason)
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        left = []
        using, by = chosen_database(options, OutboxMessage), operator()
        one, why = ACTS[self.action], options.get("why") or ""
        given = {**self.when(options), "using": using, "by": by, "why": why}
        for message_id in read_ids(options["id"]):
            if perform(using, partial(act, self.action, message_id, **given)):
                log.info("message %s: %s by %s", message_id, one.done, by)
                say(self.stdout, f"{one.done.capitalize()} {message_id}.")
            else:
                left.append(str(message_id))
        if left:
            raise CommandError(
                f"Not {one.done}, because {one.unless}: {', '.join(left)}."
            )

    def when(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the time for the action, if the command takes one."""
        return {}


class Cancel(_PerMessage):
    """Cancel pending messages, so that they are never sent."""

    help = "Cancels pending messages. Exits with 1 if a message was not pending."
    action = "cancel"
    reason = "the reason, which is stored with the message"


class Stop(_PerMessage):
    """Ask the handlers that are processing these messages to stop."""

    help = (
        "Stops messages that handlers of stages with a timeout are processing. The "
        "messages become dead letters. Exits with 1 if a message cannot be stopped."
    )
    action = "stop"
    reason = "the reason, which is stored with the dead letter"


class Reschedule(_PerMessage):
    """Change when pending messages are sent."""

    help = "Reschedules pending messages. Exits with 1 if a message was not pending."
    action = "reschedule"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        when = parser.add_mutually_exclusive_group(required=True)
        when.add_argument("--delay", type=_delay, metavar="AGE", help="like 30m, 12h")
        when.add_argument(
            "--at", type=_instant, metavar="INSTANT", help="like 2026-11-22T20:00:00Z"
        )

    def when(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the delay or the instant."""
        return {
            name: read_option(options, name, read)
            for name, read in (("delay", _delay), ("at", _instant))
            if options[name] is not None
        }


def _delay(text: str) -> dt.timedelta:
    # Earlier releases took a number of seconds, without a unit.
    return read_age(f"{text}s" if re.fullmatch(r"\d+(\.\d+)?", text) else text)


def _instant(text: str) -> dt.datetime:
    try:
        return wire.parse_instant(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an instant with a time zone, like 2026-11-22T20:00:00Z"
        ) from None


# `manage.py txmsg bulk list|pause|resume|cancel`: bulk operations on dead letters.


class Bulk(BaseCommand):
    """Show, pause, resume and cancel bulk operations."""

    help = "Lists, pauses, resumes and cancels bulk operations on dead letters."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = add_actions(parser, {
            "list": "The newest first.",
            "pause": "Stop after the current batch.",
            "resume": "Go on after the last batch.",
            "cancel": "End here; processed messages are not undone.",
        })  # fmt: skip
        for name, action in actions.items():
            action.add_argument("--database", metavar="ALIAS")
            if name != "list":
                action.add_argument("id", type=int, metavar="ID")
                continue
            action.add_argument("--limit", type=whole_number, default=20, metavar="N")
            action.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        using = chosen_database(options, BulkOperation)
        if options["action"] == "list":
            limit = read_option(options, "limit", whole_number)
            self._list(using, limit, options["json"])
        else:
            self._move(using, options["action"], options["id"])

    def _list(self, using: str, limit: int, as_json: bool) -> None:
        found: Any = BulkOperation.objects.using(using).order_by("-pk")[:limit]
        rows = (values(one, *_FACTS) for one in found)
        lines = map(_line, found)
        none = "There is no bulk operation."
        print_list(self.stdout, "operations", rows, lines, none, as_json=as_json)

    def _move(self, using: str, verb: str, pk: int) -> None:
        said = perform(using, partial(bulk.move, verb, pk, using))
        if not said:
            states = {"pause": " or is not running", "resume": " or is not paused"}
            unless = f"has ended{states.get(verb, '')}, or does not exist"
            raise CommandError(f"Bulk operation {pk} {unless}.")
        self.stdout.write(said)


_FACTS = (
    "id", "kind", "state", "total", "done", "skipped", "by", "why", "rate",
    "filter", "created_at", "finished_at",
)  # fmt: skip


def _line(one: BulkOperation) -> str:
    why = f": {one.why}" if one.why else ""
    return (
        f"{one.pk:>6}  {local(one.created_at)}  {one.state}  "
        f"{one.kind} {one.done:,} of {one.total:,}, "
        f"{one.skipped:,} skipped, by {one.by or 'unknown'}{why}"
    )
