"""Problems that need an operator, worst first, as text for pages and terminals."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from .. import conf, wire
from . import databases
from .lengths import duration
from .status import Place, Status, consumers_of_queues, labelled
from .turns import at_least
from .waiting import DEPLOYED, Waiting, capped, total

#: Most places or processes that are named, and most that get a line of their own.
NAMED, LINES = 4, 8


Tone = Literal["bad", "warn"]


@dataclass(frozen=True)
class Alarm:
    """One problem. `what` is the problem, and `more` are its details.

    `table` is the name of the model whose list shows the problem. `query` selects the
    rows in that list.
    """

    what: str
    more: str
    tone: Tone = "bad"
    table: str = "worker"
    query: str = ""
    #: One of `conf.schema.KINDS`.
    kind: str = ""
    #: What distinguishes it from others of its kind, for as long as it lasts.
    about: str = ""
    #: The words of a database, a broker or an operator. They may name hosts and users,
    #: so alerts leave them out.
    words: str = ""

    def __str__(self) -> str:
        return f"{self.what}{self.more}{self.words}"


def of(status: Status) -> list[Alarm]:
    """Return all problems of a status, worst first."""
    return [
        replace(alarm, kind=kind)
        for kind, find, more in _FINDERS
        for alarm in _limited(list(find(status)), more)
    ]


def well(status: Status) -> bool:
    """Return True if a status has no problem."""
    return not of(status)


def _unreadable(status: Status) -> Iterator[Alarm]:
    for name, error in status.unreadable.items():
        first = error.partition("\n")[0]
        yield Alarm(
            f"Database {name} does not answer", ", and is not counted here.",
            about=name, words=f" {first}",
        )  # fmt: skip


def _read_only(status: Status) -> Iterator[Alarm]:
    for name in status.read_only:
        yield Alarm(
            f"Database {name} is read-only",
            ". Nothing can be stored, sent or processed until the connection leads to a"
            " server that accepts writes. Workers cannot write their heartbeats, so"
            " they may be missing here.",
            about=f"{name}/read-only",
        )  # fmt: skip


def _unconsumed_stages(status: Status) -> Iterator[Alarm]:
    unattended = status.unattended
    if not unattended:
        return
    if not status.attendance.consumed:
        yield Alarm(
            "No consumer is running.",
            " No stage is processed: start manage.py consume, or "
            "manage.py txmsg run.",
            about="consumer",
        )  # fmt: skip
        return
    many = len(unattended) > 1
    yield Alarm(
        f"No consumer runs {len(unattended)} stages" if many
        else f"No consumer runs stage {unattended[0]}",
        f": {listed(unattended)}." if many else ".",
        table="stagestate", about="consumer",
    )  # fmt: skip


def _outages(status: Status) -> Iterator[Alarm]:
    late = status.attendance.late_outages
    for one in status.attendance.outages:
        many = f", by {one.processes} processes" if one.processes > 1 else ""
        yield Alarm(
            f"{one.kind[:1].upper()}{one.kind[1:]} {one.name} cannot be used",
            f", for {duration(max(status.now - one.since, dt.timedelta()))}{many}.",
            tone="bad" if one in late else "warn", about=f"{one.kind} {one.name}",
            words=f" {one.error}",
        )  # fmt: skip


def _outbox(status: Status) -> Iterator[Alarm]:
    why = (
        "Does the broker answer? Run manage.py txmsg doctor."
        if status.attendance.relayed
        else "No relay is running: start manage.py relay, or manage.py txmsg run."
    )
    late = {name: one.waiting for name, one in status.destinations.items()}
    return _overdue(
        status.outbox, status.now, "message in the outbox is overdue",
        "messages in the outbox are overdue", f", to {_late(late)}. {why}",
        table="outboxmessage", query="?state=overdue", about="outbox",
    )  # fmt: skip


def _unrelayed(status: Status) -> Iterator[Alarm]:
    for name, waiting in status.unrelayed.items():
        if name == conf.get().SERVICE:
            continue  # another alarm says so
        yield from _overdue(
            waiting, status.now,
            f"message of service {name} waits, and no relay of {name} is running",
            f"messages of service {name} wait, and no relay of {name} is running",
            ". Start one. If this service was called "
            f'{name} before, add the name to TXMSG["FORMER_SERVICES"].',
            table="outboxmessage", query="?state=overdue", about=name,
        )  # fmt: skip


def _queues(status: Status) -> Iterator[Alarm]:
    consumed = consumers_of_queues()
    strange = [
        label
        for label, one in status.queues.items()
        if one.overdue and one.name not in consumed and not wire.is_control(one.name)
    ]
    unknown = f" No stage here consumes {listed(strange)}." if strange else ""
    return _overdue(
        status.queued, status.now,
        "message in the embedded broker waits to be consumed",
        "messages in the embedded broker wait to be consumed",
        f", in {_late(status.queues)}.{unknown}",
        table="outboxmessage", query="#queues", about="queues",
    )  # fmt: skip


def _redeliveries(status: Status) -> Iterator[Alarm]:
    late = {name: one.waiting for name, one in status.stages.items()}
    strange = [
        label
        for label, one in status.stages.items()
        if one.waiting.overdue and not one.known and not one.workers
    ]
    unknown = f" No stage here is called {listed(strange)}." if strange else ""
    return _overdue(
        status.parked, status.now, "redelivery is overdue", "redeliveries are overdue",
        f", of {_late(late)}.{unknown}",
        table="inboxmessage", query="?state=overdue", about="redeliveries",
    )  # fmt: skip


def _late_ticks(status: Status) -> Iterator[Alarm]:
    for one in status.late_ticks:
        assert one.row is not None  # else it is not overdue
        last = duration(status.now - one.row.last_tick)
        yield Alarm(
            f"The recurring message {one.name} was not stored when it was due",
            f": no tick was stored for {last}. Only a relay in which it is declared "
            f"stores it; the relay's log says why it could not.",
            table="schedule", about=one.name,
        )  # fmt: skip


def _deadlines(status: Status) -> Iterator[Alarm]:
    return _overdue(
        total(status.deadlines.values()), status.now,
        "deadline of flows has passed, and the time-out message is not stored",
        "deadlines of flows have passed, and the time-out messages are not stored",
        f", of service {_late(status.deadlines)}. Only a relay of the service in which "
        "the flow is declared stores them.",
        about="deadlines",
    )  # fmt: skip


def _stuck(status: Status) -> Iterator[Alarm]:
    for one in [flow for flow in status.runs if flow.stuck]:
        yield Alarm(
            _many(one.stuck, f"run of flow {one.flow} is",
                  f"runs of flow {one.flow} are") + " stuck at an undo",
            f", of {capped(one.undoing)} that are undoing their work. Redeliver its "
            f"dead letter. Discard it only if its reason is undo_in_doubt.",
            table="run", query=f"?state=undo+stuck&flow={quote(one.flow, safe='')}",
            about=one.flow,
        )  # fmt: skip


def _left_behind(status: Status) -> Iterator[Alarm]:
    for place in status.stages.values():
        newer, stage = place.newer, place.label
        if newer is None or newer.since is None:
            continue
        age = status.now - newer.since
        if age <= DEPLOYED:
            continue
        yield Alarm(
            _many(newer.count, f"message of stage {stage} needs",
                  f"messages of stage {stage} need") + " newer code",
            f": {newer.type} version {newer.version}, for {duration(age)}. Deploy it; "
            f"or, after a roll-back, bury these messages.",
            table="inboxmessage", query="?state=newer", about=stage,
        )  # fmt: skip


def _full(status: Status) -> Iterator[Alarm]:
    for place in status.stages.values():
        if place.full_since is None:
            continue
        since = duration(status.now - place.full_since)
        yield Alarm(
            f"Stage {place.label} receives nothing",
            f" since {since}: {capped(place.line.count)} messages wait there for the "
            f"ones before them, of {at_least(place.line)}. Resolve the blocked keys, "
            f'or raise TXMSG["ORDER_MAX_WAITING"] or ["ORDER_MAX_BYTES"].',
            table="inboxmessage", query="?state=blocked", about=place.label,
        )  # fmt: skip


def _held_keys(status: Status) -> Iterator[Alarm]:
    for one in status.held_keys:
        since = duration(status.now - one.since)
        yield Alarm(
            _many(one.count, f"message of key {one.key!r} waits",
                  f"messages of key {one.key!r} wait") + f" at stage {one.stage}",
            f" for {one.waits_for}, {one.why}, since {since}. To let the key go on "
            "without it: manage.py order let_go.",
            table="inboxmessage", query="?state=blocked",
            about=f"{one.stage} {one.key!r}",
        )  # fmt: skip


def _lost(status: Status) -> Iterator[Alarm]:
    for one in status.attendance.lost:
        ago = duration(status.now - one.heartbeat_at)
        yield Alarm(
            f"The {one.kind} on {one.host} (process {one.pid}) is silent",
            f": its last heartbeat was {ago} ago.",
            about=one.name,
        )  # fmt: skip


def _dead(status: Status) -> Iterator[Alarm]:
    if not status.dead:
        return
    oldest = status.oldest_dead
    since = f", the oldest {duration(status.now - oldest)} ago" if oldest else ""
    what = f"{status.dead:,} dead letter{'s' * (status.dead != 1)}"
    yield Alarm(what, f"{since}{_in(status)}.", table="deadletter")


def _in(status: Status) -> str:
    """Return the number of dead letters in each database, as text. If all of them are
    in the outbox's own database, return ""."""
    found: Counter[str] = Counter()
    for place in [*status.stages.values(), *status.destinations.values()]:
        found[place.database] += place.dead
    found = +found  # those with dead letters
    if found.keys() <= {status.databases[0]}:
        return ""
    return "; " + ", ".join(f"{n:,} in database {name}" for name, n in found.items())


