"""Checks of the stages, of the databases that hold messages, of the recurring messages
and of the committed contract."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import Error as AnyDatabaseError
from django.db import connections
from django.utils.module_loading import module_has_submodule

from .. import brokers, codecs, conf, contracts, stages, wire
from ..consuming.stage_middleware import prepared
from ..django_internals import settings_of
from ..envelope.message import MAX_NAME_LENGTH
from ..envelope.redelivery import RedeliveryPolicy
from ..errors import ConfigurationError, TxmsgError
from ..flows.declaration import declarations
from ..lazy_imports import install
from ..monitoring import databases
from ..scheduling.timetable import recurring
from ..stages import Stage

DAY = 86_400.0
#: What a module that declares stages contains.
_DECLARATION = re.compile(rb"^@(\w+\.)?stage\(", re.MULTILINE)
#: Bytes of a module that are searched: a longer one is data that a program wrote.
_READ = 1024 * 1024


def check() -> list[CheckMessage]:
    """Return the faults of stages and retention."""
    found: list[CheckMessage] = []
    for stage in stages.all_stages():
        for look in (
            _definition,
            _broker,
            _subscription,
            _codec,
            _middleware,
            _order,
            _rate,
            _undo,
        ):
            found += look(stage)
    return [*found, *_shared_queues(), *_misnamed(), *_retention()]


def _misnamed() -> Iterator[CheckMessage]:
    """Warn of modules that declare stages but are not imported when Django starts."""
    for app in apps.get_app_configs():
        package: Any = app.module
        for path, source in _modules(getattr(package, "__path__", ()), app.name):
            # Only source is read: a compiled module or a zip archive has no such file.
            if path in sys.modules or not source.is_file():
                continue
            with source.open("rb") as file:
                text = file.read(_READ)
            if b"django_txmsg" not in text or not _DECLARATION.search(text):
                continue
            name = path.removeprefix(f"{app.name}.")
            hint = f"Import it in {app.name}.stages."
            if "." not in name and not module_has_submodule(package, "stages"):
                hint = f"Rename the module `{name}` to `stages`."
            yield Warning(
                f"The stages in {path} are not found: only modules named "
                f"`stages` are imported when Django starts.",
                hint=hint,
                id="txmsg.W006",
            )


def _modules(folders: Iterable[str], package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a package, and of the packages inside it, each with its
    file. Packages that are apps themselves are omitted."""
    apart = {"migrations", "management"}
    apart |= {one.name for one in apps.get_app_configs()}
    for module in iter_modules(folders):
        path = f"{package}.{module.name}"
        if module.name.startswith(("test", "conftest")):
            continue
        folder = Path(getattr(module.module_finder, "path", ""))
        if not module.ispkg:
            yield path, folder / f"{module.name}.py"
        elif not apart & {module.name, path}:
            yield path, folder / module.name / "__init__.py"
            yield from _modules([str(folder / module.name)], path)


def _definition(stage: Stage) -> Iterator[CheckMessage]:
    try:
        assert stage.definition is not None
    except Exception as error:
        yield Error(
            f'TXMSG["TRANSACTION_DEFINITION"] fails for stage {stage.name!r}: '
            f"{type(error).__name__}: {error}",
            hint="It takes a Stage and returns a TransactionDefinition or None.",
            id="txmsg.E005",
        )


def _broker(stage: Stage) -> Iterator[CheckMessage]:
    known = conf.get().BROKERS
    if stage.broker not in known:
        yield Error(
            f"Stage {stage.name!r} consumes from the broker {stage.broker!r}, which "
            f'is not in TXMSG["BROKERS"].',
            hint=f"Known here: {', '.join(sorted(known))}.",
            id="txmsg.E008",
        )
        return
    if not wire.is_topic(stage.destination):
        return
    if stage.policy.mode == "broker":
        yield Error(
            f"Stage {stage.name!r} consumes a topic and has redelivery mode "
            f'"broker": its delayed copies would reach every other subscriber too.',
            hint='Use mode="non_blocking".',
            id="txmsg.E009",
        )
    if stage.concurrency > 1 and not brokers.get_broker(stage.broker).shares_topics():
        yield Warning(
            f"Stage {stage.name!r} consumes a topic and asks for {stage.concurrency} "
            f"threads, and gets one: ActiveMQ gives a durable subscription to one "
            f"connection only.",
            hint="Use concurrency=1 and one process, and hand on to a queue from "
            "there; or say dialect=rabbitmq in the URL if that is what it is.",
            id="txmsg.W001",
        )


