"""The SQL of the how-to pages does what the pages say."""

from __future__ import annotations

import uuid

import pytest
from django.db import connection
from django.utils import timezone

from django_txmsg.models import (
    BulkOperation,
    InboxMessage,
    KeyTail,
    OutboxMessage,
    QueueMessage,
    QueueSubscription,
    Run,
    Schedule,
)
from tests import factories
from tests.docs.pages import ROOT, blocks
from tests.running import set_sequence


def sql_of(page: str) -> str:
    [block] = [
        block for block in blocks(ROOT / "docs" / page) if block.language == "sql"
    ]
    return block.code


def executed(sql: str) -> list[str]:
    """Execute statements. Return the texts that they return."""
    found = []
    with connection.cursor() as cursor:
        for one in filter(str.strip, sql.split(";\n")):
            cursor.execute(one)
            if cursor.description:
                found += [text for (text,) in cursor.fetchall()]
    return found


@pytest.mark.django_db
def test_nothing_waits_in_a_copied_database() -> None:
    sent = factories.OutboxMessageFactory(dispatched=True)
    factories.OutboxMessageFactory()
    processed = factories.InboxMessageFactory()
    factories.InboxMessageFactory(parked=True)
    factories.QueueMessageFactory()
    QueueSubscription.objects.create(topic="topic:a", subscriber="tests.a")
    KeyTail.objects.create(
        broker="default", destination="a", key="k", last_id=uuid.uuid4(), last_at=1
    )
    Schedule.objects.make("tests", "made", {}, "* * * * *")
    Run.objects.create(
        run_id=uuid.uuid4(), first_run=uuid.uuid4(), turn=uuid.uuid4(), version=1,
        service="tests", flow="tests.trip", due_at=timezone.now(),
    )  # fmt: skip
    factories.BulkOperationFactory()

    executed(sql_of("how-to/several-services.md"))

    assert OutboxMessage.objects.get() == sent
    assert InboxMessage.objects.get() == processed
    for model in (QueueMessage, QueueSubscription, KeyTail, Schedule):
        assert not model.objects.exists()
    assert Run.objects.get().ended_at
    assert BulkOperation.objects.get().state == "cancelled"


@pytest.mark.postgresql
@pytest.mark.django_db
def test_values_of_sequences_are_copied() -> None:
    set_sequence(OutboxMessage, 700)
    first = factories.OutboxMessageFactory()
    statements = executed(sql_of("how-to/upgrade.md"))
    set_sequence(OutboxMessage, 1)
    executed("\n".join(statements))
    assert factories.OutboxMessageFactory().pk == first.pk + 1 == 701
