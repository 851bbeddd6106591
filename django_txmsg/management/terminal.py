"""Functions for commands that an operator runs in a terminal. They make instants and
objects printable, and check the databases and the options. They also return the
operator's name, and record the operator's action in the audit."""

from __future__ import annotations

import argparse
import datetime as dt
import getpass
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
    OutputWrapper,
)
from django.db import Error as AnyDatabaseError
from django.db import OperationalError, connections, router, transaction
from django.db.models import Model, QuerySet

from ..errors import TxmsgError
from ..models import AuditEntry, BulkOperation, OutboxMessage
from ..models.monitoring import Deed
from ..monitoring.databases import of_stage
from ..monitoring.lengths import positive as positive
from ..monitoring.lengths import printable as printable
from ..monitoring.lengths import printable_lines as printable_lines
from ..monitoring.lengths import read_age as read_age
from ..monitoring.lengths import whole_number as whole_number
from ..monitoring.pausing import is_known
from ..runtime import database_health
from ..stages import all_stages

#: What to tell users whose project has no stage.
SEARCHED = "Stages are searched in each app's module named stages (APP/stages.py)."


def values(of: object, *names: str) -> dict[str, Any]:
    """Return these attributes of an object for JSON: instants in ISO format, and ids as
    text. Without an object, each of them is None."""
    if of is None:
        return dict.fromkeys(names)
    found = {name: getattr(of, name) for name in names}
    return {
        name: plain(value) if isinstance(value, dt.datetime | uuid.UUID) else value
        for name, value in found.items()
    }


def plain(value: object) -> str:
    """Return the text for a value that JSON does not have: the `default` of
    `json.dumps()`."""
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)


def print_list(
    out: OutputWrapper,
    name: str,
    rows: Iterable[Any],
    lines: Iterable[str],
    none: str,
    *,
    as_json: bool,
) -> None:
    """Print the lines of a list, or `none` if there are none. With `as_json`, print its
    rows instead, under the list's name if it has one."""
    if as_json:
        found = list(rows)
        out.write(json.dumps({name: found} if name else found, indent=2, default=plain))
        return
    for line in list(lines) or [none]:
        out.write(printable(line))


def say(stream: Any, text: str = "") -> None:
    """Write a line, or only what is not written yet. If the output is closed, do
    nothing, so that the process can still finish its messages."""
    try:
        if text:
            stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Python would try once more at its end, and exit with 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError, RuntimeError):
        pass  # closed; or a signal has come just as the stream was written to


# Preconditions of a command: a database, and the package's tables in it.

#: The exit code of a command whose database does not answer.
AWAY = 3


class DatabaseCommand(BaseCommand):
    """A command that reports the package's errors in a sentence. It also reports so
    that a database has failed, or takes no changes now. Other errors of a database end
    the command with their traceback."""

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command. Raises CommandError, for a database with the exit code
        AWAY."""
        try:
            return super().execute(*args, **options)
        except TxmsgError as error:
            raise CommandError(str(error)) from error
        except AnyDatabaseError as error:
            if not _helps_to_repeat(error):
                raise
            raise CommandError(
                f"A database has failed, or has refused a statement: "
                f"{_first_line(error)}. Committed changes stay; the others are rolled "
                f"back. Repeat the command when the database accepts changes.",
                returncode=AWAY,
            ) from error


def _helps_to_repeat(error: Exception) -> bool:
    """Return whether the database is unavailable or takes no changes, or the statement
    waited too long or lost a conflict. For SQLite, an error in our SQL and a missing
    column are an OperationalError, too."""
    if database_health.is_away(error):
        return True
    refused = database_health.sqlstate(error) or "is locked" in str(error)
    passes = isinstance(error, OperationalError) and database_health.may_pass(error)
    return passes and bool(refused)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def require_tables(*aliases: str, waits: bool = False) -> None:
    """Raise CommandError if a database is unknown, does not answer (exit code AWAY), or
    has not been migrated. With `waits`, accept a database that does not answer, because
    the command will wait for it."""
    for alias in aliases:
        if alias not in connections:
            known = ", ".join(connections)
            raise CommandError(f"No database {alias!r} in DATABASES; known: {known}.")
        try:
            names = connections[alias].introspection.table_names()
        except AnyDatabaseError as error:
            if waits:
                continue
            raise CommandError(
                f"Database {alias!r} does not answer: {_first_line(error)}",
                returncode=AWAY,
            ) from error
        if OutboxMessage._meta.db_table not in names:
            where = "" if alias == "default" else f" --database {alias}"
            raise CommandError(
                f"The tables of django_txmsg are not in database {alias!r}. Run "
                f"manage.py migrate{where}."
            )


def chosen_database(options: Mapping[str, Any], model: type[Model]) -> str:
    """Return the alias that `--database` gives. Without this option, return the alias
    of the model's database. Raises CommandError if the database cannot be used."""
    using: str | None = options["database"]
    if using is None:
        using = router.db_for_write(model)
    require_tables(using)
    return using