def _subscription(stage: Stage) -> Iterator[CheckMessage]:
    """Check the name of a stage's subscription, which is the name of its queue on
    RabbitMQ."""
    if len(stage.subscriber or "") > MAX_NAME_LENGTH:
        yield Error(
            f"The subscription of stage {stage.name!r} has the name SERVICE.STAGE, "
            f"which is longer than {MAX_NAME_LENGTH} characters.",
            hint="Give the stage a shorter name=.",
            id="txmsg.E016",
        )
    broker = brokers.find_broker(stage.broker)
    if broker is None or broker.kind != "rabbitmq":
        return
    for other in stages.all_stages():
        same = other.destination == stage.subscriber and other.broker == stage.broker
        if same:
            yield Error(
                f"Stage {other.name!r} consumes the queue {other.destination!r}, in "
                f"which RabbitMQ keeps the subscription of stage {stage.name!r}: each "
                f"would get messages of the other.",
                hint="Give one of the two stages, or the queue, another name.",
                id="txmsg.E014",
            )


def _codec(stage: Stage) -> Iterator[CheckMessage]:
    try:
        assert stage.reader is None or stage.reader
    except ConfigurationError as error:
        yield Error(
            f"The handler of stage {stage.name!r} takes {stage.accepts!r}, which "
            f"nothing here can read: {error}",
            hint=f'Run: {install("typed")}, or name a codec in TXMSG["CODECS"].',
            id="txmsg.E012",
        )


def _middleware(stage: Stage) -> Iterator[CheckMessage]:
    if not conf.get().STAGE_MIDDLEWARE or next(_definition(stage), None):
        return
    try:
        ready = prepared(stage)
    except AnyDatabaseError:
        return  # of one that asks the database, before `migrate`: `consume` says so
    except Exception as error:
        yield Error(
            f'TXMSG["STAGE_MIDDLEWARE"] fails for stage {stage.name!r}: '
            f"{type(error).__name__}: {error}",
            hint="Each takes call_next and returns what takes a message; one that is "
            "not for this stage raises MiddlewareNotUsed.",
            id="txmsg.E005",
        )
        return
    if ready.batch < stage.batch:
        yield Warning(
            f"Stage {stage.name!r} has batch={stage.batch}, but each of its messages "
            "gets a separate transaction, because a middleware has "
            "outside_transaction = True.",
            hint="Let the middleware do its work inside the transaction, or raise "
            "MiddlewareNotUsed for this stage.",
            id="txmsg.W007",
        )


def _order(stage: Stage) -> Iterator[CheckMessage]:
    if stage.ordered is None:
        return
    if stage.transaction != "outbox":
        yield Error(
            f"Stage {stage.name!r} is ordered and has "
            f'transaction="{stage.transaction}": only the inbox of mode "outbox" '
            f"knows which messages of a key are processed.",
            hint='Use transaction="outbox", or leave ordered= out.',
            id="txmsg.E060",
        )
    elsewhere = [
        repr(one.name)
        for one in stages.all_stages()
        if one.destination == stage.destination and one.broker != stage.broker
    ]
    if elsewhere and not wire.is_topic(stage.destination):
        yield Warning(
            f"Stage {stage.name!r} is ordered, and {', '.join(elsewhere)} "
            f"consumes {stage.destination!r} from another broker: messages of one key "
            f"that are sent through both brokers are not in order.",
            hint="Send all messages to this destination through one broker.",
            id="txmsg.W017",
        )


def _shared_queues() -> Iterator[CheckMessage]:
    queues: dict[tuple[str, str], list[Stage]] = {}
    for stage in stages.all_stages():
        if not wire.is_topic(stage.destination):
            queues.setdefault((stage.broker, stage.destination), []).append(stage)
    for (_, queue), sharing in queues.items():
        names = ", ".join(repr(one.name) for one in sharing)
        shared = f"The stages {names} share the queue {queue!r}"
        if len(sharing) > 1 and any(one.ordered for one in sharing):
            yield Error(
                f"{shared}, and at least one is ordered: each gets some of the "
                f"messages, and an ordered one waits for those of the others.",
                hint="Give the queue one stage, or send to a topic.",
                id="txmsg.E061",
            )
        elif len(sharing) > 1:
            yield Warning(
                f"{shared}: each message goes to one of them, and a copy of it that "
                f"goes to another one is processed again.",
                hint="Send to a topic, or call both functions from one handler.",
                id="txmsg.W016",
            )


