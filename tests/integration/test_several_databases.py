"""A process works in all databases that have messages. It determines its stages'
databases only once."""

from __future__ import annotations

import pytest
from django.db import connections

from django_txmsg.consuming.consumer import Consumer
from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.message import Message
from django_txmsg.models import BulkOperation, DeadLetter
from django_txmsg.monitoring import databases
from django_txmsg.stages import Stage, TransactionDefinition
from tests.faults import wait_until
from tests.running import committing, declared, put, running, step, txmsg

pytestmark = committing

asked: list[str] = []


def definition(stage: Stage) -> TransactionDefinition:
    """Return the transaction definition of a stage, and record the call."""
    asked.append(stage.name)
    return TransactionDefinition(using="default")


def refuses(message: Message) -> None:
    raise ValueError


def test_a_bulk_operation_of_another_database_is_finished() -> None:
    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(refuses, using="other", broker="apart") as stage,
    ):
        put(stage.destination, broker="apart")
        step(stage)
        assert DeadLetter.objects.using("other").exists()
        bulk.start("discard", {}, using="other")
        Consumer([]).run(once=True)
    assert BulkOperation.objects.using("other").get().state == "done"


def test_a_stages_transaction_is_found_out_once() -> None:
    path = "tests.integration.test_several_databases.definition"
    done: list[Message] = []
    with txmsg(TRANSACTION_DEFINITION=path), declared(done.append) as stage:
        with running(stage):
            asked.clear()
            for _ in range(5):
                put(stage.destination)
            wait_until(lambda: len(done) == 5)
        assert asked == []


def test_no_warning_names_a_database_without_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with txmsg():
        assert databases.left_out() == ["other"]
        monkeypatch.setattr(connections["other"], "vendor", "mysql")
        assert databases.left_out() == []
