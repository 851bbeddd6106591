"""The counts of the last 24 hours, of messages that stages have processed."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from django_txmsg.envelope.message import Message
from django_txmsg.models import InboxMessage
from django_txmsg.monitoring import periods, status
from tests.forgetting import forget_counts
from tests.running import committing, declared, put, step, txmsg

pytestmark = committing


@pytest.mark.parametrize("mode", ["outbox", "none", "broker_only"])
def test_message_that_waited_or_ran_for_hours_is_counted(mode: Any) -> None:
    """A message that was received long before its end is counted in the hour of its
    end. The first attempt here takes long, and then the message waits."""
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        if len(runs) == 1:
            raise ValueError

    with txmsg(), declared(handler, transaction=mode) as stage:
        put(stage.destination)
        step(stage)
        received = timezone.now() - dt.timedelta(hours=3)
        InboxMessage.objects.update(last_received_at=received)
        periods.remember("default", timezone.now())  # from now on, only this is counted
        step(stage)

        forget_counts()
        now = timezone.now()
        hours = periods.last_day(now, "default")
        assert (runs, sum(one.counts["processed"] for one in hours)) == ([1, 2], 1)
        last = status.read().stages[stage.name].last
        assert last is not None
        assert now - last < dt.timedelta(minutes=1)


def test_only_a_message_that_ended_much_later_has_an_index_entry_for_it() -> None:
    with txmsg(), declared(lambda message: None) as stage:
        put(stage.destination)
        step(stage)

    row = InboxMessage.objects.get()
    assert row.processed_at is not None
    assert row.late_at is None


def count(now: dt.datetime) -> int:
    hours = periods.last_day(now, "default")
    return sum(one.counts["processed"] for one in hours)


def test_periods_that_a_clock_stored_too_early_are_counted_again() -> None:
    """The database's clock was three hours ahead, and is set back."""
    with txmsg(), declared(lambda message: None) as stage:
        put(stage.destination)
        step(stage)
        periods.remember("default", timezone.now() + dt.timedelta(hours=3))
        put(stage.destination)
        step(stage)
        forget_counts()
        periods.remember("default", timezone.now())
        assert count(timezone.now()) == 2


def test_periods_that_a_clock_cached_too_early_are_counted_again() -> None:
    """The database's clock was half an hour ahead, and is set back. No worker stores
    the counts."""
    hour = timezone.now().replace(minute=0, second=0) + dt.timedelta(hours=1)
    with txmsg(), declared(lambda message: None) as stage:
        put(stage.destination)
        step(stage)
        forget_counts()
        assert count(hour + dt.timedelta(minutes=35)) == 1
        put(stage.destination)
        step(stage)
        assert count(hour + dt.timedelta(minutes=5)) == 2
