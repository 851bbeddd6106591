"""Messages are stored, claimed, sent and settled in any order, while leases and
receipts get lost and transactions roll back. The invariants always hold.

Hypothesis runs two relays and two consumers on one outbox, one step at a time, and may
kill any of them between two steps.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter

import pytest
from django.db import transaction
from django.db.models.functions import Now
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from django_txmsg import stages, wire
from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.outbox_claim import Claimed
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect
from tests.running import committing, put, ship, step, txmsg

DESTINATION = "tests.machine"


def leave_effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    if message.body == "fails once" and message.delivery_attempt == 1:
        raise ValueError


class Life(RuleBasedStateMachine):
    """The state machine: messages, and all events that can happen to them."""

    claims = Bundle("claims")
    sent = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        for model in (OutboxMessage, InboxMessage, DeadLetter, QueueMessage, Effect):
            model.objects.all().delete()
        self.committed: set[str] = set()
        self.rolled_back: set[str] = set()
        stages.stage(DESTINATION)(leave_effect)
        self.stage = stages.find([DESTINATION])[0]

    def teardown(self) -> None:
        """Repair all faults, and check that each message takes effect once."""
        try:
            OutboxMessage.objects.update(lease_until=None, due_at=Now())
            ship()
            for _ in range(4):
                while QueueMessage.objects.exists():
                    step(self.stage)
                step(self.stage)
            done = set(Effect.objects.values_list("message_id", flat=True))
            assert done == self.committed, "what was committed is lost"
        finally:
            stages.unregister(DESTINATION)

    @rule(
        body=st.sampled_from(["good", "fails once"]),
        key=st.sampled_from([None, "a", "b"]),
        rolls_back=st.booleans(),
    )
    def store(self, body: str, key: str | None, rolls_back: bool) -> None:
        with transaction.atomic():
            message = send_message(DESTINATION, body, key=key)
            transaction.set_rollback(rolls_back)
        (self.rolled_back if rolls_back else self.committed).add(str(message.id))

    @rule()
    def store_in_a_savepoint_that_rolls_back(self) -> None:
        with transaction.atomic():
            kept = send_message(DESTINATION, "good")
            with transaction.atomic():
                lost = send_message(DESTINATION, "good")
                transaction.set_rollback(True)
        self.committed.add(str(kept.id))
        self.rolled_back.add(str(lost.id))

    @rule(target=claims, limit=st.integers(1, 4))
    def claim(self, limit: int) -> tuple[uuid.UUID, list[Claimed]]:
        token = uuid.uuid4()
        rows = OutboxMessage.objects.claim(
            broker="default", token=token, lease=600.0, limit=limit
        )
        return token, rows

    @rule()
    def leases_run_out(self) -> None:
        OutboxMessage.objects.filter(lease_until__isnull=False).update(
            lease_until=Now() - dt.timedelta(seconds=1)
        )

    @rule(target=sent, claim=consumes(claims), receipt=st.booleans())
    def send(self, claim: tuple[uuid.UUID, list[Claimed]], receipt: bool) -> object:
        """Send the batch. If `receipt` is false, the broker's receipt is lost, so the
        relay never settles these rows."""
        token, rows = claim
        with get_broker("default").open() as session:
            session.send(
                [
                    Outgoing(
                        row.destination,
                        wire.headers_of(row, "tests", row.created),
                        row.body,
                    )
                    for row in rows
                ]
            )
        return (token, rows) if receipt else multiple()

    @rule(claim=consumes(sent))
    def settle(self, claim: tuple[uuid.UUID, list[Claimed]]) -> None:
        token, rows = claim
        OutboxMessage.objects.mark_dispatched([row.id for row in rows], token)

    @rule(claim=consumes(claims), again=st.floats(0, 0.001))
    def be_rejected(self, claim: tuple[uuid.UUID, list[Claimed]], again: float) -> None:
        token, rows = claim
        for row in rows:
            OutboxMessage.objects.reschedule(row.id, token, delay=again, error="no")

    @rule()
    def relay(self) -> None:
        ship()

    @rule()
    def consume(self) -> None:
        if QueueMessage.objects.exists():
            step(self.stage)

    @rule()
    def consume_and_die_before_the_ack(self) -> None:
        row = QueueMessage.objects.first()
        if row is not None:
            step(self.stage)
            # A broker redelivers a message that was not acknowledged.
            put(DESTINATION, bytes(row.body), dict(row.headers))

    @invariant()
    def nothing_rolled_back_is_sent(self) -> None:
        ids = {one.headers["txmsg-id"] for one in QueueMessage.objects.all()}
        ids |= set(Effect.objects.values_list("message_id", flat=True))
        assert not ids & self.rolled_back

    @invariant()
    def no_effect_twice(self) -> None:
        seen = Counter(Effect.objects.values_list("message_id", flat=True))
        assert not [one for one, count in seen.items() if count > 1]

    @invariant()
    def no_row_is_forgotten(self) -> None:
        """Check that every committed message is pending, or has reached the broker."""
        stored = {str(one) for one in OutboxMessage.objects.values_list(
            "message_id", flat=True)}  # fmt: skip
        assert stored == self.committed


@committing
@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_nothing_lost_nothing_twice(examples: int) -> None:
    with txmsg():
        run_state_machine_as_test(
            Life,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