def _no_relay(status: Status) -> Iterator[Alarm]:
    if not status.attendance.relayed and not status.outbox.overdue:
        sent = "Messages are sent right after their commit; failed ones are not retried"
        if none := conf.get().DISPATCH_ON_COMMIT == "off":
            sent = "No message is sent"
        yield Alarm(
            "No relay is running.",
            f" {sent}: start manage.py relay, or manage.py txmsg run.",
            tone="bad" if none else "warn", about="relay",
        )  # fmt: skip


def _unconsumed(status: Status) -> Iterator[Alarm]:
    for name, meant in status.unconsumed.items():
        if any(one.name == name and one.overdue for one in status.queues.values()):
            continue  # another alarm says so, in more detail
        yield Alarm(
            f"No stage here consumes {name}",
            f", to which messages go. Was {meant} meant?" if meant else ", and "
            'TXMSG["KNOWN_DESTINATIONS"] names no other consumer.',
            tone="warn", table="outboxmessage",
            query=f"?destination={quote(name, safe='')}", about=name,
        )  # fmt: skip


def _not_judged(status: Status) -> Iterator[Alarm]:
    # _abandoned() reports their messages.
    gone = [one for one in status.subscriptions if one.abandoned]
    without = {labelled(one.queue, one.database) for one in gone}
    since = {
        label: one.not_judged_since
        for label, one in status.queues.items()
        if one.not_judged_since and status.now - one.not_judged_since > DEPLOYED
        if label not in without
    }
    if since:
        yield Alarm(
            "Messages wait in queues that no stage here consumes",
            f", the oldest for {duration(status.now - min(since.values()))}: "
            f"{listed([*since])}. Does another service consume them?",
            tone="warn", table="outboxmessage", query="#queues", about="queues",
        )  # fmt: skip


