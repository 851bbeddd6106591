"""`manage.py txmsg init` prints what this project still has to add. `manage.py txmsg
contracts export|check|bury` writes the project's contract, compares the contract with
the code, and buries messages that a rolled-back release cannot read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connections, router
from django.urls import NoReverseMatch, reverse
from django.utils.module_loading import module_has_submodule

from .. import contracts
from ..dead_letters.burial import bury_unread
from ..django_internals import settings_of
from ..http_outbox import MIDDLEWARE, count_middleware
from ..models import InboxMessage, OutboxMessage
from ..models.fields import Holds
from ..models.monitoring import Deed
from ..rules.inbox import NEEDS_NEWER_CODE
from .terminal import add_actions, chosen_database, not_blank, record, require_stage

_STAGE = """
from django_txmsg import Message, stage

@stage("payments.charge")
def charge(message: Message) -> None:
    ...  # your database work; send_message() here commits with it"""

_LOGGING = """
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"timed": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "timed"}},
    "loggers": {"django_txmsg": {"handlers": ["console"], "level": "INFO"}},
}"""

_URLS = """
from django.urls import include, path

urlpatterns += [path("txmsg/", include("django_txmsg.urls"))]"""


class Init(BaseCommand):
    """Print what to add to this project, and why."""

    help = "Prints the settings that this project still has to add. Changes nothing."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add nothing, because the command has no arguments."""

    def handle(self, *args: Any, **options: Any) -> None:
        for number, (title, why, text) in enumerate(_steps(), 1):
            self.stdout.write(self.style.MIGRATE_HEADING(f"\n{number}. {title}"))
            self.stdout.write(why)
            for line in text.strip("\n").splitlines():
                self.stdout.write(f"    {line}".rstrip())


def _steps() -> Iterator[tuple[str, str, str]]:
    """Yield each step that the project still has to do: its title, its reason and the
    lines to add."""
    where = _path(getattr(settings, "SETTINGS_MODULE", ""))
    urls = getattr(settings, "ROOT_URLCONF", None)  # a project of workers has none
    project = (urls or "project").partition(".")[0]
    if not getattr(settings, "TXMSG", {}).get("SERVICE"):
        yield (
            f"Name this service, in {where}",
            "The name prefixes its own destinations and stamps its messages. Without "
            "BROKERS, messages travel through tables of your database.",
            f'TXMSG = {{"SERVICE": "{project}"}}\n'
            f'# With RabbitMQ: pip install "django_txmsg[amqp]", and\n'
            f'# TXMSG = {{"SERVICE": "{project}", "BROKERS": '
            f'{{"default": {{"URL": "amqp://user:password@localhost"}}}}}}',
        )
    if not count_middleware():
        yield (
            f"Add the middleware as the last one, in {where}",
            "It opens a transaction for each request and makes sure that its messages "
            "leave after the commit. Without it, wrap senders in transaction.atomic().",
            f'MIDDLEWARE = [..., "{MIDDLEWARE}"]',
        )
    alias = router.db_for_write(OutboxMessage)
    database = connections[alias]
    if database.vendor == "sqlite" and "transaction_mode" not in (
        settings_of(database).get("OPTIONS", {})
    ):
        yield (
            f"Let SQLite's writers wait for each other, in {where}",
            "SQLite lets one process write at a time.",
            f'DATABASES["{alias}"]["OPTIONS"] = '
            f'{{"transaction_mode": "IMMEDIATE", "timeout": 20}}',
        )
    if urls is not None and not _serves_health():
        yield (
            f"Serve health and metrics, in {_path(urls)}",
            "They need no login: restrict them at your proxy.",
            _URLS,
        )
    if "django_txmsg" not in settings.LOGGING.get("loggers", {}):
        yield (
            f"Show its log lines, in {where}",
            "Without a handler, Python prints warnings only.",
            _LOGGING,
        )
    yield from _stages()
    yield (
        "Make the tables, and try what you have",
        "doctor connects to databases and brokers, and says what to do about failures.",
        "python manage.py migrate\n"
        "python manage.py check\n"
        "python manage.py txmsg doctor",
    )
    yield (
        "Run it beside your web server",
        "One process relays, runs stages and prunes. Let systemd, Compose or "
        "Kubernetes restart it.",
        "python manage.py txmsg run",
    )


def _serves_health() -> bool:
    try:
        reverse("django_txmsg:health")
    except (NoReverseMatch, AttributeError):
        return False
    return True


def _stages() -> Iterator[tuple[str, str, str]]:
    own = [one for one in apps.get_app_configs() if _is_yours(one)]
    if any(module_has_submodule(one.module, "stages") for one in own if one.module):
        return
    name = own[0].name.replace(".", "/") if own else "app"
    yield (
        f"Write a handler, in {name}/stages.py",
        "Stages are found in each installed app's module named stages.",
        _STAGE,
    )


def _is_yours(config: Any) -> bool:
    """Return True if an app's path shows that the app belongs to the project."""
    ours = config.name.partition(".")[0] in ("django", "django_txmsg")
    return not ours and "site-packages" not in config.path


