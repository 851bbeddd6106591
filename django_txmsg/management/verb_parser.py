"""The parser of a verb: what stands behind it may be an option of Django's own."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandParser


class VerbParser(CommandParser):
    """Takes --settings, --verbosity and the others too, as `manage.py COMMAND` does.

    Those that are not given leave what stands before the verb as it is. The parsers of
    a verb's own verbs are of this class, too.
    """

    def __init__(self, *, parents: Any = (), **options: Any) -> None:
        own = _Own().create_parser("manage.py", "txmsg", add_help=False)
        super().__init__(parents=[*parents, own], **options)


class _Own(BaseCommand):
    """Django's own options alone, each without a default."""

    requires_system_checks = ()

    def add_base_argument(
        self, parser: CommandParser, *names: Any, **options: Any
    ) -> None:
        super().add_base_argument(
            parser, *names, **{**options, "default": argparse.SUPPRESS}
        )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--skip-checks",
            action="store_true",
            default=argparse.SUPPRESS,
            help="Skip system checks.",
        )
