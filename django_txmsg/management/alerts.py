"""`manage.py txmsg alerts list|export`."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from typing import Any

from django.core.management.base import BaseCommand
from django.db import router

from ..models import Alert
from .terminal import local, printable, require_tables


class Command(BaseCommand):
    """Show the alerts that relays have raised; print rules for Prometheus."""

    help = "Alerts: those that relays have raised, and rules for Prometheus."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        shown = actions.add_parser("list", help="The newest first.")
        shown.add_argument("--firing", action="store_true", help="only open ones")
        shown.add_argument("--limit", type=int, default=50, metavar="N")
        shown.add_argument("--json", action="store_true")
        shown.add_argument("--database", metavar="ALIAS")
        actions.add_parser("export", help="Print alert rules for Prometheus, as YAML.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "export":
            rules = files("django_txmsg.monitoring") / "prometheus_rules.yml"
            self.stdout.write(rules.read_text(encoding="utf-8"), ending="")
            return
        using = options["database"] or router.db_for_write(Alert)
        require_tables(using)
        alerts = Alert.objects.using(using).order_by("-pk")
        if options["firing"]:
            alerts = alerts.filter(ended_at=None)
        found = list(alerts[: max(options["limit"], 0)])
        if options["json"]:
            names = ("id", "service", "name", "kind", "status", "since", "ended_at")
            rows = [
                {name: getattr(one, name) for name in names} | {"text": one.text}
                for one in found
            ]
            self.stdout.write(json.dumps({"alerts": rows}, indent=2, default=str))
            return
        for one in found:
            ended = f" to {local(one.ended_at)}" if one.ended_at else ""
            self.stdout.write(
                f"{one.status:<8}  {local(one.since)}{ended}  "
                f"{printable(one.name)}: {printable(one.text)}"
            )