def require_stage(stage: str, rows: QuerySet[Any]) -> None:
    """Raise CommandError if the stage has none of these rows, and is unknown or
    declared here with another database. Otherwise the rows of a misspelt stage, or of a
    stage elsewhere, would be taken for missing."""
    rows, using = rows.filter(stage=stage), rows.db
    if rows.exists():
        return
    for one in all_stages():
        home = of_stage(one) if one.name == stage else None
        if home not in (None, using):
            raise CommandError(
                f"Stage {stage!r} keeps its rows in database {home!r}: "
                f"--database {home}"
            )
    if not is_known(stage, using):
        raise CommandError(f"There is no stage {stage!r} here.")


# The options of commands: verbs, texts, numbers and ages.


class VerbParser(CommandParser):
    """The parser of a verb, which accepts Django's options, such as --settings and
    --verbosity, before and after the verb.

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


def add_actions(
    parser: argparse.ArgumentParser, actions: Mapping[str, str | None]
) -> dict[str, Any]:
    """Add the actions of a command, each with its help text, if it has one. Return
    their parsers by name."""
    added = parser.add_subparsers(
        dest="action", required=True, parser_class=VerbParser, metavar="ACTION"
    )
    return {name: added.add_parser(name, help=text) for name, text in actions.items()}


def not_blank(text: str) -> str:
    """Return the value of an option. Refuse a blank value, because without the option
    the command would do more: the value may be an unset variable of a shell."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is blank. Is a variable of your shell unset?")
    return text


def read_option(
    options: Mapping[str, Any], name: str, read: Callable[[str], Any]
) -> Any:
    """Return the value of an option. Read a text or a number that was given to
    `call_command()` by keyword, which no parser has read."""
    value = options.get(name)
    if not isinstance(value, str | int):
        return value
    try:
        return read(str(value))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise CommandError(f"{name}: {error}") from None


def read_ids(given: Iterable[object]) -> list[uuid.UUID]:
    """Return the ids that follow an action. The parser leaves them as text: it would
    report the value of an unknown option as a wrong id."""
    found = []
    for one in given:
        try:
            found.append(uuid.UUID(str(one)))
        except ValueError:
            raise CommandError(f"{str(one)!r} is not an id.", returncode=2) from None
    return found


# The operator, and the audit entry of the operator's action.


def operator() -> str:
    """Return the name of the operating system's user. Return "unknown" if the user id
    has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def record(
    using: str,
    deed: Deed,
    text: str,
    *,
    count: int | None = 1,
    operation: BulkOperation | None = None,
) -> None:
    """Record an operator's action in the audit. Call this in the transaction that makes
    the change."""
    entries = AuditEntry.objects.db_manager(using)
    by = f"command: {operator()}"
    entries.record(by, text, deed=deed, count=count, operation=operation)


def perform(using: str, change: Callable[[], tuple[object, Deed, str] | None]) -> str:
    """Call `change` in a transaction with its audit entry. `change` returns what it has
    changed, and the deed and the text of the entry. Return the text, or "" if `change`
    returns None, because nothing was changed."""
    with transaction.atomic(using=using):
        done = change()
        if done is None:
            return ""
        changed, deed, text = done
        operation = changed if isinstance(changed, BulkOperation) else None
        record(using, deed, text, operation=operation)
    return text
