"""How messaging is doing: counts and oldest ages of every state, in few queries.

What the overview, `manage.py message_status`, the health view and the metrics all say.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass, field

from ..brokers import find_broker
from ..models import StageState
from ..models.fields import clock
from ..models.queue import queue_name
from ..stages import all_stages
from . import attendance, outages, recent, subscriptions, turns
from .attendance import Attendance
from .outages import Known
from .subscriptions import Subscription
from .turns import HeldKey, Line
from .unconsumed import unconsumed
from .waiting import (
    CAP,
    DEPLOYED,
    NeedsNewerCode,
    Waiting,
    for_newer_code,
    in_inbox,
    in_outbox,
    in_queues,
    total,
)


@dataclass
class Place:
    """A destination or a stage: waiting and dead messages, and the last activity."""

    name: str
    waiting: Waiting = field(default_factory=Waiting)
    dead: int = 0
    oldest_dead: dt.datetime | None = None
    muted: int = 0
    last: dt.datetime | None = None
    processing: float | None = None
    critical: float | None = None
    paused_at: dt.datetime | None = None
    paused_by: str = ""
    paused_why: str = ""
    newer: NeedsNewerCode | None = None
    """What waits for code of a newer version."""
    line: Line = field(default_factory=Line)
    """The messages that wait for the ones before them, at an ordered stage."""
    full_since: dt.datetime | None = None
    """Since when the stage has been receiving nothing, as too many of them wait."""
    known: bool = True
    """Whether the stage is declared here."""
    workers: int = 0
    """The living processes that run the stage."""
    consumers: list[str] = field(default_factory=list)
    """The stages declared here that consume the destination."""


@dataclass
class Status:
    """The whole picture at one instant of the database's clock."""

    now: dt.datetime
    destinations: dict[str, Place] = field(default_factory=dict)
    services: dict[str, Waiting] = field(default_factory=dict)
    """The pending messages by the service that stored them; "" are of an earlier
    release."""
    stages: dict[str, Place] = field(default_factory=dict)
    queues: dict[str, Waiting] = field(default_factory=dict)
    unconsumed: dict[str, str] = field(default_factory=dict)
    """The destinations that nobody is known to consume, each with the name that was
    perhaps meant."""
    subscriptions: list[Subscription] = field(default_factory=list)
    held_keys: list[HeldKey] = field(default_factory=list)
    """The keys of ordered stages whose messages have been waiting for too long."""
    attendance: Attendance = field(init=False)

    def __post_init__(self) -> None:
        self.attendance = Attendance(self.now, [])

    @property
    def outbox(self) -> Waiting:
        """All pending messages."""
        return total(place.waiting for place in self.destinations.values())

    @property
    def parked(self) -> Waiting:
        """All messages that wait for another attempt of their stage."""
        return total(place.waiting for place in self.stages.values())

    @property
    def queued(self) -> Waiting:
        """All messages in the embedded broker's queues."""
        return total(self.queues.values())

    @property
    def dead(self) -> int:
        """All open dead letters whose error is not muted."""
        return sum(place.dead for place in self._places)

    @property
    def muted(self) -> int:
        """All open dead letters of muted errors."""
        return sum(place.muted for place in self._places)

    @property
    def dead_capped(self) -> bool:
        """Whether there are more open dead letters, muted or not, than were counted."""
        return self.dead + self.muted > CAP

    @property
    def oldest_dead(self) -> dt.datetime | None:
        """Since when there have been open dead letters that are not muted; None where
        there are more of them than were counted."""
        if self.dead_capped:
            return None
        found = (place.oldest_dead for place in self._places if place.oldest_dead)
        return min(found, default=None)

    @property
    def overdue(self) -> int:
        """All messages that should have gone on by now."""
        return self.outbox.overdue + self.parked.overdue + self.queued.overdue

    @property
    def outages(self) -> list[Known]:
        """What living processes cannot use."""
        return outages.read(self.attendance.living)

    @property
    def late_outages(self) -> list[Known]:
        """The outages that last for too long."""
        return outages.late(self.outages, self.now)

    @property
    def unattended(self) -> list[str]:
        """The stages declared here that no living process runs."""
        declared = [name for name, place in self.stages.items() if place.known]
        return self.attendance.unattended(declared)

    @property
    def unrelayed(self) -> dict[str, Waiting]:
        """Services with overdue messages in the outbox of which no relay is running."""
        relayed = self.attendance.relayed_services
        return {
            name: waiting
            for name, waiting in self.services.items()
            if name and waiting.overdue and name not in relayed
        }

    @property
    def paused(self) -> list[Place]:
        """The stages that an operator holds."""
        return [place for place in self.stages.values() if place.paused_at]

    @property
    def full(self) -> list[Place]:
        """The ordered stages that receive nothing, as too many messages wait there."""
        return [place for place in self.stages.values() if place.full_since]

    @property
    def left_behind(self) -> list[Place]:
        """The stages with messages that have been waiting for newer code for longer
        than a deployment takes."""
        return [
            place
            for place in self.stages.values()
            if place.newer and place.newer.since
            if self.now - place.newer.since > DEPLOYED
        ]

    @property
    def abandoned(self) -> list[Subscription]:
        """The subscriptions of this service's stages that are here no longer."""
        return [one for one in self.subscriptions if one.abandoned]

    @property
    def oldest_due(self) -> dt.datetime | None:
        """Since when the oldest message that should go on has been due."""
        ages = (self.outbox, self.parked, self.queued)
        return min((one.oldest_due for one in ages if one.oldest_due), default=None)

    @property
    def lag(self) -> dt.timedelta:
        """How long the oldest due message has been waiting."""
        oldest = self.oldest_due
        return max(self.now - oldest, dt.timedelta()) if oldest else dt.timedelta()

    @property
    def well(self) -> bool:
        """Whether nobody needs to do anything: nothing is late or dead, and everybody
        is at work who has to be."""
        return self.attendance.relayed and not (
            self.overdue
            or self.dead
            or self.attendance.lost
            or self.unattended
            or self.unconsumed
            or self.paused
            or self.abandoned
            or self.left_behind
            or self.held_keys
            or self.full
            or self.late_outages
        )

    @property
    def _places(self) -> list[Place]:
        return [*self.stages.values(), *self.destinations.values()]


