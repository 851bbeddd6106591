"""`manage.py txmsg audit`: who did what, newest first."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand
from django.db import router

from ..models import AuditEntry
from .terminal import local, printable, require_tables


class Command(BaseCommand):
    """List what operators did by pages and commands."""

    help = "Lists what operators did, by page or command, newest first."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--limit", type=int, default=50, metavar="N")
        parser.add_argument("--by", metavar="USER", help="part of the user's name")
        parser.add_argument("--text", help="part of what was done")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--database", metavar="ALIAS")

    def handle(self, *args: Any, **options: Any) -> None:
        using = options["database"] or router.db_for_write(AuditEntry)
        require_tables(using)
        entries = AuditEntry.objects.using(using)
        if options["by"]:
            entries = entries.filter(by__icontains=options["by"])
        if options["text"]:
            entries = entries.filter(text__icontains=options["text"])
        found = entries.order_by("-pk")[: max(options["limit"], 0)]
        if options["json"]:
            facts = [
                {"at": one.at.isoformat(), "by": one.by, "text": one.text}
                for one in found
            ]
            self.stdout.write(json.dumps({"entries": facts}, indent=2))
            return
        for one in found:
            text = printable(one.text)
            by = printable(one.by)
            self.stdout.write(f"{local(one.at)}  {by}: {text}")