def _rate(stage: Stage) -> Iterator[CheckMessage]:
    if stage.rate is not None and stage.policy.mode == "blocking":
        yield Error(
            f"Stage {stage.name!r} has a rate, and the settings' redelivery mode "
            f'"blocking", whose attempts follow each other in the thread.',
            hint='Give it redelivery=RedeliveryPolicy(mode="non_blocking").',
            id="txmsg.E063",
        )


def _undo(stage: Stage) -> Iterator[CheckMessage]:
    if stage.undoes is None:
        return
    doing = [
        one
        for one in stages.all_stages()
        if (one.broker, one.destination) == (stage.broker, stage.undoes)
    ]
    using = databases.of_stage(stage)
    apart = [
        one.name
        for one in doing
        if databases.of_stage(one) != using or one.transaction != "outbox"
    ]
    if not doing or apart:
        yield Error(
            f"Stage {stage.name!r} undoes {stage.undoes!r}, and "
            + (
                f"{', '.join(map(repr, apart))} works in another database, or without "
                f"an inbox"
                if apart
                else "no stage here consumes that"
            )
            + ": whether there is anything to undo is decided in the inbox of both.",
            hint="Declare both in one service, for one database, with the transaction "
            '"outbox".',
            id="txmsg.E062",
        )


def check_databases() -> Iterator[CheckMessage]:
    """Check that each database that stores messages is configured and supported."""
    for alias, who in databases.in_use().items():
        if alias not in connections:
            yield Error(
                f"{who} uses the database {alias!r}, which is not in DATABASES.",
                hint=f"Known here: {', '.join(sorted(connections))}.",
                id="txmsg.E006",
            )
            continue
        connection: Any = connections[alias]
        if connection.vendor not in databases.VENDORS:
            yield Error(
                f"{who} uses the database {alias!r}, which is {connection.vendor}.",
                hint="Messages are kept in PostgreSQL or SQLite.",
                id="txmsg.E007",
            )
        elif connection.vendor == "sqlite" and sqlite3.sqlite_version_info < (3, 35):
            yield Error(
                f"The SQLite library of database {alias!r} is too old: messages are "
                f"claimed by UPDATE … RETURNING.",
                hint="Use SQLite 3.35 or newer, or PostgreSQL.",
                id="txmsg.E007",
            )
        yield from _options(alias, connection)


def _options(alias: str, connection: Any) -> Iterator[CheckMessage]:
    # Not by the engine's name: SpatiaLite's differs.
    options = settings_of(connection)
    if connection.vendor == "sqlite" and options.get("TIME_ZONE"):
        yield Error(
            f"The SQLite database {alias!r} has a TIME_ZONE of its own: Django writes "
            f"instants in it, and due times and leases are computed by SQLite, which "
            f"knows UTC alone.",
            hint=f'Remove DATABASES["{alias}"]["TIME_ZONE"]; settings.TIME_ZONE is '
            f"what people see.",
            id="txmsg.E010",
        )
    if not options.get("AUTOCOMMIT", True):
        yield Error(
            f"The database {alias!r} has AUTOCOMMIT off: claims, receipts and counted "
            "attempts are statements that must each commit at once.",
            hint=f'Remove DATABASES["{alias}"]["AUTOCOMMIT"]; transaction.atomic() '
            f"makes the transactions.",
            id="txmsg.E011",
        )


def _retention() -> Iterator[CheckMessage]:
    keep = conf.get().RETENTION
    kept = {
        name: float("inf") if days is None else days
        for name, days in asdict(keep).items()
    }
    if kept["OUTBOX"] > kept["INBOX"]:
        yield Warning(
            f'TXMSG["RETENTION"] keeps the inbox for {keep.INBOX:g} days and the '
            f"outbox for {'ever' if keep.OUTBOX is None else f'{keep.OUTBOX:g}'}: a "
            f"copy sent from the outbox later than that is processed again.",
            hint="Keep the inbox at least as long as the outbox.",
            id="txmsg.W003",
        )
    longer = [name for name in ("OUTBOX", "INBOX") if kept[name] > kept["FLOWS"]]
    if longer and declarations():
        yield Warning(
            f'TXMSG["RETENTION"] keeps ended runs for {keep.FLOWS:g} days, but '
            f"{' and '.join(longer)} longer: if the stage that started a run runs "
            f"again in between, start() raises DuplicateMessage, or stores a run that "
            f"never begins.",
            hint='Raise TXMSG["RETENTION"]["FLOWS"] to the longest of the three.',
            id="txmsg.W012",
        )
    yield from _retention_of_undos(kept)
    for stage in stages.all_stages():
        window = _redelivery_window(stage.policy)
        if window > kept["INBOX"] * DAY:
            yield Warning(
                f"Stage {stage.name!r} tries a message again for up to "
                f"{_length(window)}, longer than the inbox remembers "
                f"({keep.INBOX:g} days).",
                hint='Raise TXMSG["RETENTION"]["INBOX"], or lower the policy\'s '
                "max_redeliveries or max_delay.",
                id="txmsg.W004",
            )


