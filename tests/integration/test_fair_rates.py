"""At a stage with a rate, a key with few messages is not delayed by a key with many.

The tests count slots and steps, not seconds, so they also work on a loaded machine.
"""

from __future__ import annotations

import datetime as dt
import uuid

import pytest
from django.db.models import F
from django.utils import timezone

from django_txmsg.models import InboxMessage, RateLine
from tests.app.models import Effect
from tests.integration.test_rates import HOUR, effect, seconds_until
from tests.running import committing, declared, put, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

FEW = 10


def headers_of(message_id: uuid.UUID, tenant: str) -> dict[str, str]:
    return {
        "txmsg-id": str(message_id),
        "content-type": "application/json",
        "tenant": tenant,
    }


def pile_up(destination: str, number: int) -> None:
    """Park `number` messages of one key, each with its slot."""
    line, now = RateLine.objects.get(), timezone.now()
    rows = []
    for slot in range(1, number + 1):
        one = uuid.uuid4()
        rows.append(
            InboxMessage(
                stage=line.stage,
                message_id=one,
                destination=destination,
                headers=headers_of(one, "many"),
                body=b"1",
                key=line.key,
                slot=slot,
                due_at=now + dt.timedelta(hours=slot),
            )
        )
    InboxMessage.objects.bulk_create(rows, batch_size=1000)
    RateLine.objects.update(taken=number + 1, origin=now.timestamp())


def processed(tenant: str) -> int:
    return Effect.objects.filter(name=tenant).count()


@pytest.mark.parametrize(
    "many", [300, pytest.param(100_000, marks=pytest.mark.soak, id="soak")]
)
def test_few_messages_are_as_soon_beside_many_as_alone(many: int) -> None:
    """A key with few messages gets the same slots whether or not another key has many
    messages. In each hour, one message of each key is processed."""
    with declared(effect, rate="1/h", per="tenant") as one:
        put(one.destination, headers=headers_of(uuid.uuid4(), "many"))
        step(one)
        pile_up(one.destination, many)
        for _ in range(FEW):
            put(one.destination, headers=headers_of(uuid.uuid4(), "few"))
        step(one, times=FEW)
        assert (processed("few"), processed("many")) == (1, 1)
        own = InboxMessage.objects.exclude(key=RateLine.objects.earliest("pk").key)
        waits = [seconds_until(row) / HOUR for row in own.filter(slot__gt=0)]
        assert sorted(waits) == pytest.approx(range(1, FEW), abs=0.05)

        for passed in range(2, FEW + 1):
            InboxMessage.objects.filter(due_at__isnull=False).update(
                due_at=F("due_at") - dt.timedelta(hours=1)
            )
            RateLine.objects.update(origin=F("origin") - HOUR)
            step(one, times=2)
            assert (processed("few"), processed("many")) == (passed, passed)
    assert InboxMessage.objects.filter(due_at__isnull=False).count() == many + 1 - FEW
