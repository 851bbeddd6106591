"""`listeners`: which stages are expected to receive from topics, and which no longer
are. Does not start Spark."""

from __future__ import annotations

import argparse
import datetime as dt

from ... import wire
from ..errors import UsageError
from ..lake import Lake
from ..lakefile import rows_of
from ..results import result_struct
from ..runs import Run
from ..spec import JobSpec
from ..transforms.reconcile import EXPECTED
from .outcome import Outcome
from .places import EVER, Listener, known_listeners

_NAMES = EXPECTED.fieldNames()


def run_listeners(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """List the listeners that the lake knows, or record that one no longer listens.
    Raises UsageError if it is not a listener of a topic."""
    found = _noted(spec)
    if given.retire is None:
        lines = [
            f"{one.destination} at {one.consumer}: {_interval(one)}" for one in found
        ]
        facts = [dict(zip(_NAMES, _texts(one), strict=True)) for one in found]
        run.rows = len(found)
        return Outcome(lines, {"listeners": facts})
    destination, consumer = given.retire
    if not wire.is_topic(destination) or "/" not in consumer:
        raise UsageError(
            f"{consumer!r} at {destination!r} is no listener: give a topic such as "
            "topic:orders.placed, and SERVICE/STAGE."
        )
    until = given.at or run.started_at
    own = [one for one in found if (one.destination, one.consumer) == (
        destination, consumer,
    )]  # fmt: skip
    ended = [
        Listener(destination, consumer, one.since, until)
        for one in own
        if one.until is None or one.until > until
    ]
    if not own:
        # It was never declared: what it has received shows since when it listened.
        ended = [Listener(destination, consumer, EVER, until)]
    if not given.dry_run:
        results = run.results(spec.lake_spec(), spec.service().service)
        rows = [dict(zip(_NAMES, _values(one), strict=True)) for one in ended]
        results.save_rows("subscriptions", EXPECTED, rows)
    run.rows = len(ended)
    would = "would be " if given.dry_run else "is "
    said = [f"{consumer} {would}expected to receive {_interval(one)}." for one in ended]
    return Outcome(said or [f"{consumer} is retired already."])


def _noted(spec: JobSpec) -> list[Listener]:
    table = Lake(spec.lake_spec()).table("subscriptions", result_struct(EXPECTED))
    rows = []
    for named in table.named():
        path = f"{table.root}/{named.path}"
        for batch in rows_of(table.files, path, _NAMES, lenient=True):
            rows += [
                Listener(*(row.get(name) for name in _NAMES))
                for row in batch.to_pylist()
            ]
    return known_listeners(rows)


def _values(one: Listener) -> tuple[str, str, dt.datetime, dt.datetime | None]:
    return one.destination, one.consumer, one.since, one.until


def _texts(one: Listener) -> list[str | None]:
    return [str(value) if value is not None else None for value in _values(one)]


def _interval(one: Listener) -> str:
    since = "ever" if one.since == EVER else f"{one.since:%Y-%m-%d %H:%M:%S}"
    until = f", until {one.until:%Y-%m-%d %H:%M:%S}" if one.until else ""
    return f"since {since}{until}"
