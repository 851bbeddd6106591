"""Prometheus metrics (extra `prometheus`) of the tables and of this process.

Call `metrics.install()` once in each process (in an AppConfig's `ready()`). From then
on, receivers of the package's signals count events. At each scrape, the collector reads
counts and ages from the database, with capped queries. Workers that are started with
`--http` answer scrapes. Without that option, set the same PROMETHEUS_MULTIPROC_DIR for
all processes: then any web process reports the metrics of all processes.
"""

from __future__ import annotations

import datetime as dt
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from django.apps import apps
from django.db import DatabaseError, InterfaceError, router
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse

from . import conf, signals
from .errors import ConfigurationError
from .lazy_imports import needs
from .monitoring import status
from .monitoring.probe import probe
from .monitoring.status import Place
from .monitoring.waiting import Waiting
from .scheduling.timetable import recurring
from .stages import all_stages

#: Descriptions by the name of a gauge.
TEXTS = {
    "outbox_waiting": "Messages pending in the outbox, counted up to a cap.",
    "outbox_overdue": "Pending messages due for more than two minutes.",
    "outbox_oldest_due_age_seconds": "How long the oldest has been due.",
    "outbox_dead": "Open dead letters without a stage: never sent, or dead-lettered "
    "by the broker. Without muted errors.",
    "outbox_muted": "Open dead letters without a stage, of muted errors.",
    "redelivery_waiting": "Messages waiting for another attempt.",
    "redelivery_overdue": "Such messages due for more than two minutes.",
    "redelivery_oldest_due_age_seconds": "How long the oldest has been due.",
    "stage_dead": "Open dead letters of the stage, without muted errors.",
    "stage_muted": "Open dead letters of the stage, of muted errors.",
    "stage_paused": "1 while an operator has paused the stage.",
    "stage_blocked": "Messages that wait for their predecessors, capped.",
    "stage_blocked_bytes": "Their bytes, of as many as were counted.",
    "stage_blocked_oldest_age_seconds": "How long the first has been waiting.",
    "stage_held_keys": "Keys whose messages wait for longer than ORDER_PATIENCE.",
    "stage_full": "1 while an ordered stage receives nothing: too many wait.",
    "stage_workers": "Live processes that run the stage, if it is declared here.",
    "workers": "Living processes of this service.",
    "outage_seconds": "How long a process has been unable to use the named resource.",
    "database_unreadable": "1 while a database in use does not answer.",
    "queue_waiting": "Messages in a queue of the embedded broker.",
    "queue_overdue": "Such messages available for more than two minutes.",
    "queue_oldest_due_age_seconds": "How long the oldest has been available.",
    "deadline_waiting": "Runs of flows that wait for a deadline.",
    "deadline_overdue": "Deadlines passed for more than two minutes.",
    "deadline_oldest_due_age_seconds": "How long ago the oldest has passed.",
    "flow_open": "Runs that have not ended.",
    "flow_undoing": "Runs that are undoing their work.",
    "flow_undo_stuck": "Runs whose undo is dead, or late by an hour.",
    "recurring_overdue": "1 while a recurring message was not stored when due.",
    "worker_heartbeat_age_seconds": "Since the last heartbeat of a worker that lives, "
    "or that is silent and was not replaced.",
    "pipeline_alert": "1 while an alert of `pipeline follow` fires.",
    "pipeline_value": "The value that it measured last, in its `unit`.",
    "pipeline_limit": "The value above which it fires.",
    "pipeline_checked_age_seconds": "Since its last measurement.",
}

#: Seconds; messages are handled in milliseconds and wait for minutes.
BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip

#: Buckets for how often a control message's receiver checked its session.
LOOKS = (1, 2, 3, 5, 10, 20, 50, 100)

_PLACE = ("stage", "destination")

#: Most destinations for which a process counts. A message in a broker's dead-letter
#: queue may name any destination, and each name takes memory for ever.
MOST_DESTINATIONS = 1000


@dataclass(frozen=True)
class Event:
    """A metric that a signal changes: a histogram if it has buckets, else a counter.
    `labels` and `number` are arguments of the signal. If the number is None or False,
    the signal does not change the metric. If it is missing, it is 1."""

    signal: Signal
    name: str
    text: str
    labels: tuple[str, ...] = _PLACE
    number: str = "count"
    buckets: tuple[float, ...] = ()


