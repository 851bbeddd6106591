"""A message's history from the tables: stored, dispatched, received, processed.

Each event shows the time since the event before, so that the slow step stands out.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..models import Attempt, DeadLetter, InboxMessage, OutboxMessage


@dataclass
class Event:
    """One event: where it happened, and how long after the event before."""

    at: dt.datetime
    what: str
    where: str
    detail: str = ""
    tone: str = "quiet"
    gap: dt.timedelta | None = None


def timeline(
    outbox: Iterable[OutboxMessage],
    inbox: Iterable[InboxMessage],
    attempts: Iterable[Attempt],
    letters: Iterable[DeadLetter],
) -> list[Event]:
    """Return all recorded events of one message, in order."""
    events: list[Event] = []
    stored = False
    for row in outbox:
        stored = True
        events += _of_outbox(row)
    rows = list(inbox)
    for received in rows:
        if received.created_at is not None and not stored:
            events.append(
                Event(received.created_at, "stored", received.service or "elsewhere")
            )
            stored = True
        events += _of_inbox(received)
    error = ""
    for attempt in sorted(attempts, key=lambda one: one.failed_at):
        known, error = error, attempt.exception.partition("\n")[0]
        events.append(
            Event(
                attempt.failed_at,
                f"attempt {attempt.number} failed",
                attempt.stage,
                "" if error == known else error,
                "bad",
            )
        )
    for letter in letters:
        events += _of_letter(letter)
    events.sort(key=lambda event: event.at)
    for before, after in itertools.pairwise(events):
        after.gap = after.at - before.at
    return events


def _of_outbox(row: OutboxMessage) -> Iterator[Event]:
    again = f"again, by {row.replay_id}" if row.replay_id else ""
    yield Event(row.created_at, "stored", row.destination, again)
    if row.due_at - row.created_at > dt.timedelta(seconds=1) and not row.attempts:
        yield Event(row.due_at, "due", row.destination, "it was stored with a delay")
    if row.dispatched_at is not None:
        detail = f"after {row.attempts} rejections" if row.attempts else ""
        yield Event(row.dispatched_at, "dispatched", row.destination, detail, "good")
    if row.cancelled_at is not None:
        why = row.last_error.partition(": ")[2]
        yield Event(row.cancelled_at, "cancelled", row.destination, why)
    elif row.dead_at is not None:
        yield Event(row.dead_at, "given up", row.destination, row.last_error, "bad")


def _of_inbox(row: InboxMessage) -> Iterator[Event]:
    yield Event(row.first_received_at, "received", row.stage)
    if row.deliveries > 1:
        yield Event(
            row.last_received_at,
            f"received copy {row.deliveries}",
            row.stage,
            "",
            "warn",
        )
    if row.started_at is not None and row.attempts > 1:
        yield Event(row.started_at, f"attempt {row.attempts} began", row.stage)
    if row.processed_at is not None:
        yield Event(row.processed_at, "processed", row.stage, "", "good")
    if row.due_at is not None:
        yield Event(row.due_at, "next attempt", row.stage, "", "warn")


def _of_letter(letter: DeadLetter) -> Iterator[Event]:
    where = letter.stage or letter.destination
    times = f", death {letter.deaths}" if letter.deaths > 1 else ""
    yield Event(letter.created_at, "buried", where, f"{letter.reason}{times}", "bad")
    if letter.resolved_at is not None:
        by = f"by {letter.resolved_by}" if letter.resolved_by else ""
        yield Event(letter.resolved_at, letter.resolution, where, by, "good")
