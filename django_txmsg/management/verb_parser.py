"""The parser of a verb of `manage.py txmsg VERB`, which also accepts Django's
options."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import (
    BaseCommand,
    CommandParser,
    DjangoHelpFormatter,
)


class VerbParser(CommandParser):
    """Accepts Django's options, such as --settings and --verbosity, before and after
    the verb.

    A value after the verb overrides a value before the verb. The subcommands of a verb
    also have parsers of this class. As for every command, help lists Django's options
    last.
    """

    def __init__(self, *, parents: Any = (), **options: Any) -> None:
        own = BaseCommand().create_parser("manage.py", "txmsg", add_help=False)
        for action in own._actions:
            action.default = argparse.SUPPRESS  # it would override the value before
        options.setdefault("formatter_class", DjangoHelpFormatter)
        super().__init__(parents=[*parents, own], **options)
