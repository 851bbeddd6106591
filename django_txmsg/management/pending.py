"""`manage.py txmsg cancel`, `reschedule` and `stop`: messages that have not left yet,
and those that a handler is processing."""

from __future__ import annotations

import argparse
import datetime as dt
import logging
import uuid
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import router, transaction

from .. import wire
from ..consuming import deadline
from ..errors import InvalidMessage
from ..models import OutboxMessage
from ..sending.pending import cancel_message, reschedule_message
from . import operator
from .terminal import require_tables

log = logging.getLogger("django_txmsg.pending")


class _PerMessage(BaseCommand):
    """An action on messages, one by one, each in a statement of its own."""

    done = ""
    unless = "no longer pending, being sent now, or unknown"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", nargs="+", type=uuid.UUID, metavar="ID")
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        left = []
        using = options["database"] or router.db_for_write(OutboxMessage)
        require_tables(using)
        for message_id in options["id"]:
            with transaction.atomic(using=using):
                done = self.change(message_id, options)
                if done:
                    entry = f"{self.done.capitalize()} message {message_id}"
                    why = options.get("why")
                    operator.record(using, f"{entry}: {why}" if why else f"{entry}.")
            if done:
                log.info("message %s: %s by %s", message_id, self.done, operator.name())
                self.stdout.write(f"{self.done.capitalize()} {message_id}.")
            else:
                left.append(str(message_id))
        if left:
            raise CommandError(
                f"Not {self.done}, because {self.unless}: {', '.join(left)}."
            )

    def change(self, message_id: uuid.UUID, options: dict[str, Any]) -> bool:
        """Change one message; False if that is not possible."""
        raise NotImplementedError


class Cancel(_PerMessage):
    """Keep pending messages from leaving."""

    help = "Keeps pending messages from leaving. Exit code 1 when one was not pending."
    done = "cancelled"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--why", default="", help="Kept with the message.")

    def change(self, message_id: uuid.UUID, options: dict[str, Any]) -> bool:
        return cancel_message(message_id, why=_why(options), using=options["database"])


class Stop(_PerMessage):
    """Take back messages that handlers are processing."""

    help = (
        "Stops messages that handlers are processing, at stages with a timeout; they "
        "end as dead letters. Exit code 1 when one was not being processed."
    )
    done = "asked to stop"
    unless = "not received, ended, or at a stage without a timeout"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--why", default="", help="Kept with the dead letter.")

    def change(self, message_id: uuid.UUID, options: dict[str, Any]) -> bool:
        using = options["database"] or router.db_for_write(OutboxMessage)
        return deadline.ask_to_stop(message_id, using=using, why=_why(options))


def _why(options: dict[str, Any]) -> str:
    given = f": {options['why']}" if options["why"] else ""
    return f"by {operator.name()}{given}"


class Reschedule(_PerMessage):
    """Let pending messages leave at another time."""

    help = (
        "Lets pending messages leave at another time. Exit code 1 when one was not "
        "pending."
    )
    done = "rescheduled"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        when = parser.add_mutually_exclusive_group(required=True)
        when.add_argument("--delay", type=float, metavar="SECONDS", help="from now")
        when.add_argument("--at", metavar="INSTANT", help="like 2026-11-22T20:00:00Z")

    def change(self, message_id: uuid.UUID, options: dict[str, Any]) -> bool:
        try:
            when: dict[str, Any] = (
                {"delay": dt.timedelta(seconds=options["delay"])}
                if options["at"] is None
                else {"at": wire.parse_instant(options["at"])}
            )
            return reschedule_message(message_id, using=options["database"], **when)
        except (InvalidMessage, OverflowError, ValueError) as error:
            raise CommandError(str(error)) from error