def _paused(status: Status) -> Iterator[Alarm]:
    for place in sorted(status.stages.values(), key=lambda one: one.name):
        if place.paused_at is not None:
            yield Alarm(
                f"Stage {place.label} is paused.",
                _who(place, status.now - place.paused_at),
                tone="warn", table="stagestate", about=place.label,
                words=f" Why: {place.paused_why}" if place.paused_why else "",
            )  # fmt: skip


def _abandoned(status: Status) -> Iterator[Alarm]:
    brokers = databases.brokers_by_database()
    for one in [each for each in status.subscriptions if each.abandoned]:
        broker = brokers.get(one.database, "default")
        named = f" --broker {broker}" * (broker != "default")
        waiting = status.queues.get(labelled(one.queue, one.database), Waiting())
        yield Alarm(
            f"No stage here has the subscription {one.subscriber} any more",
            f": it keeps a copy of each message to {one.topic}, "
            f"{capped(waiting.count)} so far. If the stage is gone for good: manage.py "
            f"subscriptions remove {one.topic} {one.subscriber}{named}.",
            tone="warn", table="outboxmessage", query="#queues",
            about=labelled(f"{one.topic} {one.subscriber}", one.database),
        )  # fmt: skip


def _limited(found: list[Alarm], more: str) -> list[Alarm]:
    """Return the first LINES alarms, and one more alarm with the number of omitted
    alarms."""
    left = len(found) - LINES
    if left <= 0:
        return found
    first = found[0]
    query = "" if any(one.query != first.query for one in found) else first.query
    what = f"{left} more {more}"
    rest = replace(first, what=what, more=".", query=query, about="more")
    return [*found[:LINES], rest]


