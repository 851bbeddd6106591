"""Finds the stages that listen to topics. The job `listeners` lists and retires them.

Listeners come from three sources: the messages in the logs, the lake's table
`subscriptions`, and the stages that services declare. There are few of them, so this is
plain Python without Spark.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pyspark.sql import DataFrame

from ... import wire
from ..batchlog import is_mounted
from ..errors import UsageError
from ..lake import Lake
from ..lakefile import rows_as
from ..results import result_struct
from ..runs import Run
from ..spec import JobSpec, Subscription
from ..tally import Line
from ..transforms import EPOCH, MICROSECOND, instant
from ..transforms.journeys import EXPECTED, PROMPT
from ..transforms.reconcile import places

#: The beginning, for a stage that its service has declared since the first run.
EVER = EPOCH
#: What is older does not show that a stage listens again: an operator may have retired
#: it later, with an earlier time.
RECENT = dt.timedelta(days=3)


@dataclass(frozen=True)
class Place:
    """The messages of one sender to one destination that were received by one service,
    with their transit times."""

    destination: str
    #: A topic's listener, or empty.
    consumer: str
    sender: str
    receiver: str
    first_at: dt.datetime
    last_at: dt.datetime
    #: When the first and the last message were sent. They may have been received long
    #: after that.
    sent_from: dt.datetime
    sent_at: dt.datetime
    messages: int
    least_us: int
    median_us: int


@dataclass(frozen=True)
class Listener:
    """A stage that listens to a topic from `since` until `until`. `until` is None if
    the stage still listens."""

    destination: str
    consumer: str
    since: dt.datetime
    until: dt.datetime | None = None


@dataclass(frozen=True)
class Listeners:
    """The listeners of all topics, sorted. New ones are also listed separately."""

    expected: list[Listener]
    #: To be noted in the lake.
    fresh: list[Listener]


def read_places(steps: DataFrame) -> list[Place]:
    """Compute the places of these steps and return them as objects."""
    found = places(steps).fillna("").fillna(0)
    return [Place(**row) for row in found.toArrow().to_pylist()]


def counted_places(lines: Iterable[Line]) -> list[Place]:
    """Return the consumers that received messages of topics, as Place objects. `lines`
    are counts from the footers of files. The counts contain no transit times."""
    return [
        Place(
            line.destination, line.consumer, line.sender or "",
            line.consumer.partition("/")[0],
            instant(line.first_us), instant(line.last_us),
            instant(line.first_us), instant(line.last_us),
            0, 0, 0,
        )
        for line in lines
        if line.consumer and wire.is_topic(line.destination)
    ]  # fmt: skip


def listeners(
    known: Iterable[Listener],
    found: Iterable[Place],
    declared: Sequence[Subscription],
    now: dt.datetime,
    ran: Collection[str] = (),
) -> Listeners:
    """Return the stages that are expected to receive from topics, each with the
    interval in which it listens. `known` are the listeners that earlier runs recorded.
    `found` are the receivers in the logs. `declared` are the stages that services
    declare now. `ran` are the services whose earlier runs have recorded all listeners.

    A stage in the logs listens from its first message. A newly declared stage listens
    from now if an earlier run has recorded a listener of its service. If no run has,
    and the stage replaces another stage, it listens from the time when that other stage
    has stopped and received its last message. If it replaces none, it listens from now
    if its service is one of `ran`, and otherwise from the beginning. A stage that is
    declared again also listens from the time when the stage that it replaces has done
    so. If it replaces none, it listens from now.

    A stage that is no longer declared stops listening now, or when the stage that
    replaces it receives its first message. It stopped at its last message if no run has
    recorded it, or if the stage that replaces it has listened before. A stage that was
    retired by hand listens again from the last message that it received, if that one
    was sent more than PROMPT after its end, and is RECENT.
    """
    intervals: dict[_Pair, dict[dt.datetime, dt.datetime | None]] = {}
    for one in known_listeners(known):
        intervals.setdefault((one.destination, one.consumer), {})[one.since] = one.until
    noted = {_service(one) for one in intervals}
    received = _received(found)
    stages = {
        (one.destination, f"{one.service}/{one.stage}")
        for one in declared
        if wire.is_topic(one.destination)
    }
    declaring = {one.service for one in declared}
    fresh: list[Listener] = []
    gone = {
        one
        for one in (intervals.keys() | received.keys()) - stages
        if _service(one) in declaring
    }
    new = {one for one in stages if None not in intervals.get(one, {}).values()}
    ended: dict[_Pair, dt.datetime] = {}
    for pair in sorted(gone):
        ends = intervals.setdefault(pair, {})
        last = max(received[pair][:2]) + MICROSECOND if pair in received else EVER
        heirs = [
            # The first message of a stage that comes back is older than its return.
            EVER if one in intervals else received.get(one, (now,))[0]
            for one in new
            if _same(one, pair)
        ]
        for since in [one for one, until in ends.items() if until is None]:
            ended[pair] = ends[since] = max(since, last, min([now, *heirs]))
            fresh.append(Listener(*pair, since, ended[pair]))
        if not ends:
            ends[received[pair][0]] = last
            if _service(pair) not in noted:
                ended[pair] = last
    for pair in sorted(new):
        since = now
        if pair in intervals or _service(pair) not in noted:
            # What was sent to the former stage may have been due later.
            before = [
                max(at, *received.get(one, (at,)))
                for one, at in ended.items()
                if _same(one, pair)
            ]
            known_by_now = pair in intervals or _service(pair) in ran
            since = max(before, default=now if known_by_now else EVER)
        intervals.setdefault(pair, {})[since] = None
        fresh.append(Listener(*pair, since))
    for pair, (first, last, _) in received.items():
        ends = intervals.setdefault(pair, {first: None})
        earliest = min(ends)
        if first < earliest:
            ends[first] = ends.pop(earliest)
        until = [at for at in ends.values() if at is not None]
        still = last - max(until, default=last) > PROMPT and now - last < RECENT
        # Old code may run for a while after its service declared something else.
        if still and None not in ends.values() and pair not in gone:
            ends[last] = None
            fresh.append(Listener(*pair, last))
    expected = [
        Listener(*pair, since, until)
        for pair, ends in sorted(intervals.items())
        for since, until in _apart(ends)
    ]
    return Listeners(expected, fresh)


def known_listeners(rows: Iterable[Listener]) -> list[Listener]:
    """Return each recorded interval only once. For an interval that has ended, the lake
    has two rows: one without and one with its end."""
    ends: dict[tuple[str, str, dt.datetime], dt.datetime | None] = {}
    for one in rows:
        key = one.destination, one.consumer, one.since
        before = ends.get(key)
        ends[key] = min(filter(None, (one.until, before)), default=None)
    return [Listener(*key, ends[key]) for key in sorted(ends)]


_Pair = tuple[str, str]


def _service(pair: _Pair) -> str:
    return pair[1].partition("/")[0]


def _same(one: _Pair, other: _Pair) -> bool:
    """Return whether two listeners have the same topic and the same service."""
    return one[0] == other[0] and _service(one) == _service(other)


_Times = tuple[dt.datetime, dt.datetime, dt.datetime]


def _received(found: Iterable[Place]) -> dict[_Pair, _Times]:
    """Return when each listener received its first message, and when its last message
    was sent and received. The stage may no longer have listened when it received that
    message."""
    received: dict[_Pair, _Times] = {}
    for place in found:
        if place.consumer:
            pair = (place.destination, place.consumer)
            times = place.first_at, place.sent_at, place.last_at
            first, sent, last = received.get(pair, times)
            received[pair] = (
                min(first, place.first_at), max(sent, place.sent_at),
                max(last, place.last_at),
            )  # fmt: skip
    return received


def _apart(
    ends: dict[dt.datetime, dt.datetime | None],
) -> list[tuple[dt.datetime, dt.datetime | None]]:
    """Return the intervals, sorted. Intervals that overlap or touch are merged into
    one."""
    apart: list[tuple[dt.datetime, dt.datetime | None]] = []
    for since in sorted(ends):
        until = ends[since]
        if apart and (apart[-1][1] is None or since <= apart[-1][1]):
            before, end = apart.pop()
            until = None if end is None or until is None else max(end, until)
            since = before
        apart.append((since, until))
    return apart


def listeners_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """List the listeners in the lake, or record that a stage no longer listens. Raises
    UsageError if the stage is not a listener, or if its service declares its stages and
    no run has recorded this one."""
    is_mounted(spec)
    found = kept_listeners(Lake(spec.lake_spec()))
    if given.retire is None:
        run.rows = len(found)
        run.lines += [
            f"{one.destination} at {one.consumer}: {_interval(one)}" for one in found
        ]
        run.facts["listeners"] = list(map(asdict, found))
        return
    pair = destination, consumer = tuple(given.retire)
    if not wire.is_topic(destination) or "/" not in consumer:
        raise UsageError(
            f"{consumer!r} at {destination!r} is no listener: give a topic such as "
            "topic:orders.placed, and SERVICE/STAGE."
        )
    until = given.at or run.started_at
    own = [one for one in found if (one.destination, one.consumer) == pair]
    ended = [
        replace(one, until=until)
        for one in own
        if one.until is None or one.until > until
    ]
    would = "would be" if given.dry_run else "is"
    run.lines += [
        f"{consumer} {would} expected to receive {_interval(one)}." for one in ended
    ]
    if not own:
        unknown = f"No run has recorded that {consumer} receives from {destination}."
        if _service(pair) in {one.service for one in spec.subscriptions}:
            raise UsageError(
                f"{unknown} Its service declares its stages, so `reconcile` notices "
                "without --retire when one is gone."
            )
        run.lines.append(
            f"{unknown} It {would} expected to receive nothing from "
            f"{until:%Y-%m-%d %H:%M:%S} UTC on."
        )
        # What it has received shows since when it listened.
        ended = [Listener(destination, consumer, until, until)]
    if not given.dry_run:
        results = run.results(spec.lake_spec(), spec.service().service)
        results.save_rows("subscriptions", EXPECTED, list(map(asdict, ended)))
    run.rows = len(ended)
    if not ended:
        run.lines.append(f"{consumer} is retired already.")


def kept_listeners(lake: Lake) -> list[Listener]:
    """Return the topic listeners that earlier runs have recorded. Does not use
    Spark."""
    table = lake.table("subscriptions", result_struct(EXPECTED))
    known = []
    for batch in rows_as(table.files, table.root, EXPECTED, table.named()):
        for row in batch.to_pylist():
            service, _, stage = row["consumer"].partition("/")
            row["consumer"] = f"{lake.spec.former.get(service, service)}/{stage}"
            known.append(Listener(**row))
    return known_listeners(known)


def _interval(one: Listener) -> str:
    since = "ever" if one.since == EVER else f"{one.since:%Y-%m-%d %H:%M:%S} UTC"
    until = f", until {one.until:%Y-%m-%d %H:%M:%S} UTC" if one.until else ""
    return f"since {since}{until}"