_EVENTS = (
    Event(signals.message_processed, "processing_seconds", "Time in the stage.",
          number="duration", buckets=BUCKETS),
    Event(signals.message_processed, "critical_seconds",
          "From stored to processed, by two clocks.",
          number="critical_time", buckets=BUCKETS),
    Event(signals.message_redelivered, "redeliveries",
          "Failed attempts to be repeated."),
    Event(signals.message_duplicate, "duplicates", "Copies dropped."),
    Event(signals.message_buried, "buried", "Messages become dead letters.",
          (*_PLACE, "reason")),
    Event(signals.flow_ended, "flow_ended", "Runs that ended.", ("flow", "outcome")),
    Event(signals.flow_late, "flow_late", "Messages of runs dropped as late.",
          ("flow",)),
    Event(signals.lease_lost, "lease_lost", "Rows claimed by another relay.",
          ("broker",)),
    Event(signals.outcome_unknown, "outcome_unknown", "Sends without a receipt.",
          ("broker",)),
    Event(signals.dangerous_window, "dangerous_window_seconds",
          "From database to broker commit.", ("stage",), "seconds", BUCKETS),
    Event(signals.dangerous_window, "dangerous_window_failed",
          "Broker commits that failed.", ("stage",), "failed"),
    Event(signals.session_ended, "session_seconds",
          "Time from the beginning of a session to its end.", ("outcome",), "duration",
          BUCKETS),
    Event(signals.control_message_sent, "control_message_send_seconds",
          "Until its receipt.", ("outcome",), "duration", BUCKETS),
    Event(signals.control_message_handled, "control_message_transit_seconds",
          "From its sending to its arrival.", (), "transit_time", BUCKETS),
    Event(signals.control_message_handled, "control_message_attempts",
          "Looks at the session until the control message was settled.", ("outcome",),
          "attempts", LOOKS),
)  # fmt: skip

#: Names the place of this child of `--processes`. Its files for Prometheus are those of
#: the child before it, whose counts it continues: there would be more of them with each
#: start. Removed from the environment: processes that a handler starts have their own.
_slot, _pid = os.environ.pop("TXMSG_SLOT", ""), os.getpid()

_installed = False


class Gauges:
    """Gauges by name. All values of a gauge have the same label names. `family` creates
    a gauge."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self.families: dict[str, Any] = {}

    def set(self, name: str, number: float, /, **labels: str) -> None:
        """Set the value of a gauge for these labels."""
        family = self.families.get(name)
        if family is None:
            family = self._family(f"txmsg_{name}", TEXTS[name], labels=list(labels))
            self.families[name] = family
        family.add_metric(list(labels.values()), number)

    def waiting(
        self, kind: str, what: Waiting, now: dt.datetime, /, **labels: str
    ) -> None:
        """Set three gauges for a place: its number of waiting messages, its number of
        overdue messages, and the age of the oldest due message in seconds."""
        age = (now - what.oldest_due).total_seconds() if what.oldest_due else 0.0
        self.set(f"{kind}_waiting", what.count, **labels)
        self.set(f"{kind}_overdue", what.overdue, **labels)
        self.set(f"{kind}_oldest_due_age_seconds", max(age, 0.0), **labels)

    def line(self, place: Place, now: dt.datetime, /, **labels: str) -> None:
        """Set the gauges for an ordered stage: the number of its blocked messages,
        their size in bytes, the age of the oldest in seconds, the number of held keys,
        and whether the stage is full."""
        line = place.line
        age = (now - line.since).total_seconds() if line.since else 0.0
        self.set("stage_blocked", line.count, **labels)
        self.set("stage_blocked_bytes", line.size, **labels)
        self.set("stage_blocked_oldest_age_seconds", max(age, 0.0), **labels)
        self.set("stage_held_keys", line.held, **labels)
        self.set("stage_full", int(place.full_since is not None), **labels)


def install(registry: Any = None) -> None:
    """Count the events of this process from now on. A second call changes nothing.

    Raises ConfigurationError if prometheus-client is not installed.
    """
    global _installed
    if _installed:
        return
    client = _client()
    if _slot and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        values = _client("prometheus_client.values")
        # A process that this one forks counts for itself.
        values.ValueClass = values.MultiProcessValue(
            lambda: _slot if os.getpid() == _pid else os.getpid()
        )
    for one in _EVENTS:
        options: dict[str, Any] = {"registry": registry or client.REGISTRY}
        kind = client.Counter
        if one.buckets:
            kind, options["buckets"] = client.Histogram, one.buckets
        metric = kind(f"txmsg_{one.name}", one.text, one.labels, **options)
        one.signal.connect(_counting(one, metric), weak=False, dispatch_uid=one)
    _installed = True


def _counting(event: Event, metric: Any) -> Callable[..., None]:
    """Return a receiver that adds the signal's number to the metric."""
    known: set[str] = set()

    def count(**facts: Any) -> None:
        number = facts.get(event.number, 1)
        if number is None or number is False:
            return
        if facts.get("destination", "") not in known:
            if len(known) < MOST_DESTINATIONS:
                known.add(facts.get("destination", ""))
            else:
                facts["destination"] = "other"
        labels = [facts[one] for one in event.labels]
        child = metric.labels(*labels) if labels else metric
        (child.observe if event.buckets else child.inc)(number)

    return count


def uninstall() -> None:
    """Stop counting, and discard the metrics. For tests."""
    global _installed
    for one in _EVENTS:
        one.signal.disconnect(dispatch_uid=one)
    _installed = False


