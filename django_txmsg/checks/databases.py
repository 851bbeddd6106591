"""Checks of databases. They find databases that the routers keep the tables out of,
parts that run in "default" although the routers name another database, pools that are
too small for the threads of one process, poolers that do not forward notifications, and
open runs of flows that this code cannot continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db import Error as AnyDatabaseError
from django.db.models import Count

from .. import brokers, conf, stages
from ..django_internals import in_block, settings_of
from ..envelope.typed_body import TypeHeader
from ..flows.deadlines import Deadlines
from ..flows.declaration import Declaration, Step, declarations
from ..http_outbox import count_middleware
from ..models import DeadLetter, OutboxMessage, Run, Worker
from ..models.run import WaitsFor
from ..monitoring import databases
from ..monitoring.alarms import listed
from ..relaying.listener import advice, alias_of, receives_notifications
from ..scheduling.time_loop import TimeLoop
from ..scheduling.timekeeper import Timekeeper

#: The size of a psycopg pool without options, or without a maximum.
DEFAULT_SIZE = 4
#: Parts of the project that one report names.
NAMED = 5


def check_routers() -> Iterator[CheckMessage]:
    """Report databases that store messages although the routers keep the tables out of
    them. No relay serves such a database. Warn of parts that run in "default" although
    the routers store messages elsewhere: what they write there stays if they fail."""
    outbox = router.db_for_write(OutboxMessage)
    parts, implied = {outbox: ["the outbox"]}, []
    for alias, part, chosen in _parts():
        parts.setdefault(alias, []).append(part)
        if alias == DEFAULT_DB_ALIAS != outbox and not chosen:
            implied.append(part)
    for alias, users in parts.items():
        if alias not in connections:
            continue  # another check reports it
        if not router.allow_migrate_model(alias, OutboxMessage):
            yield Error(
                f"The database {alias!r} is used by {listed(users, NAMED)}, but your "
                f"routers forbid the tables of django_txmsg there.",
                hint="Name another database with using= of the stage or flow, with "
                'TXMSG["TRANSACTION_DEFINITION"], or with TXMSG["HTTP"]["USING"]; or '
                f"let allow_migrate() permit the tables in {alias!r}, and migrate.",
                id="txmsg.E017",
            )
        elif alias == DEFAULT_DB_ALIAS and implied:
            yield Warning(
                f"Your routers store messages in database {outbox!r}, but the "
                f"transaction of {listed(implied, NAMED)} is in {alias!r}, whatever "
                f"the routers say: rows that are written to {outbox!r} stay if it is "
                f"rolled back.",
                hint=f"Set using={outbox!r} of the stage or flow, "
                'TXMSG["TRANSACTION_DEFINITION"], or TXMSG["HTTP"]["USING"] = '
                f'"{outbox}". If you mean {alias!r}, set using={alias!r} of the stage, '
                f'or TXMSG["HTTP"]["USING"]; for a flow, silence this check.',
                id="txmsg.W015",
            )


def _parts() -> Iterator[tuple[str, str, bool]]:
    """Yield the database of each flow, of each other stage and, if the middleware is
    installed, of requests. Each has a text that names the part, and whether the project
    is known to have chosen this database."""
    if count_middleware():
        http = getattr(django_settings, "TXMSG", {}).get("HTTP", {})
        yield conf.get().HTTP.USING, 'TXMSG["HTTP"]["USING"]', "USING" in http
    of_flows = set()
    for flow in declarations():
        of_flows |= {flow.name, flow.steps_name}
        yield flow.using, f"flow {flow.name!r}", False
    for stage in stages.all_stages():
        using = databases.of_stage(stage)
        if using is not None and stage.name not in of_flows:
            yield using, f"stage {stage.name!r}", stage.using is not None


def check_pools() -> Iterator[CheckMessage]:
    """Warn of connection pools that are too small for the threads of `consume` or
    `relay`."""
    for alias in databases.in_use():
        if alias not in connections:
            continue
        pool = settings_of(connections[alias]).get("OPTIONS", {}).get("pool")
        if not pool:
            continue
        size = size_of(pool)
        for command, need in (("consume", consumer(alias)), ("relay", relay(alias))):
            if need > size:
                yield Warning(
                    f"The pool of database {alias!r} has {size} connections, and "
                    f"`manage.py {command}` uses up to {need} at a time: its threads "
                    f"wait for each other.",
                    hint=f'Set OPTIONS = {{"pool": {{"max_size": {need}}}}} where it '
                    f"runs, {run(alias)} where `txmsg run` does, and more if handlers "
                    f"use threads of their own.",
                    id="txmsg.W005",
                )


def size_of(pool: Any) -> int:
    """Return the number of connections that OPTIONS["pool"] allows."""
    given: dict[str, Any] = {} if pool is True else pool
    return int(given.get("max_size") or given.get("min_size", DEFAULT_SIZE))


def consumer(alias: str) -> int:
    """Return how many threads of one consumer can use a connection to this database at
    the same time, if the consumer runs all stages."""
    settings = conf.get()
    known = {name: brokers.get_broker(name) for name in settings.BROKERS}
    embedded = [name for name, one in known.items() if one.stored_in == alias]
    need = 1 + 1 + 1  # its main thread, bulk operations, leases
    need += len(settings.BROKERS)  # control messages
    for stage in stages.all_stages():
        own = databases.of_stage(stage) == alias
        if own or stage.broker in embedded:
            need += stage.concurrency
    if router.db_for_write(DeadLetter) == alias:
        need += len(settings.DEAD_LETTER_DESTINATIONS)
    if settings.DISPATCH_ON_COMMIT == "thread":
        need += len(settings.BROKERS)
    return need + _notifications(alias)


def relay(alias: str) -> int:
    """Return how many threads of a relay can use a connection to this database at the
    same time."""
    settings = conf.get()
    lanes = settings.RELAY.LANES * len(settings.BROKERS)
    own = (
        1 + 1 + int(alias == router.db_for_write(Worker))
    )  # leases, charts, its heartbeat
    return lanes + own + _time_loops(alias) + _notifications(alias)


def run(alias: str) -> int:
    """Return how many threads of `txmsg run`, which relays, consumes and prunes, can
    use a connection to this database at the same time."""
    shared = 1 + _notifications(alias)  # leases
    # One of its threads prunes, and none counts for the charts.
    return consumer(alias) + relay(alias) - shared


def _time_loops(alias: str) -> int:
    """Return how many threads of a relay store recurring messages, store time-outs of
    flows, or compare this database with the alerts."""
    loops: list[TimeLoop] = [Timekeeper([alias]), Deadlines([alias])]
    alerts = int(bool(conf.get().ALERTS.KINDS))
    return alerts + sum(not loop.is_idle(alias) for loop in loops)


def _notifications(alias: str) -> int:
    """Return how many threads of a process receive or send notifications in this
    database."""
    if not conf.get().NOTIFY or connections[alias].vendor != "postgresql":
        return 0
    return 2 if alias_of(alias) == alias else 1


# Whether this process receives notifications, tested with one of its own.


def check_notifications(aliases: Sequence[str]) -> Iterator[CheckMessage]:
    """Warn of databases from which this process receives no notifications."""
    for using in databases.with_tables():
        if using not in aliases or connections[using].vendor != "postgresql":
            continue
        if not conf.get().NOTIFY or in_block(connections[alias_of(using)]):
            continue
        with ThreadPoolExecutor(1) as thread:
            received = thread.submit(_receives, using).result()
        if received is False:
            yield Warning(
                f"A notification did not arrive in database {alias_of(using)!r}: "
                "relays and consumers learn of new messages by polling alone.",
                hint=f'{advice(using)} Or set TXMSG["NOTIFY"] = False.',
                id="txmsg.W030",
            )


def _receives(using: str) -> bool | None:
    """Return whether notifications arrive on a connection of this thread, and close the
    connection. The caller's connection must not listen afterwards, and closing it would
    end its temporary tables and settings."""
    try:
        return receives_notifications(using)
    except AnyDatabaseError:
        return None  # Django's own checks say that
    finally:
        connections[alias_of(using)].close()


# Whether this code can continue the open runs of flows there.


def check_runs(asked: Sequence[str]) -> Iterator[CheckMessage]:
    """Report open runs of flows that this code cannot continue, because it lacks their
    flow, their step or a type. Such a run is not lost: it waits until code with the
    missing part runs."""
    known = {one.name: one for one in declarations()}
    for using in databases.with_tables():
        if using not in asked:
            continue
        runs = Run.objects.using(using).filter(
            service__in=conf.get().services, ended_at=None
        )
        columns = (
            "flow", "step", "otherwise", "version", "waits_for", "reads", "kept_undos"
        )  # fmt: skip
        try:
            with transaction.atomic(using=using):
                found = runs.values_list(*columns).order_by(*columns)
                groups = list(found.annotate(Count("pk")))
        except AnyDatabaseError:
            continue  # not migrated yet
        for flow, *waits, count in groups:
            if missing := list(_missing(known.get(flow), *waits)):
                yield Error(
                    f"{count} open runs of flow {flow!r} in database {using!r} wait "
                    "for something that this code does not have: "
                    f"{', '.join(missing)}.",
                    hint="Keep it until these runs have ended. A step that has another "
                    "name now: @step(was=…). After a roll-back, the runs wait until "
                    "the newer code is back.",
                    id="txmsg.E064",
                )


def _missing(
    declared: Declaration | None,
    step: str,
    otherwise: str,
    version: int,
    waits_for: str,
    reads: str,
    kept_undos: int | None,
) -> Iterator[str]:
    if declared is None:
        yield "the flow itself"
        return
    if version > declared.version:
        yield f"version {version} of its state"
    if waits_for == WaitsFor.UNDO and kept_undos is None:
        return  # no step follows
    for name in filter(None, (step, otherwise)):
        if name not in declared.steps:
            yield f"the step {name!r}"
    if step in declared.steps:
        yield from _unread(declared.steps[step], reads)


def _unread(step: Step, reads: str) -> Iterator[str]:
    types = () if step.takes_nothing else step.reader.types
    known = {one.name: one.version for one in types}
    for one in map(TypeHeader.parse, reads.splitlines()):
        if not step.takes_nothing and known.get(one.name, 0) < one.oldest_reader:
            yield f"{one.name} version {one.version}, as step {step.name!r} took it"