def _many(count: int, one: str, several: str) -> str:
    """Return a count with the words for one thing, or for several."""
    return f"{capped(count)} {one if count == 1 else several}"


def _overdue(
    waiting: Waiting, now: dt.datetime, one: str, several: str, more: str, **where: Any
) -> Iterator[Alarm]:
    """Yield an alarm if any of the messages is overdue. `one` and `several` are the
    words after their number, and `more` follows the age of the oldest."""
    if waiting.overdue:
        oldest = waiting.oldest_due
        since = f", the oldest for {duration(now - oldest)}" if oldest else ""
        yield Alarm(_many(waiting.overdue, one, several), f"{since}{more}", **where)


def _who(place: Place, age: dt.timedelta) -> str:
    more = ""
    if waiting := place.waiting.count:
        more = f"; {_many(waiting, 'redelivery waits', 'redeliveries wait')}"
    return f" By {place.paused_by or 'unknown'}, {duration(age)} ago{more}."


def _late(places: Mapping[str, Waiting]) -> str:
    """Return the names of the places with overdue messages, as text. The place with the
    most overdue messages comes first."""
    late = sorted(
        ((one.overdue, name) for name, one in places.items() if one.overdue),
        key=lambda pair: (-pair[0], pair[1]),
    )
    return listed([f"{name} ({capped(number)})" for number, name in late])


def listed(names: list[str], most: int = NAMED) -> str:
    """Return the first names as text, and the number of the others."""
    shown = ", ".join(names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown


#: Worst first: the kind, the function that finds the alarms, and the words for the
#: alarms that are only counted.
_FINDERS: tuple[tuple[str, Callable[[Status], Iterator[Alarm]], str], ...] = (
    ("database", _unreadable, "databases do not answer"),
    ("database", _read_only, "databases are read-only"),
    ("no-worker", _unconsumed_stages, ""),
    ("no-worker", _unrelayed, "services have no relay"),
    ("outage", _outages, "cannot be used"),
    ("overdue", _outbox, ""),
    ("overdue", _queues, ""),
    ("overdue", _redeliveries, ""),
    ("overdue", _late_ticks, "recurring messages were not stored when they were due"),
    ("overdue", _deadlines, ""),
    ("newer-code", _left_behind, "stages need newer code"),
    ("undo-stuck", _stuck, "flows have runs that are stuck at an undo"),
    ("order", _full, "stages receive nothing"),
    ("order", _held_keys, "keys wait: manage.py order list"),
    ("silent", _lost, "workers are silent"),
    ("dead", _dead, ""),
    ("no-worker", _no_relay, ""),
    ("unconsumed", _unconsumed, "destinations have no known consumer"),
    ("unconsumed", _not_judged, ""),
    ("paused", _paused, "stages are paused"),
    ("subscription", _abandoned, "subscriptions belong to no stage here"),
)