def read(using: str = "default") -> Status:
    """Return the whole picture, in thirteen queries."""
    status = Status(now=clock(using))
    states = list(StageState.objects.using(using))
    held = {state.stage: state for state in states if state.paused_at is not None}
    for name, waiting in in_outbox(using).items():
        _place(status.destinations, name).waiting = waiting
    status.services = in_outbox(using, by="service")
    elsewhere = set()  # tasks, say, for Celery's workers
    for name, (last, alias) in recent.last_dispatched(using).items():
        _place(status.destinations, name).last = last
        broker = find_broker(alias)
        if broker is not None and not broker.consumable:
            elsewhere.add(name)
    for declared in all_stages():
        _place(status.stages, declared.name)
        if declared.destination in status.destinations:
            consumed = status.destinations[declared.destination]
            consumed.consumers.append(declared.name)
    status.unconsumed = unconsumed(
        {
            name: place.last
            for name, place in status.destinations.items()
            if not place.consumers and name not in elsewhere
        },
        [declared.destination for declared in all_stages()],
        status.now,
    )
    for name, waiting in in_inbox(using).items():
        _place(status.stages, name).waiting = waiting
    for name, newer in for_newer_code(using).items():
        _place(status.stages, name).newer = newer
    for name, line in turns.lines(using).items():
        _place(status.stages, name).line = line
    if any(place.line.held for place in status.stages.values()):
        status.held_keys = turns.held(using)
    for state in states:
        if state.full_since is not None:
            _place(status.stages, state.stage).full_since = state.full_since
    for name, last, processing, critical in recent.last_processed(using):
        place = _place(status.stages, name)
        place.last, place.processing, place.critical = last, processing, critical
    for stage, destination, dead, oldest, muted in recent.open_dead_letters(using):
        places, name = (
            (status.stages, stage) if stage else (status.destinations, destination)
        )
        place = _place(places, name)
        place.dead += dead
        place.muted += muted
        place.oldest_dead = min(filter(None, (place.oldest_dead, oldest)), default=None)
    for state in held.values():
        place = _place(status.stages, state.stage)
        place.paused_at, place.paused_by = state.paused_at, state.paused_by
        place.paused_why = state.paused_why
    status.attendance = attendance.read(using, status.now)
    known = {declared.name for declared in all_stages()}
    serving = status.attendance.serving
    for name, place in status.stages.items():
        place.known = name in known
        place.workers = serving[name]
    status.queues = in_queues(using, held_queues(held))
    status.subscriptions = subscriptions.read(using, status.attendance.living)
    return status


def consumers_of_queues() -> dict[str, list[str]]:
    """Return the embedded broker's queues that stages declared here consume, each with
    its stages."""
    found: dict[str, list[str]] = {}
    for one in all_stages():
        queue = queue_name(one.destination, one.subscriber)
        found.setdefault(queue, []).append(one.name)
    return found


def held_queues(paused: Collection[str]) -> set[str]:
    """Return the queues that wait for a resumed stage: all of theirs are paused."""
    return {
        queue
        for queue, stages in consumers_of_queues().items()
        if all(name in paused for name in stages)
    }


def _place(places: dict[str, Place], name: str) -> Place:
    return places.setdefault(name, Place(name))
