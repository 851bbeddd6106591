"""The actions `list`, `pause` and `resume`, which several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.db.models import Model

from ..models.monitoring import Deed
from ..monitoring import pausing
from . import operator
from .terminal import printable


class PausingCommand(BaseCommand):
    """A command with the actions `list`, `pause` and `resume`."""

    noun: str
    #: `change` pauses or resumes the object with a name. `database` returns the
    #: database that stores this object.
    change: Callable[..., Model | None]
    database: Callable[[str], str]

    def add_pausing(self, actions: Any, *, listed: str, paused: str) -> None:
        """Add the actions. `listed` and `paused` are the help texts of `list` and
        `pause`."""
        shown = actions.add_parser("list", help=listed)
        shown.add_argument("--json", action="store_true")
        pause = actions.add_parser("pause", help=paused)
        pause.add_argument("--why", default="", help="The reason, for other operators.")
        for action in (pause, actions.add_parser("resume", help="Go on.")):
            action.add_argument("name", nargs="+", metavar="NAME")

    def set_paused(self, options: dict[str, Any]) -> None:
        """Pause or resume each named object, and record each change in the audit."""
        paused, why = options["action"] == "pause", options.get("why", "")
        verb, by = "Paused" if paused else "Resumed", f"command: {operator.name()}"
        for name in options["name"]:
            kind = type(self)
            try:
                using = kind.database(name)
                with transaction.atomic(using=using):
                    changed = kind.change(name, paused=paused, by=by, why=why)
                    if changed is not None:
                        what = f"{self.noun} {name}"
                        said = pausing.said(what, paused=paused, why=why)
                        deed = Deed.PAUSE if paused else Deed.RESUME
                        operator.record(using, deed, said)
            except LookupError as error:
                raise CommandError(f"There is no {self.noun} {name!r} here.") from error
            shown = printable(name)
            self.stdout.write(
                f"{verb} {shown}."
                if changed is not None
                else f"{shown} is {verb.lower()} already."
            )


def pause_note(row: Any) -> str:
    """Return a note for the output of `list`: who has paused this row, and why."""
    why = f": {row.paused_why}" if row.paused_why else ""
    return f"  PAUSED by {row.paused_by or 'unknown'}{why}"
