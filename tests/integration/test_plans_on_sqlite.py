"""SQLite finds rows by the indexes that are made for the statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from django_txmsg.models import OutboxMessage, RateLine
from django_txmsg.monitoring import retention
from tests.running import committing

pytestmark = [committing, pytest.mark.sqlite, pytest.mark.usefixtures("impatient")]


def plan_of(work: Callable[[], Any]) -> str:
    """Return the plans of the statements that `work` executes."""
    said: list[str] = []

    def explained(execute: Any, sql: str, params: Any, *rest: Any) -> Any:
        if sql.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "WITH")):
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
                said.extend(str(row[-1]) for row in cursor.fetchall())
        return execute(sql, params, *rest)

    with transaction.atomic(), connection.execute_wrapper(explained):
        work()
    return "\n".join(said)


def test_the_messages_that_keep_a_line_are_found_by_their_key() -> None:
    RateLine.objects.create(stage="tests.q", key="k", origin=0, period=1, taken=1)
    (kind,) = [kind for kind in retention.kinds() if kind.model is RateLine]
    plan = plan_of(lambda: retention.count(kind, "default"))
    assert "txmsg_inbox_key (stage=? AND key=?" in plan


def test_the_rows_before_a_row_of_its_key_are_looked_up_by_their_key() -> None:
    held_back = OutboxMessage.objects.held_back
    plan = plan_of(lambda: held_back([1], 100, broker="default", services=["tests"]))
    assert "SEARCH e USING INDEX txmsg_outbox_key (key=? AND id<?)" in plan, plan
    assert "SEARCH e USING INTEGER PRIMARY KEY (rowid=?)" in plan, plan
