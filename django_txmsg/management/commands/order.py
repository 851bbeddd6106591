"""`manage.py order`: lists blocked messages of ordered stages, and releases one."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandError
from django.db import OperationalError

from ... import wire
from ...models import InboxMessage
from ...models.fields import clock
from ...models.monitoring import Deed
from ...monitoring import turns
from ...monitoring.lengths import duration
from ...monitoring.waiting import capped
from ...runtime import database_health
from ..terminal import DatabaseCommand, chosen_database, perform, print_list


class Command(DatabaseCommand):
    """Show messages that wait for their predecessors, and release one."""

    help = "Lists the keys whose messages wait at ordered stages, or releases a key."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "action", choices=["list", "let_go"], metavar="ACTION", help="list, let_go"
        )
        parser.add_argument("--stage", help="of let_go: the ordered stage")
        parser.add_argument(
            "--key", help="of let_go: the key whose first message may run"
        )
        parser.add_argument("--json", action="store_true", help="of list")
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        using = chosen_database(options, InboxMessage)
        if options["action"] == "list":
            self._list(using, options["json"])
            return
        if not options["stage"] or not options["key"]:
            raise CommandError("Which one? Give its --stage and its --key.")
        self._let_go(using, options["stage"], options["key"])

    def _let_go(self, using: str, stage: str, key: str) -> None:
        rows = InboxMessage.order.db_manager(using)
        said = f"Let go of the first message of key {key} at stage {stage}."

        def let_go() -> tuple[None, Deed, str] | None:
            gone = rows.let_go(stage, key, link=wire.AFTER)
            return (None, Deed.LET_GO, said) if gone else None

        try:
            if perform(using, let_go):
                self.stdout.write("It is due now, whatever it has waited for.")
                return
        except OperationalError as error:
            if not database_health.gave_up_waiting(error):
                raise
            raise CommandError(
                "Nothing is changed: a worker is running the first message of key "
                f"{key!r} at stage {stage!r} just now."
            ) from error
        if rows.behind(stage, key, 1):
            raise CommandError(
                f"Nothing is changed: the first message of key {key!r} at stage "
                f"{stage!r} was released, waits for its redelivery, or has just "
                "started by itself."
            )
        raise CommandError(f"No message of key {key!r} waits at stage {stage!r}.")

    def _list(self, using: str, as_json: bool) -> None:
        found, now = turns.held(using, after=0.0), clock(using)
        rows = (
            {**vars(one), "age": (now - one.since).total_seconds()} for one in found
        )
        lines = (
            f"stage {one.stage}, key {one.key}: {capped(one.count)} waiting "
            f"for {one.waits_for}, {one.why}, for {duration(now - one.since)}"
            for one in found
        )
        none = "No message waits for the one before it."
        print_list(self.stdout, "", rows, lines, none, as_json=as_json)
