"""`manage.py txmsg doctor`: tests whether this installation works.

`manage.py check` only reads the settings. This command also connects to databases and
brokers. It sends one message through each broker. In each database it writes one row,
and rolls the row back. For each failure it prints what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.management.base import BaseCommand
from django.db import Error as AnyDatabaseError
from django.db import connections, router, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models import AutoField
from django.utils import timezone

from .. import conf, wire
from ..brokers import Outgoing, Session, find_broker, get_broker
from ..envelope.message import new_id
from ..errors import TxmsgError
from ..lazy_imports import install
from ..models import OutboxMessage, Worker
from ..models.fields import clock, query
from ..models.outbox import PENDING
from ..monitoring import attendance
from ..monitoring.alarms import listed
from ..monitoring.databases import (
    is_read_only,
    left_out,
    with_only_queues,
    with_tables,
)
from ..monitoring.waiting import in_outbox, places_sql
from ..relaying.listener import advice, alias_of, receives_notifications
from ..rules import outbox
from ..sending.outbox import send_message
from ..stages import all_stages
from .terminal import SEARCHED

GOOD, WARNING, BAD = "good", "warning", "bad"

#: Seconds that a message may take through a broker and back.
ROUND_TRIP = 10.0
#: Most seconds by which the clocks of this machine and of a database may differ.
SKEW = 2.0
#: The labels of our apps.
_OURS = {"django_txmsg", "txmsg_spark"}
#: Distributions whose versions are printed.
DRIVERS = ("psycopg", "psycopg2", "stomp.py", "amqp", "celery", "pyspark")

_PRIVILEGES = (
    "The user needs SELECT, INSERT, UPDATE and DELETE on the tables of django_txmsg, "
    "and USAGE on their sequences."
)

#: The result of a test, its text, and perhaps what to do.
Result = tuple[str, str] | tuple[str, str, str]


@dataclass(frozen=True)
class Examined:
    """The name of a test, its result, and what to do if it failed."""

    subject: str
    state: str
    text: str
    cure: str = ""


class Command(BaseCommand):
    """Test what this installation needs, and print what to do about each failure."""

    help = (
        "Tests databases, brokers, notifications and workers, and says what to do "
        "about each failure. Exits with 1 if something fails."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        found = []
        for one in examine():
            found.append(one)
            if not options["json"]:
                self._print(one)
        bad = [one for one in found if one.state == BAD]
        if options["json"]:
            report = {"well": not bad, "examined": [asdict(one) for one in found]}
            self.stdout.write(json.dumps(report, indent=2))
        elif not bad:
            self.stdout.write(self.style.SUCCESS("Everything that was tried works."))
        if bad:
            sys.exit(1)

    def _print(self, one: Examined) -> None:
        style: Callable[[str], str] = {
            GOOD: self.style.SUCCESS,
            WARNING: self.style.WARNING,
            BAD: self.style.ERROR,
        }[one.state]
        self.stdout.write(f"{style(f'{one.state:<8}')} {one.subject}: {one.text}")
        if one.cure:
            self.stdout.write(f"{'':<8}   -> {one.cure}")


def examine() -> Iterator[Examined]:
    """Run all tests, the settings first. If the settings are wrong, run no other
    test."""
    yield _versions()
    yield from _settings()
    if conf.problems():
        return
    reached = []
    for alias in [*with_tables(), *with_only_queues()]:
        found = list(_database(alias))
        yield from found
        if not any(one.state == BAD for one in found):
            reached.append(alias)
    yield from _not_served()
    for alias in reached:
        yield from _unknown_brokers(alias)
    for alias in sorted(conf.get().BROKERS):
        broker = find_broker(alias)
        if broker and broker.stored_in and broker.stored_in not in reached:
            continue  # its queues are tables there
        yield from _broker(alias)
    home = router.db_for_write(Worker)
    if home in reached:
        yield from _workers(home)


def _versions() -> Examined:
    named = [f"Django {django.get_version()}", f"Python {platform.python_version()}"]
    # A copy of the package that pip has not installed has no metadata.
    for name in ("django_txmsg", *DRIVERS):
        try:
            named.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return Examined("versions", GOOD, ", ".join(named))


def _settings() -> Iterator[Examined]:
    found = [
        one
        for one in checks.run_checks(
            tags=["txmsg"], include_deployment_checks=not settings.DEBUG
        )
        if (one.id or "").startswith("txmsg.") and not one.is_silenced()
    ]
    for one in found:
        state = BAD if one.level >= checks.ERROR else WARNING
        yield Examined(f"settings ({one.id})", state, one.msg, one.hint or "")
    if not found:
        yield Examined("settings", GOOD, "manage.py check has no complaint")


def _database(alias: str) -> Iterator[Examined]:
    subject, connection = f"database {alias!r}", connections[alias]
    try:
        there = clock(alias)
        version = ".".join(map(str, connection.get_database_version()))
    except AnyDatabaseError as error:
        yield Examined(
            subject, BAD, _one_line(error), "Check DATABASES, and that it runs."
        )
        return
    yield Examined(subject, GOOD, f"{connection.display_name} {version} answers")
    tables = Examined(f"tables in database {alias!r}", *_migrations(alias))
    yield tables
    if tables.state == GOOD:
        if connection.vendor == "postgresql":
            yield Examined(f"sequences of database {alias!r}", *_sequences(alias))
        yield Examined(f"writing to database {alias!r}", *_writes(alias))
    skew = abs((timezone.now() - there).total_seconds())
    if skew > SKEW:
        yield Examined(
            f"clock of {subject}",
            WARNING,
            f"differs from this machine's by {skew:.1f} s",
            "Due times use the database's clock. Let NTP set both.",
        )
    if connection.vendor == "postgresql":
        yield Examined(f"isolation of database {alias!r}", *_isolation(alias))
        if conf.get().NOTIFY:
            yield Examined(f"LISTEN in database {alias!r}", *_notifications(alias))


def _not_served() -> Iterator[Examined]:
    """Yield the databases whose messages of this service no relay dispatches, because
    only calls with `using=` name the database. A broker may keep its queues there."""
    for alias in [*left_out(), *with_only_queues()]:
        with contextlib.suppress(AnyDatabaseError):  # without our tables, or away
            late = {one.service for one in in_outbox(alias, most=1) if one.overdue}
            if late.intersection(conf.get().services) and not is_read_only(alias):
                yield Examined(
                    f"outbox in database {alias!r}",
                    BAD,
                    "messages are overdue. Neither settings, routers nor stages say "
                    "that it stores messages, so no relay serves it by default",
                    f"Also run manage.py relay --database {alias}.",
                )


def _migrations(alias: str) -> Result:
    try:
        executor = MigrationExecutor(connections[alias])
    except AnyDatabaseError as error:
        return (
            WARNING,
            f"not known, since the list of migrations cannot be read: "
            f"{_one_line(error)}",
            "Run manage.py showmigrations as the user that migrates, or allow this "
            "one to SELECT from django_migrations.",
        )
    ours = _OURS & {one.label for one in apps.get_app_configs()}
    ends = [one for one in executor.loader.graph.leaf_nodes() if one[0] in ours]
    missing = [f"{one.app_label}.{one.name}" for one, _ in executor.migration_plan(ends)
               if one.app_label in ours]  # fmt: skip
    if not missing:
        return GOOD, "all migrations are applied"
    where = "" if alias == "default" else f" --database {alias}"
    return (
        BAD,
        f"migrations missing: {len(missing)}, the first {missing[0]}",
        f"Run manage.py migrate{where}.",
    )


def _sequences(alias: str) -> Result:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    behind, unusable = [], False
    for model in apps.get_models():
        options = model._meta
        if (
            options.app_label not in _OURS
            or not (options.managed and isinstance(options.pk, AutoField))
            or not router.allow_migrate_model(alias, model)
        ):
            continue
        with contextlib.suppress(AnyDatabaseError):  # this role may not read the table
            ((usable, late),) = query(
                alias,
                "SELECT has_sequence_privilege(s, 'USAGE, UPDATE'),"  # noqa: S608 - ours
                " has_sequence_privilege(s, 'USAGE, SELECT')"
                f" AND (SELECT max(id) FROM {options.db_table})"
                " > coalesce(pg_sequence_last_value(s::regclass), 0)"
                " FROM pg_get_serial_sequence(%s, 'id') s",
                [options.db_table],
            )
            behind += [options] if late else []
            # Only COPY asks for the ids; an INSERT needs no privilege for them.
            unusable |= model is OutboxMessage and is_psycopg3 and not usable
    if unusable:
        return (
            BAD,
            f"this user may not use that of {OutboxMessage._meta.db_table}, so a large "
            "send_messages() fails",
            _PRIVILEGES,
        )
    if not behind:
        return GOOD, "ahead of the rows"
    where = "" if alias == "default" else f" --database {alias}"
    labels = " ".join(sorted({one.app_label for one in behind}))
    return (
        BAD,
        f"new rows get primary keys that exist, in "
        f"{listed([one.db_table for one in behind], 3)}",
        f"Stop all processes, and run manage.py sqlsequencereset {labels}{where} | "
        f"manage.py dbshell{where}.",
    )


def _unknown_brokers(alias: str) -> Iterator[Examined]:
    """Yield the brokers of pending messages of this service that the settings do not
    name."""
    table = OutboxMessage._meta.db_table
    named = query(
        alias,
        f"{places_sql(table, ('broker',), outbox.PENDING)} SELECT o.broker"  # noqa: S608 - of ours
        f" FROM places JOIN {table} o ON o.id = places.id ORDER BY o.broker",
    )
    own = OutboxMessage.objects.using(alias).filter(
        PENDING, service__in=conf.get().services
    )
    for (broker,) in named:
        if broker not in conf.get().BROKERS and own.filter(broker=broker).exists():
            yield Examined(
                f"messages to broker {broker!r} in database {alias!r}",
                BAD,
                'they wait, and TXMSG["BROKERS"] does not name this broker',
                "Add the broker, with the URL of the server that has to get them.",
            )


def _writes(alias: str) -> Result:
    try:
        with transaction.atomic(using=alias):
            send_message(_destination(), "doctor", using=alias)
            transaction.set_rollback(True, using=alias)
    except AnyDatabaseError as error:
        return (
            BAD,
            _one_line(error),
            f"{_PRIVILEGES} The server has to take writes.",
        )
    return GOOD, "a message was stored and rolled back"


def _isolation(alias: str) -> Result:
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW default_transaction_isolation")
        level = cursor.fetchone()[0]
    if level == "read committed":
        return GOOD, level
    return (
        WARNING,
        f"{level}: conflicting transactions are retried",
        "READ COMMITTED suffices. Ask for more where a stage needs it: "
        '@stage(isolation="serializable").',
    )


def _notifications(alias: str) -> Result:
    try:
        received = receives_notifications(alias)
    except AnyDatabaseError as error:
        return WARNING, _one_line(error), "Workers poll until it works."
    finally:
        connections[alias_of(alias)].close()
    if received:
        return GOOD, "a notification was received"
    if received is None:
        return (
            WARNING,
            "the driver cannot listen: workers poll",
            install("postgres"),
        )
    return (
        WARNING,
        "a notification was not received: workers poll",
        advice(alias),
    )


def _broker(alias: str) -> Iterator[Examined]:
    subject, step = f"broker {alias!r}", "connect to"
    try:
        broker = get_broker(alias)
        with broker.open() as session:
            yield Examined(subject, GOOD, "reached and logged in")
            if not broker.consumable:
                return  # another program reads its messages
            step = "send to and receive from"
            yield Examined(subject, GOOD, _goes_round(session))
    except TxmsgError as error:
        text = _one_line(error)
        cure = (
            f'Check TXMSG["BROKERS"]["{alias}"] and what its user may do: declare, '
            f"write to and read the queues of its stages."
        )
        if "inequivalent arg" in text:
            cure = (
                "AMQP and STOMP declare a queue differently. Name the queues that "
                "AMQP has declared in the URL: stomp://…?existing=orders.*, or delete "
                "those that are empty."
            )
        elif "takes no messages" in text:
            cure = "Free memory or disk of the broker. Until then, all messages wait."
        yield Examined(subject, BAD, f"cannot {step} it: {text}", cure)


def _goes_round(session: Session) -> str:
    destination = _destination()
    message_id, began = str(new_id()), time.monotonic()
    headers = {wire.MESSAGE_ID: message_id, wire.SERVICE: conf.get().SERVICE,
               wire.CREATED: wire.format_instant(timezone.now()),
               wire.CONTENT_TYPE: wire.JSON}  # fmt: skip
    session.subscribe(destination, prefetch=1)
    (outcome,) = session.send([Outgoing(destination, headers, b'"doctor"')])
    if outcome is not None:
        raise outcome
    while time.monotonic() < began + ROUND_TRIP:
        delivery = session.receive(0.5)
        if delivery is None:
            continue
        # The message of another doctor, or of an earlier run: each takes one.
        session.ack([delivery])
        if delivery.headers.get(wire.MESSAGE_ID) == message_id:
            took = (time.monotonic() - began) * 1000
            return f"a message went through {destination!r} and back in {took:.0f} ms"
    raise TxmsgError(
        f"the message {message_id} was stored in {destination!r} and did not come back "
        f"within {ROUND_TRIP:g} s"
    )


def _destination() -> str:
    return f"{conf.get().SERVICE}.doctor"


def _workers(home: str) -> Iterator[Examined]:
    present = attendance.read_living(home, clock(home))
    start = "Start manage.py txmsg run (or relay and consume)."
    if present.relayed:
        yield Examined("relay", GOOD, "at work")
    else:
        waits = OutboxMessage.objects.using(home).filter(PENDING)[:1]
        text = "none is running, and messages wait" if waits else "none is running"
        yield Examined("relay", WARNING, text, start)
    alone = present.unattended([stage.name for stage in all_stages()])
    if alone:
        text = f"no worker runs {listed(alone, 5)}"
        yield Examined("stages", WARNING, text, start)
    elif all_stages():
        yield Examined("stages", GOOD, "each has a worker")
    else:
        text = f"{SEARCHED} A project that only sends messages needs none."
        yield Examined("stages", WARNING, "none is declared", text)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
