"""Code can outlive its session or stage, for example a task of an async view. Such code
still has the context of the session or stage, but its messages belong to its own
transaction."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
from django.db import transaction

from django_txmsg import Message, outbox_session, send_message
from django_txmsg.models import OutboxMessage
from tests.running import committing, declared, send, ship, step, txmsg

pytestmark = committing


@pytest.fixture(autouse=True)
def nothing_is_wrong(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with txmsg(DISPATCH_ON_COMMIT="off"), caplog.at_level(logging.ERROR):
        yield
    assert not caplog.records


def later() -> Message:
    """Send a message in a new transaction, and check that the transaction stores it."""
    with transaction.atomic():
        message = send_message("tests.later", None)
        assert OutboxMessage.objects.filter(message_id=message.id).exists()
    return message


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_code_that_outlives_its_session_sends_outside_it(
    stores: bool, fails: bool
) -> None:
    with suppress(LookupError), outbox_session() as session:
        if stores:
            send_message("tests.q", "in the session")
        taken_along = contextvars.copy_context()
        if fails:
            raise LookupError

    message = taken_along.run(later)
    assert OutboxMessage.objects.get(message_id=message.id).session_id != session.id


@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc", "broker_only"])
def test_code_that_outlives_its_stage_sends_outside_it(mode: str) -> None:
    taken_along: list[contextvars.Context] = []

    def handler(message: Message) -> None:
        taken_along.append(contextvars.copy_context())

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        ship()
        step(stage)

    assert taken_along[0].run(later).correlation_id is None