def _retention_of_undos(kept: dict[str, float]) -> Iterator[CheckMessage]:
    """Warn if rows by which an undo finds out what was done are deleted too early."""
    undoing = [stage.name for stage in stages.all_stages() if stage.undoes]
    # The steps of a flow undo its own runs, which say what was done.
    by_inbox = any(not name.endswith(wire.STEPS) for name in undoing)
    for flow in declarations() if by_inbox else ():
        within = flow.within if isinstance(flow.within, timedelta) else timedelta(0)
        if within.total_seconds() > kept["INBOX"] * DAY:
            yield Warning(
                f"The flow {flow.name!r} waits up to {within.total_seconds() / DAY:g} "
                f"days for an answer, longer than the inbox remembers "
                f"({kept['INBOX']:g} days): if the deadline passes, an undo cannot "
                f"find out whether its request was done.",
                hint='Lower within=, or raise TXMSG["RETENTION"]["INBOX"].',
                id="txmsg.W013",
            )
    edited = bool(undoing) and conf.get().EDIT_DEAD_LETTERS
    if edited and kept["DEAD_LETTERS"] < kept["INBOX"]:
        yield Warning(
            f'TXMSG["RETENTION"] keeps dead letters for {kept["DEAD_LETTERS"]:g} '
            f"days, less than inbox rows: an undo finds an edited copy of its request "
            f"by the dead letter, and does not undo the copy's work without it.",
            hint="Keep dead letters at least as long as the inbox.",
            id="txmsg.W014",
        )


def _length(seconds: float) -> str:
    days = seconds / DAY
    return f"{days:.1f} days" if days >= 0.1 else f"{seconds / 60:.1f} minutes"


def _redelivery_window(policy: RedeliveryPolicy) -> float:
    tries = range(1, min(policy.max_redeliveries, 10_000) + 1)
    return sum(policy.delay(attempt, lambda: 1.0) for attempt in tries)


# Checks that recurring messages can be stored, before a relay fails at a tick.


def check_schedule() -> Iterator[CheckMessage]:
    """Report each recurring message that cannot be stored."""
    for one in recurring():
        if one.alias not in databases.with_tables():
            why = f"the router keeps the tables out of database {one.alias!r}"
        else:
            try:
                one.check()
                continue
            except TxmsgError as error:
                why = str(error)
        yield Error(
            f"The recurring message {one.name!r} cannot be stored: {why}",
            hint='Correct its every(), or its entry in TXMSG["SCHEDULE"].',
            id="txmsg.E050",
        )


# Whether this process can find the contract of its typed messages.


def check_contract() -> Iterator[CheckMessage]:
    """Report a contract that cannot be read. Warn if its path depends on the directory
    in which the process is started."""
    file = codecs.contract_path()
    is_there = file.exists()
    if is_there:
        try:
            contracts.read(file)
        except ConfigurationError as error:
            yield Error(
                f"{error} Messages do not say which versions read them: code that is "
                f"too old for one would bury it.",
                hint="Restore the file; or remove it and run: manage.py txmsg "
                "contracts export",
                id="txmsg.E015",
            )
    if conf.get().CONTRACT is not None or hasattr(django_settings, "BASE_DIR"):
        return
    typed = any(stage.accepts is not None for stage in stages.all_stages())
    if typed or is_there:
        yield Warning(
            f'The settings have neither BASE_DIR nor TXMSG["CONTRACT"]: the contract '
            f"is looked for in the directory that a process is started in, now "
            f"{file.resolve()}. Where it is not found, messages do "
            f"not say which versions read them.",
            hint='Give TXMSG["CONTRACT"] the path of asyncapi.json.',
            id="txmsg.W008",
        )