def _path(module: str | None) -> str:
    return f"{module.replace('.', '/')}.py" if module else "your settings"


class Contracts(BaseCommand):
    """Write the contract of this service, or report its breaking changes."""

    help = (
        "Writes the contract (AsyncAPI 3.0) of the messages that this service sends "
        "and receives, or checks the code against it."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = add_actions(parser, {
            "export": "Write the contract's file.",
            "check": "Exit 1 if a change breaks a sender or receiver.",
            "bury": "Bury messages that need newer code.",
        })  # fmt: skip
        bury, check = actions["bury"], actions["check"]
        bury.add_argument("--stage", type=not_blank, help="Of this stage alone.")
        bury.add_argument("--database", metavar="ALIAS")
        file = 'Default: TXMSG["CONTRACT"]; "-": standard output'
        for name in ("export", "check"):
            actions[name].add_argument("file", nargs="?", help=file)
        check.add_argument("--json", action="store_true")
        check.add_argument(
            "--database", metavar="ALIAS", nargs="?",
            const=router.db_for_write(OutboxMessage),
            help="Also look for messages that wait for something removed.",
        )  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "export":
            self._export(options["file"])
        elif options["action"] == "bury":
            using = chosen_database(options, InboxMessage)
            stage = options["stage"] or ""
            rows = InboxMessage.objects.using(using).filter(Holds(NEEDS_NEWER_CODE))
            if stage:
                require_stage(stage, rows)
                rows = rows.filter(stage=stage)
            # First: it is done in many transactions, each of which may be the last.
            of = f"stage {stage}" if stage else "all stages"
            said = f"Bury messages of {of} that need newer code."
            record(using, Deed.BURY, said, count=None)
            buried = bury_unread(using, stage)
            self.stdout.write(f"Buried {buried} messages that need newer code.")
            if left := rows.count():
                self.stdout.write(
                    f"Left: {left}, in work or behind the message before them in their "
                    f"key. Run it again later."
                )
        else:
            self._check(options)

    def _export(self, given: str | None) -> None:
        file = contracts.path(None if given == "-" else given)
        before = contracts.read(file) if file.exists() else {}
        contract = contracts.build(before)
        if given == "-":
            self.stdout.write(contracts.text(contract), ending="")
            return
        try:
            written = contracts.write(file, contract)
        except OSError as error:
            raise CommandError(f"The contract was not written: {error}") from error
        self.stdout.write(f"Wrote {file}." if written else f"{file} matches the code.")

    def _check(self, options: dict[str, Any]) -> None:
        file = contracts.path(options["file"])
        before = contracts.read(file)
        now = contracts.build(before)
        broken = contracts.breaking(before, now)
        if options["database"] is not None:
            using = chosen_database(options, OutboxMessage)
            broken += contracts.waiting(before, now, using)
        if options["json"]:
            changes = [one._asdict() for one in broken]
            self.stdout.write(json.dumps({"breaking": changes}, indent=2))
        else:
            for one in broken:
                self.stdout.write(self.style.ERROR(str(one)))
            if not broken:
                same = contracts.text(now) == contracts.text(before)
                self.stdout.write(
                    "The contract matches the code."
                    if same
                    else "The changes break nothing. Record them with: manage.py "
                    "txmsg contracts export"
                )
        if broken:
            sys.exit(1)
