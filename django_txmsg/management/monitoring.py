"""`manage.py txmsg alerts`, `audit` and `alive`."""

from __future__ import annotations

import argparse
from importlib.resources import files
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from .. import conf
from ..models import AuditEntry
from ..models.fields import local
from ..models.monitoring import Deed
from ..monitoring import process_states
from ..monitoring.process_states import WITHIN
from .terminal import (
    chosen_database,
    not_blank,
    print_list,
    read_option,
    values,
    whole_number,
)


class Alerts(BaseCommand):
    """Print alerting rules for Prometheus."""

    help = "Prints alert rules for Prometheus, as YAML."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=["export"])

    def handle(self, *args: Any, **options: Any) -> None:
        rules = files("django_txmsg.monitoring") / "prometheus_rules.yml"
        self.stdout.write(rules.read_text(encoding="utf-8"), ending="")


# `manage.py txmsg audit`: who did what, newest first.


class Audit(BaseCommand):
    """List the actions that operators took in the admin and by commands."""

    help = "Lists what operators did in the admin and with commands, newest first."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--limit", type=whole_number, default=50, metavar="N")
        parser.add_argument(
            "--by", type=not_blank, metavar="USER", help="part of the user's name"
        )
        parser.add_argument(
            "--deed",
            choices=Deed.values,
            metavar="DEED",
            help=f"what was done: {', '.join(Deed.values)}",
        )
        parser.add_argument("--text", type=not_blank, help="part of the description")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        using = chosen_database(options, AuditEntry)
        entries = AuditEntry.objects.using(using)
        for lookup in ("by__icontains", "deed", "text__icontains"):
            if wanted := options[lookup.partition("__")[0]]:
                entries = entries.filter(**{lookup: wanted})
        found = entries.select_related("operation").order_by("-pk")
        found = found[: read_option(options, "limit", whole_number)]
        rows = (
            values(one, "at", "by", "deed", "text", "done") | {"shown": one.count}
            for one in found
        )
        lines = (f"{local(one.at)}  {one.by}: {one.text}" for one in found)
        none = "There is no such entry."
        print_list(self.stdout, "entries", rows, lines, none, as_json=options["json"])


# `manage.py txmsg alive`: a liveness probe without a port.


class Alive(BaseCommand):
    """Ask this service's worker processes on this host whether their loops are
    running."""

    help = (
        "Exits with 0 if each worker of this service on this host is alive: each of "
        "its loops has run within the last --within seconds. Uses no database and no "
        "broker."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--within",
            type=float,
            default=WITHIN,
            metavar="SECONDS",
            help=f"more than the longest handler takes (default: {WITHIN:g})",
        )
        parser.add_argument(
            "--ready",
            action="store_true",
            help="fail also if one has not started yet, or is stopping",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        within = read_option(options, "within", float)
        if not within >= 0:
            raise CommandError("--within must be 0 or more.")
        try:
            folder = process_states.directory()
        except OSError as error:
            raise CommandError(f"No worker has a file here: {error}.") from error
        states = process_states.running()
        if not states:
            raise CommandError(
                f"No worker of service {conf.get().SERVICE!r} runs here: none has a "
                f"file in {folder}."
            )
        for pid, state in sorted(states.items()):
            if state.silent > within:
                raise CommandError(
                    f"Process {pid}: {state.loop or 'the process'} has not run for "
                    f"{state.silent:.0f} s."
                )
            if options["ready"] and not state.ready:
                raise CommandError(
                    f"Process {pid} has not started yet, or is stopping."
                )
        if options["verbosity"] > 0:
            self.stdout.write(f"Alive: {', '.join(map(str, sorted(states)))}.")