class Collector:
    """Reads the figures of all databases in use, at each scrape."""

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that the registry does not query the database when it
        registers this collector."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of all figures."""
        picture = status.read()
        gauges = Gauges(_client("prometheus_client.core").GaugeMetricFamily)
        now = picture.now
        ordered = {one.name for one in all_stages() if one.ordered}
        for place in picture.destinations.values():
            labels = {"destination": place.name, "database": place.database}
            gauges.waiting("outbox", place.waiting, now, **labels)
            gauges.set("outbox_dead", place.dead, **labels)
            gauges.set("outbox_muted", place.muted, **labels)
        for place in picture.stages.values():
            labels = {"stage": place.name, "database": place.database}
            gauges.waiting("redelivery", place.waiting, now, **labels)
            gauges.set("stage_dead", place.dead, **labels)
            gauges.set("stage_muted", place.muted, **labels)
            gauges.set("stage_paused", int(place.paused_at is not None), **labels)
            if place.line.count or place.name in ordered:
                gauges.line(place, now, **labels)
            if place.known:
                gauges.set("stage_workers", place.workers, **labels)
        for waiting in picture.queues.values():
            labels = {"destination": waiting.name, "database": waiting.database}
            gauges.waiting("queue", waiting, now, **labels)
        for waiting in picture.deadlines.values():
            labels = {"service": waiting.name, "database": waiting.database}
            gauges.waiting("deadline", waiting, now, **labels)
        for flow in picture.runs:
            labels = {"flow": flow.flow, "service": flow.service,
                      "database": flow.database}  # fmt: skip
            gauges.set("flow_open", flow.open, **labels)
            gauges.set("flow_undoing", flow.undoing, **labels)
            gauges.set("flow_undo_stuck", flow.stuck, **labels)
        overdue = {(one.name, one.alias): 0 for one in recurring()}
        for timing in picture.late_ticks:  # also those that were made at run time
            if timing.recurring is not None:
                overdue[timing.name, timing.recurring.alias] = 1
        for (name, alias), value in overdue.items():
            gauges.set("recurring_overdue", value, name=name, database=alias)
        present = picture.attendance
        kinds, service = Counter(one.kind for one in present.own), conf.get().SERVICE
        for kind in ("relay", "consumer"):
            gauges.set("workers", kinds[kind], kind=kind, service=service)
        for worker in [*present.living, *present.lost]:
            age = (now - worker.heartbeat_at).total_seconds()
            gauges.set("worker_heartbeat_age_seconds", age, worker=worker.name)
        for one in present.outages:
            lasts = max((now - one.since).total_seconds(), 0.0)
            gauges.set("outage_seconds", lasts, kind=one.kind, name=one.name)
        for alias in [*picture.databases, *picture.with_only_queues]:
            away = int(alias in picture.unreadable)
            gauges.set("database_unreadable", away, database=alias)
        self._pipeline(gauges, now)
        yield from gauges.families.values()

    def _pipeline(self, gauges: Gauges, now: Any) -> None:
        """Add the alerts that `pipeline follow` has measured, if the pipeline's app is
        installed."""
        if not apps.is_installed("django_txmsg.spark"):
            return
        model = apps.get_model("txmsg_spark", "PipelineAlert")
        alerts = model._default_manager.using(router.db_for_write(model))
        for one in alerts.order_by("service", "name"):
            labels = {"alert": one.name, "service": one.service}
            gauges.set("pipeline_alert", int(one.firing), **labels)
            gauges.set("pipeline_value", one.value, **labels, unit=one.unit)
            gauges.set("pipeline_limit", one.bound, **labels, unit=one.unit)
            age = (now - one.checked_at).total_seconds()
            gauges.set("pipeline_checked_age_seconds", age, **labels)


@probe
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer a scrape with the figures of the databases and the counts of this process.
    With PROMETHEUS_MULTIPROC_DIR, the counts are those of all processes."""
    try:
        text = of_processes() + of_database()
    except ConfigurationError as error:
        return HttpResponse(f"{error}\n", status=501, content_type="text/plain")
    except (DatabaseError, InterfaceError) as error:
        return HttpResponse(
            f"The database does not answer: {type(error).__name__}.\n",
            status=503,
            content_type="text/plain",
        )
    return HttpResponse(text, content_type=_client().CONTENT_TYPE_LATEST)


def of_processes(folder: str | None = None) -> bytes:
    """Return counts in Prometheus's text format. If there is a folder, return the
    counts of all processes that use this folder. If there is none, return only the
    counts of this process. By default, the environment variable
    PROMETHEUS_MULTIPROC_DIR names the folder.

    Raises ConfigurationError if prometheus-client is not installed.
    """
    client = _client()
    folder = folder or os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    registry = client.REGISTRY
    if folder:
        registry = client.CollectorRegistry()
        multiprocess = _client("prometheus_client.multiprocess")
        multiprocess.MultiProcessCollector(registry, path=folder)
    text: bytes = client.generate_latest(registry)
    return text


def of_database() -> bytes:
    """Return the figures of the databases. Raises the database's errors. Raises
    ConfigurationError if prometheus-client is not installed."""
    client = _client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    text: bytes = client.generate_latest(registry)
    return text


def _client(name: str = "prometheus_client") -> Any:
    client = "prometheus_client"
    with needs("django_txmsg.metrics", "prometheus", client, error=ConfigurationError):
        return import_module(name)
