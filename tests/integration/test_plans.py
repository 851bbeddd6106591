"""What PostgreSQL reads for a claim: few rows, whatever it believes of the table."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_txmsg.models import OutboxMessage
from django_txmsg.outbox import send_messages
from tests.running import committing

pytestmark = [committing, pytest.mark.postgresql]

BACKLOG = 3000


@pytest.fixture(autouse=True)
def backlog() -> list[int]:
    """A backlog that came after the server last counted: nothing was pending then."""
    store(200)
    OutboxMessage.objects.update(dispatched_at=Now())
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {OutboxMessage._meta.db_table}")
    store(BACKLOG)
    pending = OutboxMessage.objects.filter(dispatched_at=None).order_by("id")
    return list(pending.values_list("id", flat=True))


def store(count: int) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": n, "key": f"k{n}"} for n in range(count)
        )


def read_for(work: Callable[[], Any]) -> int:
    """Return how many rows the plan of a statement reads in all its steps."""
    said: list[Any] = []

    def explained(execute: Any, sql: str, params: Any, *rest: Any) -> Any:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)
            (plan,) = cursor.fetchone()
            said.append(plan if isinstance(plan, list) else json.loads(plan))
            transaction.set_rollback(True)
        return execute(sql, params, *rest)

    with connection.execute_wrapper(explained):
        work()
    ((top,),) = said
    return sum(
        (step["Actual Rows"] + step.get("Rows Removed by Filter", 0))
        * step["Actual Loops"]
        for step in steps(top["Plan"])
    )


def steps(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from steps(below)


def claim(**options: Any) -> uuid.UUID:
    token = uuid.uuid4()
    claimed = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=100, **options
    )
    assert claimed
    return token


def test_rows_that_are_named_are_not_looked_for(backlog: list[int]) -> None:
    few = backlog[-10:]
    assert read_for(lambda: claim(ids=few)) < 200


def test_settling_walks_over_nothing_else(backlog: list[int]) -> None:
    few = backlog[-10:]
    token = claim(ids=few)
    settle = OutboxMessage.objects.mark_dispatched
    assert read_for(lambda: settle(few, token)) < 200


def test_a_key_is_looked_up(backlog: list[int]) -> None:
    # A hundred rows, and for each of them: is an earlier one of its key pending?
    assert read_for(claim) < 2000
